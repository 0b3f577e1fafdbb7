"""The protocol of one kind of change to a model, :class:`ModulePatch`, and the loops over a list of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

State = TypeVar("State")


class ModulePatch(Protocol[State]):
    """One kind of change to the modules of a model."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, State]]:
        """Yield the modules to change, each with the state for :meth:`apply`."""
        ...

    def apply(self, module: nn.Module, state: State) -> None:
        """Change a module. Where this raises, :meth:`undo` restores what was changed by then."""
        ...

    def undo(self, module: nn.Module) -> None:
        """Restore what :meth:`apply` changed."""
        ...

    def state_of(self, module: nn.Module) -> State | None:
        """Return the state that a module was changed with, or None."""
        ...


Change = tuple[ModulePatch[Any], nn.Module, Any]
"""A patch, the module that it changed, and the state to apply it with again."""


def changes_in(model: nn.Module, patches: Sequence[ModulePatch[Any]]) -> list[Change]:
    """Return what these patches changed in a model, in the order in which they are applied."""
    states = ((patch, module, patch.state_of(module)) for patch in patches for module in model.modules())
    return [(patch, module, state) for patch, module, state in states if state is not None]


def apply_all(model: nn.Module, patches: Sequence[ModulePatch[Any]]) -> None:
    """Apply patches to a model, one after the other: a patch finds what the ones before it left."""
    for patch in patches:
        for module, state in patch.find(model):
            patch.apply(module, state)


@torch.inference_mode(mode=False)  # inference tensors could not take part in training later
@torch.no_grad()
def undo_all(changes: Sequence[Change]) -> None:
    """Undo changes, the last one first."""
    for patch, module, _ in reversed(changes):
        patch.undo(module)


@torch.inference_mode(mode=False)  # inference tensors could not take part in training later
@torch.no_grad()
def restore(model: nn.Module, patches: Sequence[ModulePatch[Any]], before: Sequence[Change]) -> None:
    """Undo what these patches changed in a model, and apply what ``before`` recorded."""
    undo_all(changes_in(model, patches))
    for patch, module, state in before:
        patch.apply(module, state)
