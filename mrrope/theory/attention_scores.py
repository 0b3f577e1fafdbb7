"""The contribution of the middle pairs to a real model's attention scores, over distance.

Queries and keys are recorded before rotation while the model reads a text within its native length. Random pairs of
them are then rotated as if they were at each distance, so that only the rotation changes and not the content.
Sliding-window layers are left out if the model also has global ones.
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
from mrrope.tables.frequency_table import FrequencyTable


@dataclass(frozen=True)
class RotatedCall:
    """The input of one rotary op call: after the norm, before the rotation."""

    heads: tuple[torch.Tensor, ...]
    """q and k, or the only one of them: ``[heads, tokens, pairs]``, complex."""
    layer_type: str | None
    """The layer's type in the model's configuration, if it has one."""


class RecordedHeads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the input of every rotary op call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RotatedCall] = []
        self.layer_type: str | None = None

    def enter_layer(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: note the type of the layer that runs."""
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
            # Rotating by -angle is conjugate to rotating the conjugate by +angle.
            inputs = tuple(x.conj() if given["conjugate"] else x for x in pairs)
            self.calls.append(RotatedCall(inputs, self.layer_type))
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_layers(model: nn.Module) -> Iterator[RecordedHeads]:
    """Record a model's rotary inputs, with the types of its layers."""
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
    """The first sequence of a batch: ``[heads, tokens, components]``, float64 on the CPU."""
    return (heads[0] if layout == "bhsd" else heads[0].transpose(0, 1)).double().cpu()


def rms_normed(heads: torch.Tensor, weight: torch.Tensor, eps: float, over: str) -> torch.Tensor:
    """RMSNorm as in qk_norm_rotary; ``weight`` includes its offset."""
    dims = (-1,) if over == "head" else (0, -1)
    by_head = weight if over == "head" else weight.view(len(heads), 1, -1)
    return heads * (heads.square().mean(dims, keepdim=True) + eps).rsqrt() * by_head


def in_pairs(heads: torch.Tensor, pairing: str) -> torch.Tensor:
    """Each pair of components as one complex number."""
    first, second = heads.chunk(2, dim=-1) if pairing == "halves" else (heads[..., 0::2], heads[..., 1::2])
    return torch.complex(first, second)


@dataclass(frozen=True)
class PairProducts:
    """q conj(k) of every pair of components.

    The score at a distance is the real part of their sum, each rotated by its pair's angle.
    """

    values: torch.Tensor
    """``[layers * heads * samples, pairs]``."""
    layers: str
    """A description of the layers."""


def pair_products(model: nn.Module, tokens: Sequence[int], *, samples: int = 50, seed: int = 0) -> PairProducts:
    """Products of random token pairs of a text, for every head of the global layers."""
    # Fused norms run an op that rotates, too.
    with patched(model, "rope", fuse_norms=False), torch.no_grad(), recorded_layers(model) as recorded:
        model(input_ids=torch.tensor([list(tokens)], device=next(model.parameters()).device), use_cache=False)
    if not recorded.calls:
        raise ValueError(f"model must rotate by the fused op for this, and {type(model).__name__} does not")
    # Some models rotate in sliding-window layers only.
    calls = [call for call in recorded.calls if not is_local(call.layer_type)] or recorded.calls
    if any(len(call.heads) != 2 for call in calls):
        # q and k cannot be matched: some layers share the k of another.
        raise ValueError(f"model must rotate q and k together for this, and {type(model).__name__} does so one by one")
    rng = torch.Generator().manual_seed(seed)
    products = []
    for q, k in (call.heads for call in calls):
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        queries, keys = (torch.randint(len(tokens), (samples,), generator=rng) for _ in "qk")
        products.append((q[:, queries] * k[:, keys].conj()).flatten(0, 1))
    kinds = sorted({call.layer_type for call in calls if call.layer_type is not None})
    shown = f"{len(calls)} of {len(recorded.calls)} layers that rotate"
    return PairProducts(torch.cat(products), f"{shown}: {', '.join(kinds)}" if kinds else shown)


def scores(products: torch.Tensor, table: FrequencyTable, distances: torch.Tensor, pairs: slice) -> torch.Tensor:
    """The contribution of some pairs to the attention scores, ``[samples, distances]``.

    The attention factor is left out; it is the same for all methods that have one.
    """
    angles = table.inv_freq[pairs, None] * distances.double()
    some = products[:, pairs]
    rotated = some.real @ angles.cos() - some.imag @ angles.sin()
    return rotated.div(table.rotary_dim**0.5)
