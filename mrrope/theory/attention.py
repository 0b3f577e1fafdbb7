"""What the middle pairs of a real model's heads add to its attention scores, over distance.

Queries and keys are those that the model rotates while it reads a text within its native length. Random ones of them
are put at one distance after another: only the rotation between them changes, not what the tokens say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrrope.patching import patched
from mrrope.tables import FrequencyTable


class RecordedHeads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what every call of a rotary op rotates, normed but not yet turned: ``[heads, tokens, pairs]``, complex."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rotary_dim = rotary_dim
        self.calls: list[tuple[torch.Tensor, ...]] = []
        """q and k of each call, or one of them where that comes alone."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        norms = op is torch.ops.mrrope.qk_norm_rotary.default
        if norms or op is torch.ops.mrrope.rotary.default:
            given: dict[str, Any] = {argument.name: argument.default_value for argument in op._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            heads = [first_sequence(x, given["layout"]) for x in given["heads"]]
            if norms:
                heads = [
                    rms_normed(x, weight.double().cpu() + given["weight_offset"], given["eps"], given["over"])
                    for x, weight in zip(heads, given["weights"], strict=True)
                ]
            pairs = [in_pairs(x[..., : self.rotary_dim], given["pairing"]) for x in heads]
            # A rotation backwards is one forwards in the mirror.
            self.calls.append(tuple(x.conj() if given["conjugate"] else x for x in pairs))
        return op(*args, **(kwargs or {}))


def first_sequence(heads: torch.Tensor, layout: str) -> torch.Tensor:
    """``[heads, tokens, components]``, in double precision."""
    return (heads[0] if layout == "bhsd" else heads[0].transpose(0, 1)).double().cpu()


def rms_normed(heads: torch.Tensor, weight: torch.Tensor, eps: float, over: str) -> torch.Tensor:
    """What the op makes of heads before it turns them; the weight has its offset already."""
    dims = (-1,) if over == "head" else (0, -1)
    by_head = weight if over == "head" else weight.view(len(heads), 1, -1)
    return heads * (heads.square().mean(dims, keepdim=True) + eps).rsqrt() * by_head


def in_pairs(heads: torch.Tensor, pairing: str) -> torch.Tensor:
    """Each pair of components as a complex number."""
    first, second = heads.chunk(2, dim=-1) if pairing == "halves" else (heads[..., 0::2], heads[..., 1::2])
    return torch.complex(first, second)


def pair_products(
    model: torch.nn.Module, tokens: Sequence[int], rotary_dim: int, *, samples: int = 50, seed: int = 0
) -> torch.Tensor:
    """q conj(k) of every pair of components, ``[layers * heads * samples, pairs]``: the score at a distance is the real
    part of their sum, each turned by its angle.
    """
    with patched(model, "rope"), torch.no_grad(), RecordedHeads(rotary_dim) as recorded:
        model(input_ids=torch.tensor([list(tokens)], device=next(model.parameters()).device), use_cache=False)
    if not recorded.calls:
        raise ValueError(f"model must rotate by the fused op for this, and {type(model).__name__} does not")
    if any(len(call) != 2 for call in recorded.calls):
        # Which q goes with which k cannot be told: some layers have no k of their own.
        raise ValueError(f"model must rotate q and k together for this, and {type(model).__name__} does so one by one")
    chance = torch.Generator().manual_seed(seed)
    products = []
    for q, k in recorded.calls:
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        queries, keys = (torch.randint(len(tokens), (samples,), generator=chance) for _ in "qk")
        products.append((q[:, queries] * k[:, keys].conj()).flatten(0, 1))
    return torch.cat(products)


def scores(products: torch.Tensor, table: FrequencyTable, distances: torch.Tensor, pairs: slice) -> torch.Tensor:
    """What some pairs add to the attention scores, ``[samples, distances]``, before the attention factor: that is the
    same for all methods that have one.
    """
    angles = table.inv_freq[pairs, None] * distances.double()
    some = products[:, pairs]
    turned = some.real @ angles.cos() - some.imag @ angles.sin()
    return turned.div(table.rotary_dim**0.5)
