"""Models that norm q and k just before they rotate them, made to do both in one op.

An attention module of such a model calls its norms, and a little later the function that applies RoPE. In a patched
model its forward runs on a stand-in for itself, whose norms hand their input on as it is and leave a note with the
table that travels to that function; there the op norms and rotates at once. The note is made anew in every call and
belongs to that call alone: there is no state between calls, and the modules themselves stay what they were.

Which modules are norms of that kind, and whether an attention module does the same with and without its notes, is found
by trying. What changes later is looked at in every call: a norm that has hooks or another eps, is sharded or replaced,
or keeps its weights in another dtype than q and k come in, norms by its own code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope import model_rope
from mrrope.conventions import PACKED_TABLE_DTYPE, DeferredNorm, TableAfterNorms

logger = logging.getLogger(__name__)

FORMS = "_mrrope_norms"
"""Where an attention module keeps how its norms norm, by their names."""
ORIGINAL = "_mrrope_original"
"""Where the class of an attention module whose norms wait keeps the one that it was made from."""
EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon")
TRIED_TOKENS = 4
KEPT_FOR_OTHER_LAYERS = "shared_kv_states"
"""A dictionary that attention modules of some models are called with, to leave their keys in."""


@dataclass(frozen=True)
class NormForm:
    """How a module norms: x / rms(x) * (weight + weight_offset) over the last dimension."""

    module_class: type
    eps_name: str
    eps: float
    weight_offset: float

    def may_wait(self, norm: nn.Module, x: torch.Tensor) -> bool:
        """Whether a norm of this class is still what it was, so that the op may do its work on ``x`` later."""
        weight = norm.weight
        return (
            "forward" not in vars(norm)
            and getattr(norm, self.eps_name, None) == self.eps
            and not (norm._forward_hooks or norm._forward_pre_hooks)
            and not (norm._backward_hooks or norm._backward_pre_hooks)
            and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
            and type(weight) in (nn.Parameter, torch.Tensor)
            and weight.dtype == x.dtype
            and weight.device == x.device
            and weight.shape == x.shape[-1:]
        )


def form_of(norm: nn.Module) -> NormForm | None:
    """How a module norms, if it is an RMSNorm."""
    tensors = dict(norm.named_parameters()) | dict(norm.named_buffers())
    weight = tensors.get("weight")
    if len(tensors) != 1 or type(weight) is not nn.Parameter or weight.dim() != 1 or weight.is_meta:
        return None
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(norm, name, None), float)), None)
    if eps_name is None:
        return None
    eps = float(getattr(norm, eps_name))
    for offset in (0.0, 1.0):
        form = NormForm(type(norm), eps_name, eps, offset)
        # Small ones too, where eps counts.
        if all(_norms_as(form, norm, weight, scale) for scale in (1.0, eps**0.5)):
            return form
    return None


def _norms_as(form: NormForm, norm: nn.Module, weight: nn.Parameter, scale: float) -> bool:
    x = (scale * _random(3, weight.numel())).to(weight)
    try:
        got = form.module_class.forward(norm, x)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, ValueError):
        return False
    x, exact_weight = x.double(), weight.double() + form.weight_offset
    want = x * (x.square().mean(-1, keepdim=True) + form.eps).rsqrt() * exact_weight
    return isinstance(got, torch.Tensor) and _agree(got, want)


class WithoutNorms:
    """Stands for an attention module in one call of its forward, and lets its norms wait.

    Attention functions get it for the module, so that it gives itself out as one, and writes go through to it.
    """

    def __init__(self, attention: nn.Module, forms: dict[str, NormForm], table: TableAfterNorms) -> None:
        object.__setattr__(self, "_mrrope_attention", attention)
        object.__setattr__(self, "_mrrope_forms", forms)
        object.__setattr__(self, "_mrrope_table", table)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # torch.compile asks one that was never initialized, too.
        return type(vars(self).get("_mrrope_attention", self))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mrrope_attention, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._mrrope_attention, name)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._mrrope_attention, name)
        form = self._mrrope_forms.get(name)
        if form is None or type(value) is not form.module_class:
            return value
        return functools.partial(_norm_or_wait, value, form, name[0], self._mrrope_table)


def _norm_or_wait(norm: nn.Module, form: NormForm, role: str, table: TableAfterNorms, x: torch.Tensor) -> torch.Tensor:
    if not form.may_wait(norm, x):
        normed: torch.Tensor = norm(x)
        return normed
    table.wait(role, DeferredNorm(norm.weight, form.eps, form.weight_offset), x)  # type: ignore[arg-type]
    return x


@functools.cache
def class_that_defers(original: type[nn.Module]) -> type[nn.Module]:
    """The class of an attention module, but with norms that wait in calls of a patched model."""
    place = list(inspect.signature(original.forward).parameters).index("position_embeddings") - 1

    @functools.wraps(original.forward)
    def with_deferred_norms(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forms = vars(self).get(FORMS)
        if forms is None:
            return original.forward(self, *args, **kwargs)
        is_named = "position_embeddings" in kwargs
        embedding = kwargs["position_embeddings"] if is_named else args[place] if len(args) > place else None
        if not (isinstance(embedding, tuple) and len(embedding) == 2 and embedding[1].dtype == PACKED_TABLE_DTYPE):
            return original.forward(self, *args, **kwargs)
        table = TableAfterNorms(embedding[1])
        if is_named:
            kwargs["position_embeddings"] = (embedding[0], table)
        else:
            args = (*args[:place], (embedding[0], table), *args[place + 1 :])
        result = original.forward(WithoutNorms(self, forms, table), *args, **kwargs)
        table.expect_nothing_waiting()
        return result

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # Pickle finds classes by their names, and this one has its original's.
        parts: Any = original.__reduce_ex__(self, protocol)
        if ORIGINAL not in vars(type(self)):
            return parts
        return (_new_that_defers, (original,), *parts[2:])

    members = {
        "forward": with_deferred_norms,
        ORIGINAL: original,
        "__reduce_ex__": reduced,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)


def _new_that_defers(original: type[nn.Module]) -> nn.Module:
    new: type[nn.Module] = class_that_defers(original)  # type: ignore[arg-type]
    return new.__new__(new)


def defer_norms(model: nn.Module, rotary: nn.Module) -> None:
    """Makes the attention modules of a patched model norm and rotate by one op, where that is the same.

    ``rotary`` is what stands for the model's rotary embedding.
    """
    for attention in model.modules():
        if not norms_wait_in(attention) and (forms := _forms_in(attention)) and _is_the_same(attention, forms, rotary):
            setattr(attention, FORMS, forms)
            if not hasattr(attention, ORIGINAL):
                attention.__class__ = class_that_defers(type(attention))  # type: ignore[arg-type]


def norms_wait_in(module: nn.Module) -> bool:
    """Whether :func:`defer_norms` changed this attention module."""
    return FORMS in vars(module)


def restore_norms(module: nn.Module) -> None:
    """Undoes what :func:`defer_norms` did to an attention module.

    A class that was made from the changed one meanwhile, as sharding does, stays, and runs the original's forward.
    """
    delattr(module, FORMS)
    if ORIGINAL in vars(type(module)):
        module.__class__ = getattr(module, ORIGINAL)


def _forms_in(attention: nn.Module) -> dict[str, NormForm]:
    """The norms of q and of k that an attention module may have, by name, if it can be tried at all."""
    parameters = inspect.signature(type(attention).forward).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed -= {name for name, parameter in parameters.items() if parameter.kind in optional_kinds}
    if not {"hidden_states", "position_embeddings"} <= parameters.keys() or "forward" in vars(attention):
        return {}
    if not needed <= {"self", "hidden_states", "position_embeddings", "attention_mask", KEPT_FOR_OTHER_LAYERS}:
        return {}
    # Sharded, a part of a model cannot be tried without the others.
    if any(_is_sharded(parameter) or parameter.is_meta for parameter in attention.parameters()):
        return {}
    if any(module._forward_hooks or module._forward_pre_hooks for module in attention.modules()):
        return {}
    found = {name: form_of(child) for name, child in attention.named_children() if name[0] in "qk"}
    forms = {name: form for name, form in found.items() if form is not None}
    roles = [name[0] for name in forms]
    return forms if len(roles) == len(set(roles)) else {}


def _is_sharded(parameter: nn.Parameter) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


class TriedTable(TableAfterNorms):
    """Sees whether what is rotated is what the norms were given, untouched, and keeps what it was rotated to."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        self.given: dict[str, tuple[torch.Tensor, int]] = {}
        self.turned: list[torch.Tensor] = []
        self.is_untouched = True

    def wait(self, role: str, norm: DeferredNorm, x: torch.Tensor) -> None:
        super().wait(role, norm, x)
        self.given[role] = x, x._version

    def take(self, role: str | None, heads: torch.Tensor) -> DeferredNorm | None:
        waiting = list(self.waiting)
        norm = super().take(role, heads)
        for taken in set(waiting) - set(self.waiting):
            x, version = self.given[taken]
            same_memory = x.untyped_storage().data_ptr() == heads.untyped_storage().data_ptr()
            whole = x.numel() == heads.numel() and heads._version == version
            self.is_untouched = self.is_untouched and same_memory and whole
        return norm

    def give(self, turned: list[torch.Tensor]) -> None:
        self.turned.extend(turned)


@torch.no_grad()
def _is_the_same(attention: nn.Module, forms: dict[str, NormForm], rotary: nn.Module) -> bool:
    """Whether an attention module gives the same with its norms deferred, by trying."""
    width = next((module.in_features for module in attention.modules() if hasattr(module, "in_features")), None)
    if not isinstance(width, int):
        return False
    # The norms' dtype is the one that is computed in; that of other weights may be one to keep them small.
    weight: Any = getattr(attention, next(iter(forms))).weight
    hidden_states = _random(1, TRIED_TOKENS, width).to(weight)
    with _left_as_it_was(attention):
        attention.eval()
        return any(_agree_on(attention, forms, hidden_states, packed) for packed in _embeddings(rotary, hidden_states))


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
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


def _agree_on(
    attention: nn.Module, forms: dict[str, NormForm], hidden_states: torch.Tensor, packed: tuple[torch.Tensor, ...]
) -> bool:
    forward: Callable[..., Any] = type(attention).forward
    keeps = KEPT_FOR_OTHER_LAYERS in inspect.signature(forward).parameters
    tables, outputs = [], []
    for waits in (False, True):
        table = TriedTable(packed[1])
        extra: dict[str, Any] = {KEPT_FOR_OTHER_LAYERS: {}} if keeps else {}
        try:
            output = forward(
                WithoutNorms(attention, forms, table) if waits else attention,
                hidden_states=hidden_states,
                position_embeddings=(packed[0], table),
                attention_mask=None,
                **extra,
            )
        except Exception:  # its own code may raise anything where it is not called as it expects
            why = "with its norms deferred" if waits else "by itself"
            logger.debug("%s keeps its norms: it cannot be tried %s", type(attention).__name__, why, exc_info=True)
            return False
        tables.append(table)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    plain, deferred = tables
    return (
        bool(deferred.given)
        and not deferred.waiting
        and deferred.is_untouched
        and len(plain.turned) == len(deferred.turned)
        and all(_agree(got, want) for got, want in zip(deferred.turned, plain.turned, strict=True))
        and _agree(outputs[1], outputs[0])
    )


def _embeddings(rotary: nn.Module, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Positions and table, as a patched model's attention gets them, for each kind of layer."""
    for layer_type in rotary.ladders:  # type: ignore[union-attr]
        table: torch.Tensor = getattr(rotary, model_rope.attribute(layer_type, "packed_table"))
        table = table if rotary.ladders[layer_type].is_fixed else table[:1]  # type: ignore[index,union-attr]
        positions = torch.arange(1, TRIED_TOKENS + 1, device=x.device)[None]
        if table.dim() == 3:
            positions = positions.expand(int(table[:, 1].max()) + 1, -1, -1)
        yield positions, table.to(x.device)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")


def _agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To a few roundings of the results' dtype."""
    limit = max(4 * torch.finfo(got.dtype).eps, 1e-5)
    difference = (got.double() - want.double()).norm()
    return got.shape == want.shape and bool(difference <= limit * want.double().norm())
