"""Modules of a patched model whose class is, for as long as it is patched, one derived from their own: with another
forward, and else the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

ORIGINAL = "_mrrope_original"
"""Where a derived class keeps the one that it was made from."""


def derived(
    original: type[nn.Module], forward: Callable[..., Any], new: Callable[[type[nn.Module]], nn.Module]
) -> type[nn.Module]:
    """A class with this forward. ``new`` makes a module of it from the original's, for pickle."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # Pickle finds classes by their names, and this one has its original's.
        parts: Any = original.__reduce_ex__(self, protocol)
        if ORIGINAL not in vars(type(self)):
            return parts
        return (new, (original,), *parts[2:])

    members = {
        "forward": forward,
        ORIGINAL: original,
        "__reduce_ex__": reduced,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)


def change_class(module: nn.Module, attribute: str, kept: Any, change: Callable[[Any], Any]) -> None:
    """Makes a module keep ``kept``, and its class, unless that was done before, the one ``change`` makes of it."""
    setattr(module, attribute, kept)
    if not hasattr(module, ORIGINAL):
        module.__class__ = change(type(module))


def change_class_back(module: nn.Module, attribute: str) -> None:
    """Undoes :func:`change_class`.

    A class that was made from the changed one meanwhile, as sharding does, stays, and has to run the original's
    forward where there is nothing under ``attribute``.
    """
    delattr(module, attribute)
    if ORIGINAL in vars(type(module)):
        module.__class__ = getattr(module, ORIGINAL)
