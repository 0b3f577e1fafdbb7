"""Probe whether a model's attention passes cos/sin on to the functions that apply RoPE, and norms what they return.

Custom attention may rotate with its own code. The probe calls each class of attention module on a few tokens, with
opaque tensors in place of cos/sin: the module may pass them on, but not compute with them. A norm of rotated queries
cancels their factors.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope.hf import probing
from mrrope.hf.conventions import Apply, RotaryFunction

CANCELLED = 0.01
"""Upper bound of the relative change of heads whose factor of two a norm cancels: its eps, and rounding."""


class ComputedWithError(Exception):
    """An opaque tensor was passed to this function."""


@dataclass(frozen=True)
class OpaqueCall:
    """A call of an apply function with opaque tensors."""

    function: RotaryFunction
    queries: torch.Tensor
    """What it returned in place of rotated queries."""


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
    opaque = _opaque(functions, embedding)
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


def norm_of_queries(
    owner: nn.Module, functions: list[RotaryFunction], embedding: tuple[torch.Tensor, ...], rotary_dim: int
) -> str | None:
    """Return the class of a module that norms rotated queries in ``owner``, or None where there is none.

    Attention that does not run alone is not probed.
    """
    opaque = _opaque(functions, embedding)
    rotated: set[type] = set()
    for attention in _innermost(owner):
        if type(attention) in rotated:
            continue
        # Its own code may raise anything when called without its usual arguments.
        with contextlib.suppress(Exception), _functions_take_opaque(functions) as calls, _inputs_noted() as inputs:
            _probe(attention, opaque)
        if calls:
            rotated.add(type(attention))
        for call, (module, x) in itertools.product(calls, inputs):
            is_of_queries = x.untyped_storage().data_ptr() == call.queries.data_ptr()
            rotates_last = call.function.convention.rotates_last
            if is_of_queries and _cancels_factors(module, x, rotary_dim, rotates_last=rotates_last):
                return type(module).__name__
    return None


@contextlib.contextmanager
def _inputs_noted() -> Iterator[list[tuple[nn.Module, torch.Tensor]]]:
    """Note the modules that are called with one tensor alone, each with the tensor, which keeps its memory."""
    inputs: list[tuple[nn.Module, torch.Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if len(given) == 1 and not isinstance(given[0], OpaqueTensor):
            inputs.append((module, given[0]))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield inputs
    finally:
        hook.remove()


@torch.no_grad()
def _cancels_factors(module: nn.Module, like: torch.Tensor, rotary_dim: int, *, rotates_last: bool) -> bool:
    """Whether a module returns the same heads where their rotated components are twice as large."""
    heads = probing.random_tensor(*like.shape).to(like)
    factors = torch.ones(like.shape[-1], device=like.device, dtype=like.dtype)
    factors[slice(-rotary_dim, None) if rotates_last else slice(rotary_dim)] = 2.0
    before, after = module(heads), module(heads * factors)
    if not isinstance(before, torch.Tensor) or before.shape != heads.shape:
        return False
    return bool((after - before).double().norm() < CANCELLED * before.double().norm())


def _opaque(functions: list[RotaryFunction], embedding: tuple[torch.Tensor, ...]) -> tuple[OpaqueTensor, ...]:
    kind = OpaqueTokens if any(function.by_token for function in functions) else OpaqueTensor
    return tuple(part.as_subclass(kind) for part in embedding)


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
def _functions_take_opaque(functions: list[RotaryFunction]) -> Iterator[list[OpaqueCall]]:
    """Monkeypatch the functions to return heads unrotated when called with opaque tensors.

    Yields:
        A list to which every call of that kind is appended.
    """
    calls: list[OpaqueCall] = []

    def opaque(function: RotaryFunction, original: Apply) -> Apply:
        def apply_rotary(*args: Any, **kwargs: Any) -> Any:
            form = function.form
            if not isinstance(form.argument(form.embedding[0], args, kwargs), OpaqueTensor):
                return original(*args, **kwargs)
            given = (form.argument(name, args, kwargs) for name in form.heads)
            heads = [head for head in given if head is not None]
            heads[0] = heads[0].clone()  # in memory of its own, by which it is known again
            calls.append(OpaqueCall(function, heads[0]))
            return form.returned(heads)

        return apply_rotary

    with contextlib.ExitStack() as stack:
        for function in functions:
            module = importlib.import_module(function.module)
            original = getattr(module, function.name)
            stack.callback(setattr, module, function.name, original)
            setattr(module, function.name, opaque(function, original))
        yield calls
