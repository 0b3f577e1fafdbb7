"""Modules of a patched model whose class is, for as long as it is patched, one derived from their own: with another
forward, and else the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

ORIGINAL = "_mrrope_original"
"""Where a derived class keeps the one that it was made from."""


Derive = Callable[[Any], type[nn.Module]]
"""From a class to the one derived from it: a function that pickle finds by its name, and that gives the same again."""


def derived(original: type[nn.Module], forward: Callable[..., Any], derive: Derive) -> type[nn.Module]:
    """A class with this forward, for ``derive`` to give."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # Pickle finds classes by their names, and this one has its original's.
        parts: Any = original.__reduce_ex__(self, protocol)
        if ORIGINAL not in vars(type(self)):
            return parts
        return (_new, (derive, original), *parts[2:])

    members = {
        "forward": forward,
        ORIGINAL: original,
        "__reduce_ex__": reduced,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)


def _new(derive: Derive, original: type[nn.Module]) -> nn.Module:
    """For pickle, which fills it."""
    new = derive(original)
    return new.__new__(new)


def change_class(module: nn.Module, attribute: str, kept: Any, derive: Derive) -> None:
    """Makes a module keep ``kept``, and its class, unless that was done before, the one derived from it."""
    setattr(module, attribute, kept)
    if not hasattr(module, ORIGINAL):
        module.__class__ = derive(type(module))


def change_class_back(module: nn.Module, attribute: str) -> None:
    """Undoes :func:`change_class`.

    A class that was made from the changed one meanwhile, as sharding does, stays, and has to run the original's
    forward where there is nothing under ``attribute``.
    """
    delattr(module, attribute)
    if ORIGINAL in vars(type(module)):
        module.__class__ = getattr(module, ORIGINAL)
