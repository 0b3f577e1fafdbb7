"""The rotary embedding of a patched model, and the fused apply functions in its modeling modules.

A :class:`TableRotaryEmbedding` replaces the model's rotary embedding and returns positions and a packed table instead
of cosines and sines (:mod:`mrrope.hf.handoff`). The apply functions of the modeling modules are monkeypatched with
:func:`mrrope.hf.conventions.fused`, for as long as a patched model uses them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from mrrope.hf import conventions, handoff, rope_config
from mrrope.hf.attention_probe import norm_of_queries, own_rotation
from mrrope.hf.conventions import Apply, CallForm, RotaryFunction
from mrrope.hf.cos_sin_uses import cos_sin_uses
from mrrope.tables.frequency_table import FrequencyTable

PROBED_POSITIONS = ((1, 5, 3, 40),)


@dataclass(frozen=True)
class RotaryTables:
    """The tables that a rotary embedding gets, by layer type."""

    settings: dict[str | None, rope_config.RopeSettings]
    """The settings of the stock rotary embedding."""
    by_layer_type: dict[str | None, tuple[rope_config.RotaryTable, ...]]
    """One table; or several, the model's own first, of which one is chosen per sequence. Layer types that keep the
    model's own code are missing."""
    record: object = None
    """What the patch was, for :func:`mrrope.patch_of`."""

    @property
    def can_be_swapped(self) -> bool:
        """Whether a stock rotary embedding can have these tables: one per layer type, for all heads and layers."""
        return all(len(tables) == 1 and isinstance(tables[0], FrequencyTable) for tables in self.by_layer_type.values())

    @property
    def of_keys(self) -> dict[str | None, tuple[rope_config.RotaryTable, ...]]:
        """The tables that rotate keys, by layer type: those without query factors."""
        return {kind: tuple(map(rope_config.of_keys, tables)) for kind, tables in self.by_layer_type.items()}

    @property
    def keys_are_own(self) -> bool:
        """Whether all of these rotate keys as the stock rotary embedding does."""
        return all(
            each.is_like(self.settings[layer_type].table)
            for layer_type, tables in self.of_keys.items()
            for table in tables
            for each in (table if isinstance(table, tuple) else (table,))
        )

    @property
    def have_query_factors(self) -> bool:
        """Whether query heads have factors."""
        return any(rope_config.has_query_factors(table) for tables in self.by_layer_type.values() for table in tables)

    @property
    def are_by_head_or_layer(self) -> bool:
        """Whether heads or layers have tables of their own."""
        return any(not isinstance(table, FrequencyTable) for tables in self.by_layer_type.values() for table in tables)


class TableChooser(Protocol):
    """Chooses one of several tables for every sequence of a batch."""

    def choose(self, positions: torch.Tensor, tables: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """Return the index of each sequence's table, ``[batch]``, of tables as ``rescale_cache_`` takes them.

        Positions are ``[batch, tokens]``, or ``[rows, batch, tokens]`` for M-RoPE.
        """
        ...


class TableRotaryEmbedding(nn.Module):
    """Replaces a rotary embedding: returns positions and a packed table instead of cosines and sines."""

    learned: Mapping[str | None, torch.Tensor] | None
    """By layer type, tables to return instead of the packed ones, with gradients: float32 or float64, radians per
    position and the attention factor, ``[H, W]``, or ``[layers, H, W]`` in a model patched with a TableSet. Layer types
    without an entry keep their packed tables."""
    learned_query_factors: torch.Tensor | None
    """The factors of query heads for all learned tables, ``[query heads]`` or ``[layers, query heads]``, with a
    gradient; None where query heads have none."""

    def __init__(self, original: nn.Module, tables: RotaryTables, functions: list[RotaryFunction]) -> None:
        super().__init__()
        self.original = original
        self.settings = tables.settings
        self.tables = tables.by_layer_type
        self.record = tables.record
        self.functions = functions
        self.in_one_tensor = any(len(function.form.embedding) == 1 for function in functions)
        self.by_token = any(function.by_token for function in functions)
        self.follower: TableChooser | None = None
        self.learned = self.learned_query_factors = None
        self.installed: list[InstalledFunction] = []
        device = next(original.buffers()).device
        for layer_type, of_layers in self.tables.items():
            own = self.settings[layer_type]
            packed = own.packed(of_layers[0]) if len(of_layers) == 1 else own.packed_ladder(of_layers)
            # Integer buffers are not affected by casts of the model to another dtype.
            self.register_buffer(rope_config.attribute(layer_type, "packed_table"), packed.to(device), persistent=False)
            if len(of_layers) > 1 and packed.dim() >= 4:
                by_scale = _by_scale(own.packed_ladder(tables.of_keys[layer_type])).to(device)
                self.register_buffer(rope_config.attribute(layer_type, "table_by_scale"), by_scale, persistent=False)
        self.train(original.training)

    @property
    def is_by_layer(self) -> bool:
        """Whether layers have tables of their own."""
        return any(isinstance(table, tuple) for of_layers in self.tables.values() for table in of_layers)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        for function in self.installed:
            function.expect_in_place()
        positions = self._with_all_rows(position_ids.to(x.device), layer_type)
        learned = None if self.learned is None else self.learned.get(layer_type)
        if learned is None and len(self.tables[layer_type]) == 1 and positions.is_floating_point():
            positions, table = handoff.in_units(positions, self._packed_table(positions, layer_type))
        elif learned is None:
            positions = handoff.whole(positions)
            table = self._packed_table(positions, layer_type)
        else:
            positions = handoff.whole(positions)
            table = learned.to(x.device)
            rotated = self.settings[layer_type].rotated_pairs
            if not rotated.all():
                table = table * torch.nn.functional.pad(rotated, (0, 1), value=True).to(x.device)
            factors = self.learned_query_factors
            table = handoff.learned_table(table, None if factors is None else factors.to(x.device))
        packed = handoff.pack(positions, table, in_one_tensor=self.in_one_tensor, by_token=self.by_token)
        return packed[0] if len(packed) == 1 else packed

    def _with_all_rows(self, positions: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """Return positions with a row for each axis of M-RoPE. One row, as of Qwen-VL's text, is that of all axes."""
        sources = self.settings[layer_type].sources
        if sources is None or positions.dim() != 3 or positions.shape[0] != 1:
            return positions
        return positions.expand(sources.rows, -1, -1)

    def _packed_table(self, positions: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """Return the table of a call; of a ladder, the table of each sequence."""
        table: torch.Tensor = getattr(self, rope_config.attribute(layer_type, "packed_table")).to(positions.device)
        if len(self.tables[layer_type]) == 1:
            return table
        scales_dim = 1 if handoff.is_by_layer(table) else 0
        if self.follower is None:
            return table.narrow(scales_dim, 0, 1)
        by_scale = getattr(self, rope_config.attribute(layer_type, "table_by_scale")) if table.dim() >= 4 else table
        index = self.follower.choose(positions, by_scale.to(positions.device), layer_type)
        return table.index_select(scales_dim, index)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Private attributes, such as accelerate's hooks, belong to the original alone.
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("original"), name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "installed": []}  # they hold functions and modules of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # The functions of another process are still stock. Tensors may not have their values yet.
        installed_functions.install_for(self)


def _by_scale(ladder: torch.Tensor) -> torch.Tensor:
    """Return the tables of a ladder as ``rescale_cache_`` takes them, the layers of one scale side by side.

    Of head tables that is ``[scales, layers, H, W]`` or, with rows of positions, ``[scales, layers, 2, H, W]``.
    """
    if ladder.dim() < 4:
        return ladder
    by_layer = ladder if handoff.is_by_layer(ladder) else ladder[None]
    return by_layer.transpose(0, 1).squeeze(2).contiguous()


@dataclass(frozen=True)
class InstalledFunction:
    """A fused function in a modeling module."""

    module: ModuleType
    name: str
    fused: Apply

    def expect_in_place(self) -> None:
        """Raise where another function would take positions and tables for cosines and sines."""
        current = getattr(self.module, self.name)
        # The current one may wrap it, or be the fused function of a model that was patched later.
        if current is not self.fused and conventions.fused_in(current) is None:
            other = current if hasattr(current, "__qualname__") else type(current)
            raise RuntimeError(
                f"{self.module.__name__}.{self.name} must be what mrrope.patch put there, got "
                f"{other.__module__}.{other.__qualname__}: apply other patches, such as Liger's, before mrrope.patch, "
                "or call mrrope.patch again after them"
            )


class InstalledFunctions:
    """The fused functions in modeling modules, with the patched rotary embeddings that use each."""

    def __init__(self) -> None:
        self._users: dict[InstalledFunction, weakref.WeakSet[TableRotaryEmbedding]] = {}
        self._with_finalizer: weakref.WeakSet[TableRotaryEmbedding] = weakref.WeakSet()
        self._keepers: list[None] = []  # a list's append and pop are atomic

    def install_for(self, user: TableRotaryEmbedding) -> None:
        """Install the fused functions of a rotary embedding, unless they are installed already."""
        with self.kept():  # functions have no user yet
            user.installed = [self._install(found) for found in user.functions]
            for function in user.installed:
                self._users[function].add(user)
        # A model that is deleted while it is patched must not leave the module's function wrapped.
        if user not in self._with_finalizer:
            weakref.finalize(user, self._restore_unused).atexit = False
            self._with_finalizer.add(user)

    def _install(self, found: RotaryFunction) -> InstalledFunction:
        module = importlib.import_module(found.module)
        original = getattr(module, found.name)
        for function in self._users:
            is_here = (function.module, function.name) == (module, found.name)
            if is_here and function.fused is conventions.fused_in(original):
                return function
        # A model that was pickled under another version of transformers has the form of that version's function.
        if CallForm.of(original) != found.form:
            raise ValueError(
                f"the model must be patched anew: {found.module}.{found.name} takes other arguments by now"
            )
        fused = conventions.fused(original, found.form, found.convention, by_token=found.by_token)
        function = InstalledFunction(module, found.name, fused)
        setattr(module, found.name, function.fused)
        self._users[function] = weakref.WeakSet()
        return function

    def release(self, user: TableRotaryEmbedding) -> None:
        """Restore the original functions that no other patched model needs fused."""
        for users in list(self._users.values()):
            users.discard(user)
        self._restore_unused()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore no function meanwhile: the garbage collector may run the finalizer of another model at any time."""
        self._keepers.append(None)
        try:
            yield
        finally:
            self._keepers.pop()
            self._restore_unused()

    def _restore_unused(self) -> None:
        if self._keepers:
            return
        for function, users in list(self._users.items()):
            if next(iter(users), None) is not None or self._users.pop(function, None) is None:
                continue
            # A function that another library installed over it stays.
            if getattr(function.module, function.name) is function.fused:
                setattr(function.module, function.name, function.fused.__wrapped__)


installed_functions = InstalledFunctions()


class UnfusableError(Exception):
    """Why the fused op cannot replace a model's own apply functions."""


class UnfactorableError(UnfusableError):
    """Why factors of query heads would not scale the queries of a model, and those alone."""


@dataclass(frozen=True)
class Rotation:
    """How a rotary embedding gets its tables."""

    rotary: nn.Module
    tables: RotaryTables
    fused: TableRotaryEmbedding | None
    """Its replacement, where the op can be fused."""
    unfusable: str | None = None
    """Why not, where it cannot."""
    unprobed: Mapping[str, Exception] = field(default_factory=dict)
    """Classes of attention whose probe raised an error of their own, which may or may not pass cos/sin on."""


def plan_rotation(model: nn.Module, rotary: nn.Module, tables: RotaryTables) -> Rotation:
    """Probe whether the op can be fused for a rotary embedding of an unpatched model."""
    try:
        if tables.by_layer_type.keys() != tables.settings.keys():
            raise UnfusableError("no one table is its own, which changes with the length of a text")
        with installed_functions.kept():  # probes put back what they found in place of functions
            functions, unprobed = functions_for(model, rotary, tables.settings)
            if any(function.by_token for function in functions) and tables.are_by_head_or_layer:
                raise UnfusableError("its attention selects tokens of cosines and sines")
            if tables.have_query_factors:
                _require_factors_of_queries(model, rotary, tables.settings, functions)
    except UnfusableError as reason:
        if not tables.can_be_swapped:
            raise
        return Rotation(rotary, tables, None, str(reason))
    return Rotation(rotary, tables, TableRotaryEmbedding(rotary, tables, functions), unprobed=unprobed)


def _require_factors_of_queries(
    model: nn.Module,
    rotary: nn.Module,
    settings: dict[str | None, rope_config.RopeSettings],
    functions: list[RotaryFunction],
) -> None:
    """Raise UnfactorableError where a model's calls of apply functions do not show what its query heads are."""
    for function in functions:
        if len(function.form.heads) == 1 or function.form.takes_q_alone:
            raise UnfactorableError(f"{function.module}.{function.name} takes queries and keys alike, one by one")
    names = {function.name for function in functions}
    classes = {kind for kind in {type(module) for module in model.modules()} if names & _names_in_code(kind)}
    rotating = {module for module in model.modules() if type(module) in classes}
    for outer in rotating:
        inner = next((part for part in outer.modules() if part in rotating - {outer}), None)
        if inner is not None:
            raise UnfactorableError(f"its {type(inner).__name__} rotates queries of its own by the same tables")
    if any((getattr(module, "_tp_size", None) or 1) > 1 for module in model.modules()):
        raise UnfactorableError("it is tensor parallel, and no rank has all query heads")
    own = next(iter(settings.values()))
    in_one_tensor = any(len(function.form.embedding) == 1 for function in functions)
    positions = torch.tensor(PROBED_POSITIONS, device="cpu")
    packed = handoff.pack(positions, own.packed(own.table), in_one_tensor=in_one_tensor)
    for owner in [module for module in model.modules() if any(child is rotary for child in module.children())]:
        if norm := norm_of_queries(owner, functions, packed, own.rotary_dim):
            raise UnfactorableError(f"its {norm} norms rotated queries, which cancels factors")


def _names_in_code(kind: type) -> set[str]:
    """Return the names of functions and attributes that the methods of a class use."""
    methods = [value for each in kind.__mro__ for value in vars(each).values() if inspect.isfunction(value)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return {name for code in codes if code is not None for name in code.co_names}


def functions_for(
    model: nn.Module, rotary: nn.Module, settings: dict[str | None, rope_config.RopeSettings]
) -> tuple[list[RotaryFunction], dict[str, Exception]]:
    """Return every function that applies the output of a rotary embedding, and attention that could not be probed.

    Raises:
        UnfusableError: where the op cannot replace one of them.
    """
    classes = {type(module) for module in model.modules()}
    by_token = False
    # Rotary embeddings, of text and of vision, compute cosines and sines.
    for module_class in classes - {type(module) for module in model.modules() if rope_config.layer_types(module)}:
        for use in cos_sin_uses(module_class):  # type: ignore[arg-type]
            if not use.selects_tokens:
                raise UnfusableError(
                    f"{module_class.__name__} computes with cosines and sines itself: {use.expression}"
                )
            by_token = True
    layer_type = next(iter(settings))
    own = settings[layer_type]
    positions = torch.tensor(PROBED_POSITIONS, device="cpu")
    length = int(positions.max()) + 1
    if own.changes_with_length or (own.original_max_position or 0) < length:
        own = rope_config.settings(rotary, layer_type, length=length)
    # A copy: rope types that recompute their frequencies keep those of the last call.
    exact = copy.deepcopy(rope_config.in_full_precision(rotary, layer_type))
    device = next(rotary.buffers()).device
    if own.sources is not None:
        if not own.sources.are_rotations:
            raise UnfusableError("its two components of a pair turn by different positions, which is no rotation")
        positions = torch.stack([positions + row for row in range(own.sources.rows)])

    def embed(x: torch.Tensor) -> Any:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        return exact(x.to(device), positions.to(device), **extra)

    found = []
    names = {module_class.__module__ for module_class in classes} | {type(rotary).__module__}
    for module in map(importlib.import_module, sorted(names)):
        for name, function in conventions.apply_functions(module).items():
            function = conventions.own_code(function)
            form = CallForm.of(function)
            if form is None or (by_token and len(form.embedding) == 1):
                raise UnfusableError(f"the parameters of {module.__name__}.{name} are not understood")
            table = own.packed(own.table)
            convention = conventions.find_convention(function, form, embed, positions, table, by_token=by_token)
            if convention is None:
                raise UnfusableError(f"{module.__name__}.{name} rotates in a way the op does not")
            found.append(RotaryFunction(module.__name__, name, form, convention, by_token))
    if not found:
        raise UnfusableError(f"{type(rotary).__module__} has no function that applies RoPE")
    in_one_tensor = any(len(function.form.embedding) == 1 for function in found)
    packed = handoff.pack(positions, own.packed(own.table), in_one_tensor=in_one_tensor, by_token=by_token)
    unprobed: dict[str, Exception] = {}
    for owner in [module for module in model.modules() if any(child is rotary for child in module.children())]:
        why, failed = own_rotation(owner, found, packed)
        if why is not None:
            raise UnfusableError(why)
        unprobed |= failed
    return found, unprobed


class FusedRotary:
    """Replaces rotary embeddings where they are children of a module; a :class:`ModulePatch`."""

    def __init__(self, rotations: Sequence[Rotation] = ()) -> None:
        self.replacements = {rotation.rotary: rotation.fused for rotation in rotations if rotation.fused is not None}

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, TableRotaryEmbedding]]]:
        """Yield the modules that have a rotary embedding, with its replacement by name."""
        found: dict[nn.Module, dict[str, TableRotaryEmbedding]] = defaultdict(dict)
        for module in model.modules():
            for name, child in module._modules.items():
                if child in self.replacements:
                    found[module][name] = self.replacements[child]
        yield from found.items()

    def apply(self, module: nn.Module, state: dict[str, TableRotaryEmbedding]) -> None:
        """Replace rotary embeddings, and install the functions that apply their output."""
        for name, replacement in state.items():
            installed_functions.install_for(replacement)
            setattr(module, name, replacement)

    def undo(self, module: nn.Module) -> None:
        """Restore the original rotary embeddings."""
        for name, replacement in (self.state_of(module) or {}).items():
            setattr(module, name, replacement.original)
            installed_functions.release(replacement)

    def state_of(self, module: nn.Module) -> dict[str, TableRotaryEmbedding] | None:
        """Return the replacements among the children of a module, by name."""
        children = module._modules.items()
        return {name: child for name, child in children if isinstance(child, TableRotaryEmbedding)} or None
