"""Models that norm q and k just before they rotate them, made to do both in one op.

An attention module of such a model calls its norms, and a little later the function that applies RoPE. In a patched
model its forward runs on a stand-in for itself, whose norms hand their input on as it is and leave a note with the
table that travels to that function; there the op norms and rotates at once.

Which modules are norms of that kind, and whether an attention module does the same with and without its notes, is found
by trying. What changes later is looked at in every call: a norm that has hooks or another eps, is sharded or replaced,
or keeps its weights in another dtype than q and k come in, norms by its own code.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from mrrope.hf.conventions import DeferredNorm, TableAfterNorms
from mrrope.hf.fusion import attention_proxy
from mrrope.hf.fusion.attention_proxy import StandIn, agree, random
from mrrope.hf.fusion.class_swap import change_class, change_class_back
from mrrope.hf.fusion.norm_probe import NormForm, form_of

logger = logging.getLogger(__name__)

FORMS = "_mrrope_norms"
"""Where an attention module keeps how its norms norm, by their names."""


class WithoutNorms(StandIn):
    """Lets a module's norms wait."""

    def __init__(self, attention: nn.Module, forms: dict[str, NormForm], table: TableAfterNorms) -> None:
        super().__init__(attention)
        object.__setattr__(self, "_mrrope_forms", forms)
        object.__setattr__(self, "_mrrope_table", table)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        form = self._mrrope_forms.get(name)
        if form is None or type(value) is not form.module_class:
            return value
        return functools.partial(_norm_or_wait, value, form, name[0], self._mrrope_table)


def _may_wait(norm: nn.Module, form: NormForm, x: torch.Tensor) -> bool:
    """Whether the op may norm ``x`` later, and nobody would miss the norm's being called."""
    return (
        "forward" not in vars(norm)
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and not (norm._backward_hooks or norm._backward_pre_hooks)
        and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        and form.is_of(norm, x)
    )


def _norm_or_wait(norm: nn.Module, form: NormForm, role: str, table: TableAfterNorms, x: torch.Tensor) -> torch.Tensor:
    if not _may_wait(norm, form, x):
        normed: torch.Tensor = norm(x)
        return normed
    table.wait(role, DeferredNorm(norm.weight, form.eps, form.weight_offset), x)  # type: ignore[arg-type]
    return x


def _begin(
    attention: nn.Module, forms: dict[str, NormForm], positions: torch.Tensor, table: torch.Tensor
) -> tuple[WithoutNorms, TableAfterNorms]:
    noted = TableAfterNorms(table)
    return WithoutNorms(attention, forms, noted), noted


@functools.cache
def class_that_defers(original: type[nn.Module]) -> type[nn.Module]:
    """The class of an attention module, but with norms that wait in calls of a patched model."""
    return attention_proxy.class_on_stand_ins(original, FORMS, _begin, class_that_defers)


def defer_norms(model: nn.Module, rotary: nn.Module) -> None:
    """Makes the attention modules of a patched model norm and rotate by one op, where that is the same.

    ``rotary`` is what stands for the model's rotary embedding.
    """
    for attention in model.modules():
        if not norms_wait_in(attention) and (forms := _forms_in(attention)) and _is_the_same(attention, forms, rotary):
            change_class(attention, FORMS, forms, class_that_defers)


def norms_wait_in(module: nn.Module) -> bool:
    """Whether :func:`defer_norms` changed this attention module."""
    return FORMS in vars(module)


def deferred_norms_of(module: nn.Module) -> list[nn.Module]:
    """The norms of an attention module that are left to its rotation."""
    return [getattr(module, name) for name in vars(module).get(FORMS, ())]


def restore_norms(module: nn.Module) -> None:
    """Undoes what :func:`defer_norms` did to an attention module."""
    change_class_back(module, FORMS)


def _forms_in(attention: nn.Module) -> dict[str, NormForm]:
    """The norms of q and of k that an attention module may have, by name, if it can be tried at all."""
    if not attention_proxy.can_be_tried(attention):
        return {}
    found = {name: form_of(child) for name, child in attention.named_children() if name[0] in "qk"}
    forms = {name: form for name, form in found.items() if form is not None}
    roles = [name[0] for name in forms]
    return forms if len(roles) == len(set(roles)) else {}


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
    width = attention_proxy.width_of(attention)
    if width is None:
        return False
    # The norms' dtype is the one that is computed in; that of other weights may be one to keep them small.
    weight: Any = getattr(attention, next(iter(forms))).weight
    hidden_states = random(1, attention_proxy.TRIED_TOKENS, width).to(weight)
    with attention_proxy.left_as_it_was(attention):
        attention.eval()
        embeddings = attention_proxy.tried_embeddings(rotary, hidden_states)
        return any(_agree_on(attention, forms, hidden_states, *packed) for packed in embeddings)


def _agree_on(
    attention: nn.Module,
    forms: dict[str, NormForm],
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    packed: torch.Tensor,
) -> bool:
    tables, outputs = [], []
    for waits in (False, True):
        table = TriedTable(packed)
        runs = WithoutNorms(attention, forms, table) if waits else attention
        try:
            outputs.append(attention_proxy.try_call(attention, runs, hidden_states, (positions, table)))
        except Exception:  # its own code may raise anything where it is not called as it expects
            why = "with its norms deferred" if waits else "by itself"
            logger.debug("%s keeps its norms: it cannot be tried %s", type(attention).__name__, why, exc_info=True)
            return False
        tables.append(table)
    plain, deferred = tables
    return (
        bool(deferred.given)
        and not deferred.waiting
        and deferred.is_untouched
        and len(plain.turned) == len(deferred.turned)
        and all(agree(got, want) for got, want in zip(deferred.turned, plain.turned, strict=True))
        and agree(outputs[1], outputs[0])
    )
