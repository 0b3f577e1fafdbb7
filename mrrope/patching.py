"""Swapping a frequency table into a model of transformers, and out again.

A patched model has other modules where its rotary embeddings were; they hand positions and a packed table through the
model's own ``position_embeddings``, and the functions of its modeling module that would apply cosines and sines apply
the fused op instead. Nothing else is touched, and the originals are kept for :func:`unpatch`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from mrrope import conventions, model_rope
from mrrope.conventions import Apply, CallForm, Convention
from mrrope.tables import FrequencyTable
from mrrope.trained import table_for

Model = TypeVar("Model", bound=nn.Module)


class TableRotaryEmbedding(nn.Module):
    """Stands where a model's rotary embedding stood, and gives positions and a table for cosines and sines."""

    def __init__(self, original: nn.Module, tables: dict[str | None, FrequencyTable], *, single: bool) -> None:
        super().__init__()
        self.original = original
        self.tables = tables
        self.single = single
        device = next(original.buffers()).device
        for layer_type, table in tables.items():
            packed = model_rope.settings(original, layer_type).packed(table)
            # Integers, so that no cast of the model to another dtype touches them.
            self.register_buffer(model_rope.attribute(layer_type, "packed_table"), packed.to(device), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        table = getattr(self, model_rope.attribute(layer_type, "packed_table"))
        positions = position_ids.to(x.device, conventions.PACKED_TABLE_DTYPE)
        packed = conventions.packed_embedding(positions, table.to(x.device), single=self.single)
        return packed[0] if self.single else packed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Private ones, such as accelerate's hooks, belong to the original alone.
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("original"), name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # In another process the functions have to be put in place again.
        for found in functions_for(self.original, self.original):
            installed_functions.install(*found, user=self)


class InstalledFunctions:
    """The fused functions that stand in modeling modules, each for as long as a patched model needs it."""

    def __init__(self) -> None:
        self._installed: dict[tuple[ModuleType, str], tuple[Apply, weakref.WeakSet[TableRotaryEmbedding]]] = {}

    def install(
        self, module: ModuleType, name: str, form: CallForm, convention: Convention, *, user: TableRotaryEmbedding
    ) -> None:
        """Puts the fused function in place, unless it stands there already."""
        if (module, name) not in self._installed:
            function = conventions.fused(getattr(module, name), form, convention)
            setattr(module, name, function)
            self._installed[module, name] = function, weakref.WeakSet()
        self._installed[module, name][1].add(user)
        # A patched model may also just be dropped.
        weakref.finalize(user, self._restore_unused).atexit = False

    def release(self, user: TableRotaryEmbedding) -> None:
        """Puts the originals back where no other patched model needs the fused ones."""
        for _, users in self._installed.values():
            users.discard(user)
        self._restore_unused()

    def _restore_unused(self) -> None:
        for (module, name), (function, users) in list(self._installed.items()):
            if next(iter(users), None) is not None:
                continue
            del self._installed[module, name]
            # What others have put over it since is theirs.
            if getattr(module, name) is function:
                setattr(module, name, function.__wrapped__)


installed_functions = InstalledFunctions()


class UnfusableError(Exception):
    """Why the op cannot stand in for a model's own functions."""


def functions_for(model: nn.Module, rotary: nn.Module) -> list[tuple[ModuleType, str, CallForm, Convention]]:
    """Every function that applies what a rotary embedding gives, and how it does; raises :class:`UnfusableError`."""
    layer_type = model_rope.layer_types(rotary)[0]
    own = model_rope.settings(rotary, layer_type)
    device = next(rotary.buffers()).device
    positions = torch.tensor([[1, 5, 3, 40]])
    if own.position_row is not None:
        positions = torch.stack([positions + row for row in range(int(own.position_row.max()) + 1)])

    def embed(x: torch.Tensor) -> Any:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        embedding = rotary(x.to(device), positions.to(device), **extra)
        return tuple(part.cpu() for part in embedding) if isinstance(embedding, tuple) else embedding.cpu()

    found = []
    classes = {type(module) for module in model.modules()}
    # Rotary embeddings, of text and of vision, may compute as they like.
    for module_class in classes - {type(module) for module in model.modules() if model_rope.layer_types(module)}:
        if expression := conventions.takes_embedding_apart(module_class):  # type: ignore[arg-type]
            raise UnfusableError(f"{module_class.__name__} computes with cosines and sines itself: {expression}")
    modules = {module_class.__module__ for module_class in classes} | {type(rotary).__module__}
    for module in (sys.modules[name] for name in sorted(modules)):
        for name, function in conventions.apply_functions(module).items():
            function = getattr(function, "__wrapped__", function)
            form = CallForm.of(function)
            if form is None:
                raise UnfusableError(f"the parameters of {module.__name__}.{name} are not understood")
            convention = conventions.find_convention(function, form, embed, positions, own.packed(own.table))
            if convention is None:
                raise UnfusableError(f"{module.__name__}.{name} rotates in a way the op does not")
            found.append((module, name, form, convention))
    if not found:
        raise UnfusableError(f"{type(rotary).__module__} has no function that applies RoPE")
    return found


class SwappedTable:
    """A rotary embedding that keeps its own code and gets other frequencies: where the op cannot be fused."""

    ATTRIBUTE = "_mrrope_swapped"

    def __init__(self, rotary: nn.Module, tables: dict[str | None, FrequencyTable]) -> None:
        self.tables = tables
        self.original: dict[str, Any] = {"rope_type": rotary.rope_type}
        for layer_type, table in tables.items():
            turning = model_rope.settings(rotary, layer_type).turning
            for name in (model_rope.FREQUENCIES, f"original_{model_rope.FREQUENCIES}"):
                self._set(rotary, model_rope.attribute(layer_type, name), table.inv_freq * turning)
            self._set(rotary, model_rope.attribute(layer_type, "attention_scaling"), table.attention_factor)
        # Types that recompute their frequencies as they go would undo the swap.
        is_named_by_layer = isinstance(rotary.rope_type, dict)
        rotary.rope_type = dict.fromkeys(tables, "default") if is_named_by_layer else "default"  # type: ignore[assignment]
        setattr(rotary, self.ATTRIBUTE, self)

    def _set(self, rotary: nn.Module, name: str, value: Any) -> None:
        old = self.original[name] = getattr(rotary, name)
        setattr(rotary, name, value.to(old) if isinstance(old, torch.Tensor) else value)

    def undo(self, rotary: nn.Module) -> None:
        """Puts the original frequencies back."""
        for name, value in self.original.items():
            current = getattr(rotary, name)
            setattr(rotary, name, value.to(current.device) if isinstance(value, torch.Tensor) else value)
        delattr(rotary, self.ATTRIBUTE)


def patch(
    model: Model,
    method: str | FrequencyTable | Path,
    *,
    scale: float = 1.0,
    local_layers: bool = False,
    **options: Any,
) -> Model:
    """Makes a model of transformers read by another frequency table, with the fused op; returns the model.

    Args:
        model: any model of transformers with rotary position embeddings; patched already, it is patched anew.
        method: a method's name, for a table from the model's own base, rotary dimension and trained length; or a ready
            :class:`FrequencyTable`, or the path of its JSON.
        scale: by how much to extend the context, with a method's name.
        local_layers: whether layers that see only a window, and have a RoPE of their own, are extended too.
        options: more arguments of :func:`frequency_table`: ``alpha``, ``beta``, ``bounds``, ``power``, ``factors``,
            ``attention_factor``; or ``base`` and ``original_max_position``, in place of what the model's configuration
            says.

    Warns:
        UserWarning: where the model's own code rotates in a way the op does not: then it runs on, by the new table.

    Raises:
        ValueError, TypeError: naming the argument; the model is untouched then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    rotaries = list(model_rope.rotary_embeddings(model))
    if not rotaries:
        raise ValueError(
            f"model must have rotary position embeddings, and {type(model).__name__} has none that mrrope knows"
        )
    if rotaries[0] is model:
        raise ValueError(f"model must be the one that {type(model).__name__} is a part of: it is what gets replaced")
    tables = [_tables_for(rotary, method, scale, local_layers, options) for rotary in rotaries]

    if is_patched(model):
        unpatch(model)
    for rotary, by_layer in zip(rotaries, tables, strict=True):
        if reason := _put_in(model, rotary, by_layer):
            warnings.warn(
                f"{type(model).__name__} gets the table but not the fused op: {reason}", UserWarning, stacklevel=2
            )
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch` changed this model."""
    return any(
        isinstance(module, TableRotaryEmbedding) or hasattr(module, SwappedTable.ATTRIBUTE)
        for module in model.modules()
    )


def unpatch(model: Model) -> Model:
    """Makes a patched model exactly what it was; returns it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not is_patched(model):
        raise ValueError(f"model must be a patched one, and this {type(model).__name__} is not")
    for module in list(model.modules()):
        if isinstance(module, TableRotaryEmbedding):
            _replace(model, module, module.original)
            installed_functions.release(module)
        elif hasattr(module, SwappedTable.ATTRIBUTE):
            getattr(module, SwappedTable.ATTRIBUTE).undo(module)
    return model


@contextlib.contextmanager
def patched(model: Model, method: str | FrequencyTable | Path, **options: Any) -> Iterator[Model]:
    """:func:`patch` for the length of a ``with`` block; a model that comes patched leaves as it came."""
    before = list(_tables_in(model)) if isinstance(model, nn.Module) else []
    patch(model, method, **options)
    try:
        yield model
    finally:
        if is_patched(model):
            unpatch(model)
        for rotary, tables in before:
            _put_in(model, rotary, tables)


def _tables_for(
    rotary: nn.Module, method: str | FrequencyTable | Path, scale: float, local_layers: bool, options: dict[str, Any]
) -> dict[str | None, FrequencyTable]:
    tables: dict[str | None, FrequencyTable] = {}
    for layer_type in model_rope.layer_types(rotary):
        own = model_rope.settings(rotary, layer_type)
        stays = model_rope.is_local(layer_type) and not local_layers
        tables[layer_type] = own.table if stays else table_for(own, method, scale, options)
    return tables


def _tables_in(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str | None, FrequencyTable]]]:
    """The rotary embeddings that a patched model had, and the tables it has in their place."""
    for module in model.modules():
        if isinstance(module, TableRotaryEmbedding):
            yield module.original, module.tables
        elif hasattr(module, SwappedTable.ATTRIBUTE):
            yield module, getattr(module, SwappedTable.ATTRIBUTE).tables


def _put_in(model: nn.Module, rotary: nn.Module, tables: dict[str | None, FrequencyTable]) -> str | None:
    """Makes a model turn by these tables; where the op cannot do it, tells why."""
    try:
        _fuse(model, rotary, tables)
    except UnfusableError as reason:
        SwappedTable(rotary, tables)
        return str(reason)
    return None


def _fuse(model: nn.Module, rotary: nn.Module, tables: dict[str | None, FrequencyTable]) -> None:
    functions = functions_for(model, rotary)
    single = any(len(form.embedding) == 1 for _, _, form, _ in functions)
    replacement = TableRotaryEmbedding(rotary, tables, single=single)
    replacement.train(rotary.training)
    for found in functions:
        installed_functions.install(*found, user=replacement)
    _replace(model, rotary, replacement)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old and parent is not new:
                setattr(parent, name, new)
