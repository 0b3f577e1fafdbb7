"""Running a module of a model on random input, without leaving a trace in it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

PROBED_TOKENS = 4
SHARED_KEYS = "shared_kv_states"
"""A dictionary in which the attention modules of some models leave their keys for other layers."""


def random_tensor(*shape: int) -> torch.Tensor:
    """Return the same numbers in every run, without advancing the global generator."""
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")


def agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two results are equal up to a few roundings of their dtype."""
    if got.shape != want.shape or got.device != want.device or not got.is_floating_point():
        return False
    limit = max(4 * torch.finfo(got.dtype).eps, 1e-5)
    difference = (got.double() - want.double()).norm()
    return bool(difference <= limit * want.double().norm())


def can_be_called_alone(attention: nn.Module) -> bool:
    """Whether a module is attention whose forward :func:`call_attention` can run."""
    parameters = inspect.signature(type(attention).forward).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed -= {name for name, parameter in parameters.items() if parameter.kind in optional_kinds}
    if not {"hidden_states", "position_embeddings"} <= parameters.keys():
        return False
    if not needed <= {"self", "hidden_states", "position_embeddings", "attention_mask", SHARED_KEYS}:
        return False
    # A forward with sharded parameters communicates with the other ranks, which do not probe at the same time.
    return not any(_is_sharded(parameter) or parameter.is_meta for parameter in attention.parameters())


def _is_sharded(parameter: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def hidden_size_of(attention: nn.Module) -> int | None:
    """The size of the hidden states that a module takes, read from its first linear layer."""
    size = next((module.in_features for module in attention.modules() if hasattr(module, "in_features")), None)
    return size if isinstance(size, int) else None


def call_attention(attention: nn.Module, hidden_states: torch.Tensor, embedding: Any) -> torch.Tensor:
    """Run the forward of an attention module's class, without its hooks."""
    forward: Callable[..., Any] = type(attention).forward
    shares_keys = SHARED_KEYS in inspect.signature(forward).parameters
    extra: dict[str, Any] = {SHARED_KEYS: {}} if shares_keys else {}
    output = forward(
        attention, hidden_states=hidden_states, position_embeddings=embedding, attention_mask=None, **extra
    )
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


@contextlib.contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its submodules on exit."""
    submodules = list(module.modules())
    holders = [part for each in submodules for part in (vars(each), each._parameters, each._buffers, each._modules)]
    before = [dict(holder) for holder in holders]
    try:
        yield
    finally:
        for holder, attributes in zip(holders, before, strict=True):
            holder.clear()
            holder.update(attributes)
