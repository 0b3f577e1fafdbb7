"""Whether a model's attention leaves what the rotary embedding gives to the functions that apply it.

Custom attention may rotate by code of its own. Each class of attention module is probed: called for a few tokens with
opaque tensors where cosines and sines go, it may pass them on, but not compute with them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mrrope.hf.conventions import Apply, RotaryFunction
from mrrope.hf.fusion import attention_proxy

logger = logging.getLogger(__name__)


class ComputedWithError(Exception):
    """What was called with an opaque tensor."""


class OpaqueTensor(torch.Tensor):
    """May be passed on and moved, and has a shape."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if name not in ("__get__", "to", "cpu", "cuda", "size", "dim"):
            raise ComputedWithError(name)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def own_rotation(owner: nn.Module, functions: list[RotaryFunction], embedding: tuple[torch.Tensor, ...]) -> str | None:
    """How an attention module computes with what a rotary embedding gives, if one in its owner does."""
    opaque = tuple(part.as_subclass(OpaqueTensor) for part in embedding)
    rotated: set[type] = set()
    with _functions_take_opaque(functions) as calls:
        for attention in _innermost(owner):
            if type(attention) in rotated:
                continue
            try:
                _probe(attention, opaque)
            except ComputedWithError as error:
                return f"{type(attention).__name__} computes with cosines and sines itself: {error}"
            except Exception:  # its own code may raise anything where it is not called as it expects
                logger.debug("%s cannot be probed", type(attention).__name__, exc_info=True)
            if calls:  # layers of one class may differ in whether they rotate
                rotated.add(type(attention))
                calls.clear()
    return None


@torch.no_grad()
def _probe(attention: nn.Module, embedding: tuple[OpaqueTensor, ...]) -> None:
    width = attention_proxy.width_of(attention)
    weight = next((parameter for parameter in attention.parameters() if parameter.is_floating_point()), None)
    # Its own hooks are not run; those of its parts would be.
    parts = [part for part in attention.modules() if part is not attention]
    is_hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    if width is None or weight is None or is_hooked:
        return
    hidden_states = attention_proxy.random(1, attention_proxy.TRIED_TOKENS, width).to(weight)
    packed = tuple(part.to(weight.device) for part in embedding)
    with attention_proxy.left_as_it_was(attention):
        attention.eval()
        attention_proxy.try_call(attention, attention, hidden_states, packed if len(packed) > 1 else packed[0])


def _innermost(owner: nn.Module) -> Iterator[nn.Module]:
    """Modules that can be called with position_embeddings, and have no such parts."""
    candidates = [module for module in owner.modules() if attention_proxy.takes_embedding(module)]
    for module in candidates:
        parts = set(module.modules()) - {module}
        if not any(candidate in parts for candidate in candidates):
            yield module


@contextlib.contextmanager
def _functions_take_opaque(functions: list[RotaryFunction]) -> Iterator[list[str]]:
    """Meanwhile these functions give heads back as they are where they are called with opaque tensors; yields a list
    that gets their names."""
    calls: list[str] = []

    def opaque(function: RotaryFunction, original: Apply) -> Apply:
        def apply_rotary(*args: Any, **kwargs: Any) -> Any:
            form = function.form
            if not isinstance(form.argument(form.embedding[0], args, kwargs), OpaqueTensor):
                return original(*args, **kwargs)
            calls.append(function.name)
            heads = [form.argument(name, args, kwargs) for name in form.heads]
            return heads[0] if len(heads) == 1 else tuple(head for head in heads if head is not None)

        return apply_rotary

    with contextlib.ExitStack() as stack:
        for function in functions:
            module = importlib.import_module(function.module)
            original = getattr(module, function.name)
            stack.callback(setattr, module, function.name, original)
            setattr(module, function.name, opaque(function, original))
        yield calls
