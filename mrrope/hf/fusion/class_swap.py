"""Class swap: a module of a patched model gets a subclass of its class, with another forward and the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

ORIGINAL = "_mrrope_original"
"""The attribute of a swapped class that names the class it replaces."""

ClassFactory = Callable[[Any], type[nn.Module]]
"""From a class to its replacement: an importable function, for pickle, that returns the same class every time."""


def subclass_with(forward: Callable[..., Any], original: type[nn.Module], factory: ClassFactory) -> type[nn.Module]:
    """Return the subclass of ``original`` that ``factory`` is to return."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # Pickle looks classes up by name, and this one has the name of its original.
        parts: Any = original.__reduce_ex__(self, protocol)
        if ORIGINAL not in vars(type(self)):
            return parts
        return (_new, (factory, original), *parts[2:])

    members = {
        "forward": forward,
        ORIGINAL: original,
        "__reduce_ex__": reduced,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)


def _new(factory: ClassFactory, original: type[nn.Module]) -> nn.Module:
    """Return an empty module, for pickle to fill."""
    swapped = factory(original)
    return swapped.__new__(swapped)


def swap_class(module: nn.Module, attribute: str, state: Any, factory: ClassFactory) -> None:
    """Set ``state`` on a module, and swap its class unless that is swapped already."""
    setattr(module, attribute, state)
    if not hasattr(module, ORIGINAL):
        module.__class__ = factory(type(module))


def restore_class(module: nn.Module, attribute: str) -> None:
    """Undo :func:`swap_class`.

    A class that was derived from the swapped one meanwhile, as FSDP does, stays. The swapped forward must therefore
    run the original one where ``attribute`` is missing.
    """
    delattr(module, attribute)
    if ORIGINAL in vars(type(module)):
        module.__class__ = getattr(module, ORIGINAL)
