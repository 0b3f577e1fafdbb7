"""Attention modules of a patched model, run on a stand-in for themselves.

What a patched model does in another way, the code of its attention modules need not know: it runs on a stand-in that
hands out something else for some of the module's parts, and the table travels to the rotation with a note of what the
stand-in left to it, or did already. The note is made anew in every call and belongs to that call alone: there is no
state between calls, and the modules themselves stay what they were.

Whether an attention module does the same on a stand-in is found by trying.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mrrope.hf import rope_config
from mrrope.hf.conventions import PACKED_TABLE_DTYPE, NotedTable
from mrrope.hf.fusion.class_swap import Derive, derived

TRIED_TOKENS = 4
KEPT_FOR_OTHER_LAYERS = "shared_kv_states"
"""A dictionary that attention modules of some models are called with, to leave their keys in."""

Begin = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], tuple[Any, NotedTable]]
"""From a module, what it keeps, positions and table to the stand-in for one call, and the table with its note."""


class StandIn:
    """Stands for an attention module in one call of its forward.

    Attention functions get it for the module, so that it gives itself out as one, and writes go through to it.
    """

    def __init__(self, attention: nn.Module) -> None:
        object.__setattr__(self, "_mrrope_attention", attention)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # torch.compile asks one that was never initialized, too.
        return type(vars(self).get("_mrrope_attention", self))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mrrope_attention, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._mrrope_attention, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mrrope_attention, name)


def class_on_stand_ins(original: type[nn.Module], attribute: str, begin: Begin, derive: Derive) -> type[nn.Module]:
    """The class of an attention module, but run on stand-ins in calls of a patched model.

    What ``begin`` needs the module keeps under ``attribute``; without it, it runs as it did. ``derive`` is who asks.
    """
    place = list(inspect.signature(original.forward).parameters).index("position_embeddings") - 1

    @functools.wraps(original.forward)
    def on_stand_in(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept = vars(self).get(attribute)
        if kept is None:
            return original.forward(self, *args, **kwargs)
        is_named = "position_embeddings" in kwargs
        embedding = kwargs["position_embeddings"] if is_named else args[place] if len(args) > place else None
        if not (isinstance(embedding, tuple) and len(embedding) == 2 and embedding[1].dtype == PACKED_TABLE_DTYPE):
            return original.forward(self, *args, **kwargs)
        stand_in, table = begin(self, kept, *embedding)
        if is_named:
            kwargs["position_embeddings"] = (embedding[0], table)
        else:
            args = (*args[:place], (embedding[0], table), *args[place + 1 :])
        result = original.forward(stand_in, *args, **kwargs)
        table.expect_nothing_waiting()
        return result

    return derived(original, on_stand_in, derive)


# --- trying ---


def takes_embedding(attention: nn.Module) -> bool:
    """Whether a module looks like attention whose own code can be called by itself."""
    parameters = inspect.signature(type(attention).forward).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed -= {name for name, parameter in parameters.items() if parameter.kind in optional_kinds}
    if not {"hidden_states", "position_embeddings"} <= parameters.keys():
        return False
    if not needed <= {"self", "hidden_states", "position_embeddings", "attention_mask", KEPT_FOR_OTHER_LAYERS}:
        return False
    # Sharded, a part of a model cannot be tried without the others.
    return not any(is_sharded(parameter) or parameter.is_meta for parameter in attention.parameters())


def can_be_tried(attention: nn.Module) -> bool:
    """Whether calling the module is calling its own code, with nothing of others around it."""
    is_hooked = any(module._forward_hooks or module._forward_pre_hooks for module in attention.modules())
    return takes_embedding(attention) and "forward" not in vars(attention) and not is_hooked


def width_of(attention: nn.Module) -> int | None:
    """How wide the hidden states are that a module takes, if it tells."""
    width = next((module.in_features for module in attention.modules() if hasattr(module, "in_features")), None)
    return width if isinstance(width, int) else None


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter's values are spread over several processes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def try_call(attention: nn.Module, runs: Any, hidden_states: torch.Tensor, embedding: Any) -> torch.Tensor:
    """What a module's own forward gives for a few tokens, run on itself or on a stand-in."""
    forward: Callable[..., Any] = type(attention).forward
    keeps = KEPT_FOR_OTHER_LAYERS in inspect.signature(forward).parameters
    extra: dict[str, Any] = {KEPT_FOR_OTHER_LAYERS: {}} if keeps else {}
    output = forward(runs, hidden_states=hidden_states, position_embeddings=embedding, attention_mask=None, **extra)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Afterwards a module and its parts have the attributes that they had, whatever their code writes meanwhile."""
    parts = list(module.modules())
    holders = [holder for part in parts for holder in (vars(part), part._parameters, part._buffers, part._modules)]
    before = [dict(holder) for holder in holders]
    try:
        yield
    finally:
        for holder, attributes in zip(holders, before, strict=True):
            holder.clear()
            holder.update(attributes)


def tried_embeddings(rotary: nn.Module, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Positions and table, as a patched model's attention gets them, for each kind of layer."""
    for layer_type in rotary.ladders:  # type: ignore[union-attr]
        table: torch.Tensor = getattr(rotary, rope_config.attribute(layer_type, "packed_table"))
        table = table if rotary.ladders[layer_type].is_fixed else table[:1]  # type: ignore[index,union-attr]
        positions = torch.arange(1, TRIED_TOKENS + 1, device=x.device)[None]
        if table.dim() == 3:
            positions = positions.expand(int(table[:, 1].max()) + 1, -1, -1)
        yield positions, table.to(x.device)


def random(*shape: int) -> torch.Tensor:
    """The same numbers in every run, and none taken from anybody else's."""
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")


def agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To a few roundings of the results' dtype."""
    if got.shape != want.shape or got.device != want.device or not got.is_floating_point():
        return False
    limit = max(4 * torch.finfo(got.dtype).eps, 1e-5)
    difference = (got.double() - want.double()).norm()
    return bool(difference <= limit * want.double().norm())
