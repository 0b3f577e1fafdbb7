"""What stands in a patched model: rotary embeddings that give tables, and functions that rotate by them.

A patched model has other modules where its rotary embeddings were; they hand positions and a packed table through the
model's own ``position_embeddings``, and the functions of its modeling module that would apply cosines and sines apply
the fused op instead. The originals are kept.
"""

from __future__ import annotations

import copy
import importlib
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mrrope.hf import conventions, rope_config
from mrrope.hf.attention_probe import own_rotation
from mrrope.hf.auto_scale.follower import Follower
from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.hf.conventions import Apply, CallForm, RotaryFunction

Ladders = dict[str | None, Ladder]
"""What turns each kind of layer that a rotary embedding serves."""


class TableRotaryEmbedding(nn.Module):
    """Stands where a model's rotary embedding stood, and gives positions and a table for cosines and sines."""

    def __init__(self, original: nn.Module, ladders: Ladders, functions: list[RotaryFunction]) -> None:
        super().__init__()
        self.functions = functions
        self.original = original
        self.ladders = ladders
        self.single = any(len(function.form.embedding) == 1 for function in functions)
        self.follower: Follower | None = None
        self.installed: list[InstalledFunction] = []
        device = next(original.buffers()).device
        for layer_type, ladder in ladders.items():
            own = rope_config.settings(original, layer_type)
            packed = [own.packed(table) for table in ladder.tables]
            # Integers, so that no cast of the model to another dtype touches them.
            buffer = packed[0] if ladder.is_fixed else torch.stack(packed)
            self.register_buffer(rope_config.attribute(layer_type, "packed_table"), buffer.to(device), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        for function in self.installed:
            function.expect_in_place()
        table = getattr(self, rope_config.attribute(layer_type, "packed_table")).to(x.device)
        positions = position_ids.to(x.device, conventions.PACKED_TABLE_DTYPE)
        if self.follower is not None and not self.ladders[layer_type].is_fixed:
            table = table.index_select(0, self.follower.choose(positions, table, layer_type))
        packed = conventions.packed_embedding(positions, table, single=self.single)
        return packed[0] if self.single else packed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Private ones, such as accelerate's hooks, belong to the original alone.
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("original"), name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "installed": []}  # functions and modules of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # In another process the functions have to be put in place again. Tensors may not have their values yet.
        installed_functions.install_for(self)


@dataclass(frozen=True)
class InstalledFunction:
    """A fused function that stands in a modeling module."""

    module: ModuleType
    name: str
    fused: Apply

    def expect_in_place(self) -> None:
        """Raises where another function would take positions and tables for cosines and sines."""
        current = getattr(self.module, self.name)
        # A wrapper may be over it, or the fused function of a model that was patched later.
        if current is not self.fused and conventions.fused_in(current) is None:
            other = current if hasattr(current, "__qualname__") else type(current)
            raise RuntimeError(
                f"{self.module.__name__}.{self.name} must be what mrrope.patch put there, got "
                f"{other.__module__}.{other.__qualname__}: apply other patches, such as Liger's, before mrrope.patch, "
                "or call mrrope.patch again after them"
            )


class InstalledFunctions:
    """The fused functions that stand in modeling modules, each for as long as a patched model needs it."""

    def __init__(self) -> None:
        self._users: dict[InstalledFunction, weakref.WeakSet[TableRotaryEmbedding]] = {}

    def install_for(self, user: TableRotaryEmbedding) -> None:
        """Puts the fused functions in place, unless they stand there already."""
        user.installed = [self._install(found) for found in user.functions]
        for function in user.installed:
            self._users[function].add(user)
        # A patched model may also just be dropped.
        weakref.finalize(user, self._restore_unused).atexit = False

    def _install(self, found: RotaryFunction) -> InstalledFunction:
        module = importlib.import_module(found.module)
        original = getattr(module, found.name)
        for function in self._users:
            is_here = (function.module, function.name) == (module, found.name)
            if is_here and function.fused is conventions.fused_in(original):
                return function
        if CallForm.of(original) != found.form:  # of an unpickled model, in another version of transformers
            raise ValueError(
                f"the model must be patched anew: {found.module}.{found.name} takes other arguments by now"
            )
        function = InstalledFunction(module, found.name, conventions.fused(original, found.form, found.convention))
        setattr(module, found.name, function.fused)
        self._users[function] = weakref.WeakSet()
        return function

    def release(self, user: TableRotaryEmbedding) -> None:
        """Puts the originals back where no other patched model needs the fused ones."""
        for users in self._users.values():
            users.discard(user)
        self._restore_unused()

    def _restore_unused(self) -> None:
        for function, users in list(self._users.items()):
            if next(iter(users), None) is not None:
                continue
            del self._users[function]
            # What others have put over it since is theirs.
            if getattr(function.module, function.name) is function.fused:
                setattr(function.module, function.name, function.fused.__wrapped__)


installed_functions = InstalledFunctions()


class UnfusableError(Exception):
    """Why the op cannot stand in for a model's own functions."""


def functions_for(model: nn.Module, rotary: nn.Module) -> list[RotaryFunction]:
    """Every function that applies what a rotary embedding gives; raises :class:`UnfusableError`."""
    classes = {type(module) for module in model.modules()}
    # Rotary embeddings, of text and of vision, may compute as they like.
    for module_class in classes - {type(module) for module in model.modules() if rope_config.layer_types(module)}:
        if expression := conventions.takes_embedding_apart(module_class):  # type: ignore[arg-type]
            raise UnfusableError(f"{module_class.__name__} computes with cosines and sines itself: {expression}")
    layer_type = rope_config.layer_types(rotary)[0]
    positions = torch.tensor([[1, 5, 3, 40]], device="cpu")
    own = rope_config.settings(rotary, layer_type, length=int(positions.max()) + 1)
    # A copy: types that recompute their frequencies keep those of the last text.
    exact = copy.deepcopy(rope_config.in_full_precision(rotary, layer_type))
    device = next(rotary.buffers()).device
    if own.position_row is not None:
        positions = torch.stack([positions + row for row in range(int(own.position_row.max()) + 1)])

    def embed(x: torch.Tensor) -> Any:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        return exact(x.to(device), positions.to(device), **extra)

    found = []
    names = {module_class.__module__ for module_class in classes} | {type(rotary).__module__}
    for module in map(importlib.import_module, sorted(names)):
        for name, function in conventions.apply_functions(module).items():
            function = conventions.own_code(function)
            form = CallForm.of(function)
            if form is None:
                raise UnfusableError(f"the parameters of {module.__name__}.{name} are not understood")
            convention = conventions.find_convention(function, form, embed, positions, own.packed(own.table))
            if convention is None:
                raise UnfusableError(f"{module.__name__}.{name} rotates in a way the op does not")
            found.append(RotaryFunction(module.__name__, name, form, convention))
    if not found:
        raise UnfusableError(f"{type(rotary).__module__} has no function that applies RoPE")
    single = any(len(function.form.embedding) == 1 for function in found)
    packed = conventions.packed_embedding(positions, own.packed(own.table), single=single)
    for owner in [module for module in model.modules() if any(child is rotary for child in module.children())]:
        if why := own_rotation(owner, found, packed):
            raise UnfusableError(why)
    return found


class SwappedTable:
    """A rotary embedding that keeps its own code and gets other frequencies: where the op cannot be fused."""

    ATTRIBUTE = "_mrrope_swapped"

    def __init__(self, rotary: nn.Module, ladders: Ladders) -> None:
        self.ladders = ladders
        self.original: dict[str, Any] = {"rope_type": rotary.rope_type}
        for layer_type, ladder in ladders.items():
            (table,) = ladder.tables
            turning = rope_config.settings(rotary, layer_type).rotated_pairs
            for name in (rope_config.FREQUENCIES, f"original_{rope_config.FREQUENCIES}"):
                self._set(rotary, rope_config.attribute(layer_type, name), table.inv_freq * turning)
            self._set(rotary, rope_config.attribute(layer_type, "attention_scaling"), table.attention_factor)
        # Types that recompute their frequencies as they go would undo the swap.
        kinds: Any = rotary.rope_type
        if isinstance(kinds, dict):
            rotary.rope_type = kinds | dict.fromkeys(ladders, "default")  # type: ignore[assignment]
        elif ladders:
            rotary.rope_type = "default"  # type: ignore[assignment]
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
