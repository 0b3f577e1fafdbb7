"""Wrapping the functions of vLLM that have no extension point.

Modules of vLLM are wrapped when vLLM imports them, and modules of this package are imported when a served model calls:
a process of vLLM that serves none of mrrope's types neither imports nor runs more than this.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mrrope.serving.mark import holds_tables

WRAPPED = "__mrrope_wraps__"
AROUND = "__mrrope_around__"

LOGGER = "vllm.mrrope"
"""Below vLLM's own logger, which writes in its format and from its level on."""

INSTALLED: dict[str, Callable[..., Any]] = {}
"""vLLM's own functions by dotted name, of all that are wrapped."""

FAILED: dict[str, Exception] = {}
"""What kept hooks from being installed, by module of vLLM or hook: served models are refused, and others run."""


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


def is_served(vllm_config: Any) -> bool:
    """Whether the model of a ``VllmConfig`` is one that mrrope serves. The only check that other models run."""
    model_config = getattr(vllm_config, "model_config", None)
    return model_config is not None and holds_tables(model_config.hf_config)


def where_served(config_of: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Return a hook that calls ``around`` of another module for served models, and vLLM's own function for others.

    Args:
        config_of: Returns the ``VllmConfig`` from the arguments of the hooked function; None where there is no model.
        module: A module of this package, imported by the first call of a served model.
        name: The function in it, which gets ``original, *args, **kwargs``.
    """

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            served = is_served(config_of(*args, **kwargs))
        except Exception as error:
            FAILED[f"{module}.{name}"] = error
            served = False
        if not served:
            return original(*args, **kwargs)
        require_installed()
        return getattr(importlib.import_module(module), name)(original, *args, **kwargs)

    around.__module__, around.__qualname__ = module, name
    return around


def failure() -> str | None:
    """Return what is to be said of :data:`FAILED` to users of a served model; None where all hooks fit."""
    if not FAILED:
        return None
    reasons = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in FAILED.items())
    return f"mrrope's plugin cannot serve mrrope's rope types: its hooks must fit this vLLM, got {reasons}"


def require_installed() -> None:
    """Raise RuntimeError where hooks could not be installed, for a model that needs them."""
    if (message := failure()) is not None:
        log_error(message)
        raise RuntimeError(message)


@functools.cache
def log_error(message: str) -> None:
    """Log an error, once in a process."""
    logging.getLogger(LOGGER).error(message)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with a module: now if it is imported, else as soon as it is. Its errors go to :data:`FAILED`.

    A module that runs as ``python -m`` is ``__main__`` besides, and may be imported again under its name.
    """
    main = sys.modules.get("__main__")
    if main is not None and getattr(getattr(main, "__spec__", None), "name", None) == name:
        _act(action, name, main)
    if name in sys.modules:
        _act(action, name, sys.modules[name])
        return
    _awaited.setdefault(name, []).append(action)
    if not any(isinstance(finder, _AwaitingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AwaitingFinder())


def _act(action: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:
        FAILED[name] = error


_awaited: dict[str, list[Callable[[ModuleType], None]]] = {}
"""What to call with modules that are not imported yet."""


class _AwaitingFinder(importlib.abc.MetaPathFinder):
    """Calls the actions of :func:`when_imported` right after a module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _awaited:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for action in _awaited.pop(fullname, []):
                _act(action, fullname, module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


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
