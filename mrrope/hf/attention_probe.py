"""Probe whether a model's attention passes cos/sin on to the functions that apply RoPE.

Custom attention may rotate with its own code. The probe calls each class of attention module on a few tokens, with
opaque tensors in place of cos/sin: the module may pass them on, but not compute with them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mrrope.hf import probing
from mrrope.hf.conventions import Apply, RotaryFunction


class ComputedWithError(Exception):
    """An opaque tensor was passed to this function."""


class OpaqueTensor(torch.Tensor):
    """A tensor that can be passed on and moved between devices, and raises where it is computed with."""

    selections: tuple[str, ...] = ()
    """The functions that select tokens."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if name not in ("__get__", "to", "cpu", "cuda", "size", "dim", *cls.selections):
            raise ComputedWithError(name)
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name in cls.selections and result.shape[-1] != args[0].shape[-1]:
            raise ComputedWithError(name)
        return result


class OpaqueTokens(OpaqueTensor):
    """An opaque tensor by token, of which tokens can be selected."""

    selections = ("__getitem__", "index_select")


def own_rotation(
    owner: nn.Module, functions: list[RotaryFunction], embedding: tuple[torch.Tensor, ...]
) -> tuple[str | None, dict[str, Exception]]:
    """Return how an attention module in ``owner`` computes with cos/sin itself, or None where none does.

    The second value has the classes, other than transformers' own, of which a call raised an error of its own before it
    reached one of the functions, so that they may or may not do so.
    """
    kind = OpaqueTokens if any(function.by_token for function in functions) else OpaqueTensor
    opaque = tuple(part.as_subclass(kind) for part in embedding)
    rotated: set[type] = set()
    failed: dict[str, Exception] = {}
    with _functions_take_opaque(functions) as calls:
        for attention in _innermost(owner):
            if type(attention) in rotated:
                continue
            try:
                _probe(attention, opaque)
            except ComputedWithError as error:
                return f"{type(attention).__name__} computes with cosines and sines itself: {error}", failed
            except Exception as error:  # its own code may raise anything when called without its usual arguments
                # Code of transformers itself is tested by family, and some of it does not run alone.
                if not calls and not type(attention).__module__.startswith("transformers.models."):
                    failed.setdefault(type(attention).__name__, error)
            if calls:  # layers of one class may differ in whether they rotate: probe until one does
                rotated.add(type(attention))
                calls.clear()
    return None, failed


@torch.no_grad()
def _probe(attention: nn.Module, embedding: tuple[OpaqueTensor, ...]) -> None:
    width = probing.hidden_size_of(attention)
    weight = next((parameter for parameter in attention.parameters() if parameter.is_floating_point()), None)
    # forward is called directly, which skips the module's own hooks but not those of its submodules.
    parts = [part for part in attention.modules() if part is not attention]
    is_hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    if width is None or weight is None or is_hooked:
        return
    hidden_states = probing.random_tensor(1, probing.PROBED_TOKENS, width).to(weight)
    packed = tuple(part.to(weight.device) for part in embedding)
    with probing.attributes_restored(attention):
        attention.eval()
        probing.call_attention(attention, hidden_states, packed if len(packed) > 1 else packed[0])


def _innermost(owner: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that take position_embeddings and contain no other module that does."""
    candidates = [module for module in owner.modules() if probing.can_be_called_alone(module)]
    for module in candidates:
        parts = set(module.modules()) - {module}
        if not any(candidate in parts for candidate in candidates):
            yield module


@contextlib.contextmanager
def _functions_take_opaque(functions: list[RotaryFunction]) -> Iterator[list[str]]:
    """Monkeypatch the functions to return heads unrotated when called with opaque tensors.

    Yields:
        A list to which the name of each function is appended when it is called that way.
    """
    calls: list[str] = []

    def opaque(function: RotaryFunction, original: Apply) -> Apply:
        def apply_rotary(*args: Any, **kwargs: Any) -> Any:
            form = function.form
            if not isinstance(form.argument(form.embedding[0], args, kwargs), OpaqueTensor):
                return original(*args, **kwargs)
            calls.append(function.name)
            heads = (form.argument(name, args, kwargs) for name in form.heads)
            return form.returned([head for head in heads if head is not None])

        return apply_rotary

    with contextlib.ExitStack() as stack:
        for function in functions:
            module = importlib.import_module(function.module)
            original = getattr(module, function.name)
            stack.callback(setattr, module, function.name, original)
            setattr(module, function.name, opaque(function, original))
        yield calls
