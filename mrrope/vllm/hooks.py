"""Wrapping the functions of vLLM that have no extension point."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

WRAPPED = "__mrrope_wraps__"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``. A second call is ignored."""
    original = getattr(owner, name)
    if hasattr(original, WRAPPED):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, WRAPPED, original)
    setattr(owner, name, wrapper)


def wrap_everywhere(module: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a module's function, also where modules imported it by name."""
    original = getattr(module, name)
    wrap(module, name, around)
    wrapper = getattr(module, name)
    if wrapper is original:
        return
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, wrapper)
