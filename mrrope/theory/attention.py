"""What the middle pairs of a real model's heads add to its attention scores, over distance.

Queries and keys are those that the model rotates while it reads a text within its native length. Random ones of them
are put at one distance after another: only the rotation between them changes, not what the tokens say. Layers that see
only a window never look that far: they are left out where others rotate too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mrrope.hf.patch import patched
from mrrope.hf.rope_config import is_local
from mrrope.tables import FrequencyTable


@dataclass(frozen=True)
class RotatedCall:
    """What one call of a rotary op rotates, normed but not yet turned."""

    heads: tuple[torch.Tensor, ...]
    """q and k, or one of them where that comes alone: ``[heads, tokens, pairs]``, complex."""
    layer_type: str | None
    """As the model's configuration calls it; None where it makes no difference."""


class RecordedHeads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what every call of a rotary op rotates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RotatedCall] = []
        self.layer_type: str | None = None

    def enter_layer(self, module: nn.Module, args: Any) -> None:
        """Told that a part of a layer is called."""
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or []
        layer: Any = module.layer_idx
        self.layer_type = kinds[layer] if layer < len(kinds) else None

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
            rotary_dim = 2 * (given["table"].shape[-1] - 1)
            pairs = [in_pairs(x[..., :rotary_dim], given["pairing"]) for x in heads]
            # A rotation backwards is one forwards in the mirror.
            turned = tuple(x.conj() if given["conjugate"] else x for x in pairs)
            self.calls.append(RotatedCall(turned, self.layer_type))
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_layers(model: nn.Module) -> Iterator[RecordedHeads]:
    """Keeps what a model rotates, with the kinds of its layers."""
    recorded = RecordedHeads()
    parts = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    hooks = [part.register_forward_pre_hook(recorded.enter_layer) for part in parts]
    try:
        with recorded:
            yield recorded
    finally:
        for hook in hooks:
            hook.remove()


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


@dataclass(frozen=True)
class PairProducts:
    """q conj(k) of every pair of components: the score at a distance is the real part of their sum, each turned by its
    angle.
    """

    values: torch.Tensor
    """``[layers * heads * samples, pairs]``."""
    layers: str
    """Which layers these are of, in words."""


def pair_products(model: nn.Module, tokens: Sequence[int], *, samples: int = 50, seed: int = 0) -> PairProducts:
    """Of random tokens of a text, in every head of the layers that see all of it."""
    with patched(model, "rope"), torch.no_grad(), recorded_layers(model) as recorded:
        model(input_ids=torch.tensor([list(tokens)], device=next(model.parameters()).device), use_cache=False)
    if not recorded.calls:
        raise ValueError(f"model must rotate by the fused op for this, and {type(model).__name__} does not")
    # Some models rotate in layers with a window alone.
    calls = [call for call in recorded.calls if not is_local(call.layer_type)] or recorded.calls
    if any(len(call.heads) != 2 for call in calls):
        # Which q goes with which k cannot be told: some layers have no k of their own.
        raise ValueError(f"model must rotate q and k together for this, and {type(model).__name__} does so one by one")
    chance = torch.Generator().manual_seed(seed)
    products = []
    for q, k in (call.heads for call in calls):
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        queries, keys = (torch.randint(len(tokens), (samples,), generator=chance) for _ in "qk")
        products.append((q[:, queries] * k[:, keys].conj()).flatten(0, 1))
    kinds = sorted({call.layer_type for call in calls if call.layer_type is not None})
    shown = f"{len(calls)} of {len(recorded.calls)} layers that rotate"
    return PairProducts(torch.cat(products), f"{shown}: {', '.join(kinds)}" if kinds else shown)


def scores(products: torch.Tensor, table: FrequencyTable, distances: torch.Tensor, pairs: slice) -> torch.Tensor:
    """What some pairs add to the attention scores, ``[samples, distances]``, before the attention factor: that is the
    same for all methods that have one.
    """
    angles = table.inv_freq[pairs, None] * distances.double()
    some = products[:, pairs]
    turned = some.real @ angles.cos() - some.imag @ angles.sin()
    return turned.div(table.rotary_dim**0.5)
