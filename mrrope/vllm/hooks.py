"""Wrapping the functions of vLLM that have no extension point."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

WRAPPED = "__mrrope_wraps__"
AROUND = "__mrrope_around__"

INSTALLED: dict[str, Callable[..., Any]] = {}
"""vLLM's own functions by dotted name, of all that are wrapped."""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    A second call with the same ``around`` is ignored; another ``around`` is called before the first.

    Args:
        owner: A module, or a class whose method is wrapped; of a class, the method comes with ``self``.
        name: The name of the function.
        around: What to call in its place.

    Raises:
        TypeError: The name is a class method or a static method, which a plain function cannot replace.
    """
    if isinstance(inspect.getattr_static(owner, name), classmethod | staticmethod):
        raise TypeError(f"name must be a function or a plain method, got {_dotted_name(owner, name)}")
    replaced = getattr(owner, name)
    if any(getattr(function, AROUND, None) == _identity(around) for function in _chain(replaced)):
        return

    @functools.wraps(replaced)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(replaced, *args, **kwargs)

    setattr(wrapper, WRAPPED, replaced)
    setattr(wrapper, AROUND, _identity(around))
    setattr(owner, name, wrapper)
    INSTALLED[_dotted_name(owner, name)] = _chain(replaced)[-1]


def wrap_everywhere(module: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a module's function, also where modules imported it by name."""
    replaced = getattr(module, name)
    wrap(module, name, around)
    wrapper = getattr(module, name)
    if wrapper is replaced:
        return
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is replaced:
            setattr(other, name, wrapper)


def _chain(function: Any) -> list[Any]:
    """Return a function and what it wraps, vLLM's own last."""
    chain = [function]
    while (wrapped := getattr(chain[-1], WRAPPED, None)) is not None:
        chain.append(wrapped)
    return chain


def _identity(around: Callable[..., Any]) -> str:
    """Return the dotted name of a function: the same for closures that one function makes again."""
    return f"{around.__module__}.{around.__qualname__}"


def _dotted_name(owner: Any, name: str) -> str:
    return f"{owner.__module__}.{owner.__qualname__}.{name}" if inspect.isclass(owner) else f"{owner.__name__}.{name}"
