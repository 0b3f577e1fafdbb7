"""A cache is continued by the tables that filled it.

Cached keys are rotated. Keys of one table attended to by queries of another give wrong results without an error, so a
patched model records on a cache which tables fill it, and refuses a cache that others have filled. The unpatched model
runs no code of mrrope: when a patch is undone, the caches that it filled swap their class for one that takes no keys.
Until then they are stock: code that runs single layers, appends keys itself or tests the class is not disturbed.

Keys without a record are those of a learned prefix, which no table rotates, or of the unpatched model. ``scale="auto"``
takes them for the latter and re-rotates them; at a fixed scale a warning says which are right.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mrrope.hf.layer_tables import callers_of
from mrrope.hf.rotary_embedding import RotaryTables, TableRotaryEmbedding
from mrrope.hf.swapped_table import SwappedTable

CACHE = "past_key_values"
"""The parameter by which modules of transformers take a cache."""
GUARD = "_mrrope_cache_guard"
"""The attribute of a module that holds its :class:`CacheGuard`."""
FILLED_BY = "mrrope_filled_by"
"""The attribute of a cache with the key of the tables that filled it."""
TAKES_NO_KEYS = "mrrope_takes_no_keys"
"""The attribute of a :class:`GuardedCache` that says whether it is guarded now."""
REFUSED = "past_key_values must be empty or filled by the tables that the model has now"

TablesKey = int
"""A hash of all tables that rotate the keys of a patched model."""


class CacheGuard:
    """Hooks of a module that records which tables fill its cache, and refuses a cache that others have filled."""

    def __init__(self, owner: nn.Module, key: TablesKey | None, *, rotates_again: bool) -> None:
        self.parameters_of_owner = tuple(inspect.signature(owner.forward).parameters)
        self.key = key
        """None where the tables are the model's own: keys are as the unpatched model caches them."""
        self.rotates_again = rotates_again
        """Whether keys of the unpatched model are re-rotated, as with ``scale="auto"``."""
        self.has_warned = False
        self.filled: weakref.WeakSet[Any] = weakref.WeakSet()
        """The caches that calls of the module filled."""
        self.hooks: tuple[RemovableHandle, ...] = ()

    def attach(self, owner: nn.Module) -> None:
        """Register the hooks."""
        self.hooks = (
            owner.register_forward_pre_hook(self.before_call, with_kwargs=True),
            owner.register_forward_hook(self.after_call, with_kwargs=True),
        )

    def detach(self) -> None:
        """Remove the hooks, and let the caches that were filled take no keys."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()
        for cache in self.filled:
            if getattr(cache, FILLED_BY, None) == self.key:
                setattr(cache, TAKES_NO_KEYS, True)
                if not isinstance(cache, GuardedCache):
                    original: Any = type(cache)
                    cache.__class__ = guarded_class(original)
        self.filled.clear()

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a cache that other tables have filled, and record that these fill it."""
        cache = self._given(args, kwargs)
        if cache is None:
            return
        filled_by = getattr(cache, FILLED_BY, None)
        if filled_by not in (None, self.key):
            _expect_empty(cache)
        elif filled_by is None and self.key is not None and not self.rotates_again:
            self._warn_of_keys(module, cache)
        self._record(cache)

    def _warn_of_keys(self, module: nn.Module, cache: Any) -> None:
        """Warn once where a cache without a record holds keys."""
        if torch.compiler.is_compiling() or self.has_warned or not _holds_keys(cache):
            return
        self.has_warned = True
        warnings.warn(
            f"past_key_values holds keys that the tables of this {type(module).__name__} have not rotated: right for a "
            "learned prefix, and wrong for a text that the unpatched model has read, which must be read again",
            UserWarning,
            stacklevel=2,
        )

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the tables on a cache that the model created during the call."""
        if self._given(args, kwargs) is not None:
            return
        for part in output if isinstance(output, tuple) else (getattr(output, CACHE, None),):
            cache = _cache_of_keys(part)
            if cache is not None:
                self._record(cache)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.parameters_of_owner, args, strict=False)) | kwargs
        return _cache_of_keys(given.get(CACHE))

    def _record(self, cache: Any) -> None:
        if self.key is None and getattr(cache, FILLED_BY, None) is None:
            return
        setattr(cache, FILLED_BY, self.key)
        if isinstance(cache, GuardedCache):
            setattr(cache, TAKES_NO_KEYS, False)
        if self.key is None:
            return
        # Dynamo does not trace this. A cache that only compiled code has filled is known to patched models alone.
        if not torch.compiler.is_compiling():
            self.filled.add(cache)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "filled": None}  # neither copies nor files of a model hold the caches of this one

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, filled=weakref.WeakSet())


class CacheGuards:
    """Attaches guards to the modules that take a cache and call a rotary embedding; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, CacheGuard]]:
        """Yield the modules that take a cache, with a guard for the tables of the whole model."""
        tables = {module: found for module in model.modules() if (found := _tables_of(module)) is not None}
        key = _key_of(list(tables.values()))
        rotates_again = any(len(of_type) > 1 for each in tables.values() for of_type in each.by_layer_type.values())
        callers = [caller for rotary in tables for caller in callers_of(model, rotary)]
        owners = dict.fromkeys(caller for caller in callers if CACHE in inspect.signature(caller.forward).parameters)
        # One guard per call: that of a part of the model would act in the middle of a call of the whole model.
        parts = {part for owner in owners for part in owner.modules() if part is not owner}
        for owner in owners:
            if owner not in parts:
                yield owner, CacheGuard(owner, key, rotates_again=rotates_again)

    def apply(self, module: nn.Module, state: CacheGuard) -> None:
        """Attach the guard of a module."""
        setattr(module, GUARD, state)
        state.attach(module)

    def undo(self, module: nn.Module) -> None:
        """Detach the guard of a module."""
        state = self.state_of(module)
        assert state is not None
        state.detach()
        delattr(module, GUARD)

    def state_of(self, module: nn.Module) -> CacheGuard | None:
        """Return the guard of a module."""
        return vars(module).get(GUARD)


class GuardedCache:
    """Mixin of the classes that :func:`guarded_class` returns."""


@functools.cache
def guarded_class(original: Any) -> type:
    """Return the subclass of a cache's class that takes no keys until it is empty or continued by its tables."""

    @functools.wraps(original.update)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, TAKES_NO_KEYS, False):
            _expect_empty(self)
            delattr(self, FILLED_BY)
            setattr(self, TAKES_NO_KEYS, False)
        return original.update(self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        # Pickle looks classes up by name, and this one has the name of its original.
        parts: Any = original.__reduce_ex__(self, protocol)
        return (_new, (original,), *parts[2:])

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (GuardedCache, original), {"update": update, "__reduce_ex__": reduced, **names})


def _new(original: type) -> Any:
    """Return an empty cache, for pickle and copies to fill."""
    guarded: Any = guarded_class(original)
    return guarded.__new__(guarded)


def _cache_of_keys(cache: Any) -> Any:
    """Return the cache that takes rotated keys: of an encoder-decoder model that of its decoder; None for others."""
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if hasattr(cache, "layers") and hasattr(cache, "update") else None


def _expect_empty(cache: Any) -> None:
    """Raise ValueError where a cache holds keys."""
    if torch.compiler.is_compiling():
        raise ValueError(REFUSED)
    if _holds_keys(cache):
        raise ValueError(f"{REFUSED}, got keys that a patch of mrrope with other tables has rotated")


def _holds_keys(cache: Any) -> bool:
    lengths = (layer.get_seq_length() for layer in cache.layers if hasattr(layer, "keys") and layer.is_initialized)
    return any(int(length) > 0 for length in lengths)


def _tables_of(module: nn.Module) -> RotaryTables | None:
    if isinstance(module, TableRotaryEmbedding):
        return RotaryTables(module.settings, module.tables)
    swap = SwappedTable().state_of(module)
    return None if swap is None else swap.tables


def _key_of(tables: list[RotaryTables]) -> TablesKey | None:
    """Return the key of the tables of a model; None where all rotate keys as the model's own."""
    by_layer_type = [item for each in tables for item in each.of_keys.items()]
    is_own = all(each.keys_are_own for each in tables)
    # Not the hash of layer types, whose strings hash differently in every process.
    return None if is_own else hash(tuple(of_type for _, of_type in by_layer_type))
