"""Frequency tables of RoPE and its extensions."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import torch

import mrrope._core as _core
from mrrope.tables import json as table_json
from mrrope.tables import shipped
from mrrope.tables.numbers import integer, integers, list_of, real
from mrrope.tables.query_factors import (
    are_alike,
    factor_rows,
    factors_in,
    require_multiple,
    require_one_number,
)

METHOD_TRAITS: dict[str, _core.MethodTraits] = {method.name: method for method in _core.methods()}
"""The row of every method in ``csrc/frequency_table.cpp``: all other lists of methods derive from it.

``has_temperature`` says whether the default attention factor is ``0.1 ln(scale) + 1``, ``needs`` names the argument of
:func:`frequency_table` that the method needs besides the scale (None: no argument), and ``power`` is the power with
which ``mrrope_pow`` gives the same table (None: no such power).
"""

METHODS: tuple[str, ...] = tuple(METHOD_TRAITS)
"""The methods that :func:`frequency_table` takes."""

SCALE_ONLY_METHODS: tuple[str, ...] = tuple(name for name, method in METHOD_TRAITS.items() if method.needs is None)
"""The methods that need no argument besides the scale."""

_Table = TypeVar("_Table", bound="OpTable")


def _bounds(value: Iterable[SupportsIndex]) -> tuple[int, int]:
    pair = integers("bounds", value)
    if len(pair) != 2:
        raise ValueError(f"bounds must be a pair (d_l, d_h), got {value!r}")
    return pair[0], pair[1]


def _is_tracing() -> bool:
    """Whether new tensors are traced or fake: under torch.compile or a fake-tensor mode."""
    return torch.compiler.is_compiling() or type(torch.empty(0)) is not torch.Tensor


class DeviceCopies:
    """A host tensor with one cached copy per device."""

    def __init__(self, on_host: torch.Tensor) -> None:
        self._copies = {torch.device("cpu"): on_host}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the copy on ``device``."""
        tensor = self._copies.get(device)
        if tensor is not None:
            return tensor
        on_host = self._copies[torch.device("cpu")]
        if _is_tracing():
            return on_host.to(device)
        # Autograd rejects tensors made in inference mode, and the copy outlives the mode.
        with torch.inference_mode(False):
            copy = on_host.to(device)
        # setdefault: of two racing threads the first wins, so no copy in use by a kernel is freed.
        return self._copies.setdefault(device, copy)


IMPLIED_FIELDS = ("inv_freq", "turns")
"""Fields of a table's dict that follow from its cumulative scales."""


def _frequencies_of(cumulative_scale: list[float], rotary_dim: int, base: float) -> dict[str, Any]:
    """Return ``inv_freq`` and ``turns`` of plain RoPE divided by cumulative scales."""
    table = frequency_table(
        "longrope", rotary_dim=rotary_dim, base=base, original_max_position=1.0, factors=cumulative_scale
    )
    return {name: getattr(table._core, name) for name in IMPLIED_FIELDS}


class OpTable(ABC):
    """What the ops take as a table: a :class:`FrequencyTable`, one per key head, or one per position axis.

    A table owns its device copies and those of the stacks that it is the first table of. Keep every table of a call
    alive while a CUDA graph that captured the call is replayed or another stream still runs it.
    """

    key_heads: int | None = None
    """The number of key heads that have a table each; None where one table rotates all heads."""
    query_factors: tuple[float, ...] | None = None
    """The factor of every query head, beside the attention factor; None where there are none."""
    axes: int | None = None
    """The number of positions that a token may have; None where it has one."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = DeviceCopies(packed)
        self._stacks: dict[tuple[int, ...], TableStack] = {}

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """The number of rotated components of a head: twice the number of pairs."""

    def packed(self, device: torch.device) -> torch.Tensor:
        """Return the table as the ops take it, one int64 tensor on ``device``; the copy is cached."""
        return self._packed.on(device)

    def to(self: _Table, device: torch.device | str) -> _Table:
        """Cache a copy on ``device`` ahead of CUDA-graph capture or torch.compile, and return this table."""
        # An empty tensor resolves "cuda" to the current device of that kind.
        self.packed(torch.empty(0, device=device).device)
        return self

    @property
    def query_heads(self) -> int | None:
        """The number of query heads that have a factor each; None where there are no factors."""
        return None if self.query_factors is None else len(self.query_factors)

    def is_like(self, other: OpTable) -> bool:
        """Whether both tables rotate alike, whatever their method and settings."""
        if not are_alike(self.query_factors, other.query_factors):
            return False
        mine, others = self._words_of_heads(), other._words_of_heads()
        heads = max(len(mine), len(others))
        # One table for all heads is like as many equal ones.
        return (mine * heads if len(mine) == 1 else mine) == (others * heads if len(others) == 1 else others)

    @abstractmethod
    def _words_of_heads(self) -> list[list[int]]:
        """The words of every head's table; one row where one table rotates all heads."""


class FrequencyTable(OpTable):
    """The frequency of every pair of components, and the attention factor. Immutable.

    Made by :func:`frequency_table`, :meth:`load`, :meth:`from_dict`, :meth:`relative_to` or :meth:`inverse`.
    """

    def __init__(self, core: _core.Table) -> None:
        self._core = core
        with torch.inference_mode(False):
            super().__init__(torch.tensor(core.packed(), dtype=torch.int64, device="cpu"))

    def _words_of_heads(self) -> list[list[int]]:
        return [self._core.packed()]

    @property
    def method(self) -> str:
        """One of :data:`METHODS`, or ``relative`` for the difference of two tables."""
        return self._core.method

    @property
    def rotary_dim(self) -> int:
        """The number of rotated components of a head: twice the number of pairs."""
        return self._core.rotary_dim

    @property
    def base(self) -> float:
        """RoPE's theta."""
        return self._core.base

    @property
    def original_max_position(self) -> float:
        """The context length without the extension."""
        return self._core.original_max_position

    @property
    def scale(self) -> float:
        """By how much the context length is extended."""
        return self._core.scale

    @property
    def bounds(self) -> tuple[int, int] | None:
        """``(d_l, d_h)``: pairs up to ``d_l`` keep their frequency, from ``d_h`` on the full scale slows them down."""
        return self._core.bounds

    @property
    def attention_factor(self) -> float:
        """The factor on rotated q and k; its square multiplies the attention logits."""
        return self._core.attention_factor

    @property
    def inv_freq(self) -> torch.Tensor:
        """Radians per position of every pair, float64 ``[rotary_dim / 2]``."""
        return torch.tensor(self._core.inv_freq, dtype=torch.float64, device="cpu")

    @property
    def cumulative_scale(self) -> torch.Tensor:
        """Plain RoPE's frequency divided by this table's, per pair, float64; empty for relative tables."""
        return torch.tensor(self._core.cumulative_scale, dtype=torch.float64, device="cpu")

    @property
    def radix_factors(self) -> torch.Tensor:
        """``cumulative_scale[i + 1] / cumulative_scale[i]``, float64: the factors of the mixed-radix view."""
        return torch.tensor(self._core.radix_factors, dtype=torch.float64, device="cpu")

    @property
    def turns(self) -> torch.Tensor:
        """Phase steps: revolutions per position in 64-bit fixed point, as the bits of an int64 tensor."""
        return torch.tensor(self._core.turns, dtype=torch.int64, device="cpu")

    def relative_to(self, other: FrequencyTable) -> FrequencyTable:
        """Return the table that re-rotates a vector rotated by ``other`` into one rotated by this table.

        Raises:
            ValueError: the tables differ in ``rotary_dim``, or a quotient of theirs is out of range.
        """
        return FrequencyTable(_core.relative(to=self._core, from_=require_table("other", other)._core))

    def inverse(self) -> FrequencyTable:
        """Return the table that undoes this one: angles negated, attention factor inverted."""
        return FrequencyTable(_core.inverse(self._core))

    def without_query_factors(self) -> FrequencyTable:
        """Return this table, which has none: keys and queries are rotated alike."""
        return self

    def to_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Return the table as a JSON-serializable dict.

        Args:
            compact: leave out ``inv_freq`` and ``turns`` where the cumulative scales give the same bits, as in every
                ``longrope`` table that extends plain RoPE.
        """
        core = self._core
        data = {
            "format": table_json.TABLE_FORMAT,
            "method": core.method,
            "rotary_dim": core.rotary_dim,
            "base": core.base,
            "original_max_position": core.original_max_position,
            "scale": core.scale,
            "bounds": core.bounds and list(core.bounds),
            "attention_factor": core.attention_factor,
            "inv_freq": core.inv_freq,
            "cumulative_scale": core.cumulative_scale,
            "turns": core.turns,
        }
        if compact and core.cumulative_scale:
            implied = _frequencies_of(core.cumulative_scale, core.rotary_dim, core.base)
            if all(data[name] == values for name, values in implied.items()):
                return {name: value for name, value in data.items() if name not in implied}
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> FrequencyTable:
        """Return the table of a :meth:`to_dict` dict.

        Raises:
            TypeError, ValueError: ``data`` has missing, unknown, ill-typed or inconsistent fields.
        """
        fields = table_json.without_format(data, table_json.TABLE_FORMAT)
        expected: dict[str, Callable[[str, Any], Any]] = {
            "method": lambda _, value: str(value),
            "rotary_dim": integer,
            "base": real,
            "original_max_position": real,
            "scale": real,
            "bounds": lambda _, value: None if value is None else _bounds(value),
            "attention_factor": real,
            "inv_freq": lambda name, value: list_of(real, name, value),
            "cumulative_scale": lambda name, value: list_of(real, name, value),
            "turns": lambda name, value: list_of(partial(integer, bits=63), name, value),
        }
        is_compact = fields.keys().isdisjoint(IMPLIED_FIELDS)
        if is_compact:
            fields |= dict.fromkeys(IMPLIED_FIELDS, ())
        if missing := expected.keys() - fields.keys():
            raise ValueError(f"a table needs the fields {sorted(missing)}, got only {sorted(fields)}")
        if unknown := fields.keys() - expected.keys():
            raise ValueError(f"a table has no fields {sorted(unknown)}, only {sorted(expected)}")
        converted = {name: convert(name, fields[name]) for name, convert in expected.items()}
        if is_compact:
            scales = converted["cumulative_scale"]
            converted |= _frequencies_of(scales, converted["rotary_dim"], converted["base"])
        return FrequencyTable(_core.Table(**converted))

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        Path(path).write_text(table_json.text_of(self.to_dict()))

    @staticmethod
    def load(path: str | Path) -> FrequencyTable:
        """Read a table that :meth:`save` wrote, or a shipped calibrated table by its name.

        Raises:
            FileNotFoundError: there is no such file or shipped table.
            ValueError: the file does not hold a table.
        """
        return FrequencyTable.from_dict(table_json.read_object(shipped.file_of(path)))

    def __eq__(self, other: object) -> bool:
        # Tables of one model mostly differ in scale, which is cheap to compare.
        return isinstance(other, FrequencyTable) and self.scale == other.scale and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self._core.packed()))

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], FrequencyTable], tuple[dict[str, Any]]]:
        return FrequencyTable.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        core = self._core
        return (
            f"FrequencyTable({core.method!r}, rotary_dim={core.rotary_dim}, base={core.base:g}, "
            f"original_max_position={core.original_max_position:g}, scale={core.scale:g}, bounds={core.bounds}, "
            f"attention_factor={core.attention_factor:.6g})"
        )


class TableStack(DeviceCopies):
    """Several tables as one tensor. The first table owns it and drops it when another one is deleted."""

    def __init__(self, tables: Sequence[OpTable], key: tuple[int, ...]) -> None:
        with torch.inference_mode(False):
            super().__init__(_stacked(tables, torch.device("cpu")))
        owner = weakref.ref(tables[0])

        def forget(_: object) -> None:
            if (first := owner()) is not None:
                first._stacks.pop(key, None)

        # The key holds ids, which are reused once a table is deleted.
        self._others = [weakref.ref(table, forget) for table in tables[1:]]


def words_per_head(packed: torch.Tensor) -> torch.Tensor:
    """Return a packed table as ``[heads, words]``, without query factors; one that rotates all heads has one row."""
    return packed[0, 0] if packed.dim() == 4 else packed.view(1, -1)


def _stacked(tables: Sequence[OpTable], device: torch.device) -> torch.Tensor:
    """Return ``[tables, words]``; with head tables among them all are expanded to ``[tables, rows, heads, words]``."""
    packed = [table.packed(device) for table in tables]
    if tables[0].axes is not None:
        return torch.cat(packed)
    heads = max(table.key_heads or 0 for table in tables)
    query_heads = max(table.query_heads or 0 for table in tables)
    if not heads and not query_heads:
        return torch.stack(packed)
    words = torch.stack([words_per_head(one).expand(max(heads, 1), -1) for one in packed]).unsqueeze(1)
    if not query_heads:
        return words
    ones = torch.ones(query_heads, dtype=torch.float64, device=device).view(torch.int64)
    # Those of packed tables are read there: torch.compile would guard every factor of a Python list.
    bits = [
        ones if table.query_heads is None else factors_in(one, query_heads)[0]
        for table, one in zip(tables, packed, strict=True)
    ]
    rows = torch.stack([factor_rows(of_table, *words.shape[-2:]) for of_table in bits])
    return torch.cat([words, torch.zeros_like(words), rows], dim=1)


def packed_stack(tables: Sequence[OpTable], device: torch.device) -> torch.Tensor:
    """Return tables of one rotary_dim as the ops take them, one int64 tensor on ``device``.

    The copy is cached while all of these tables live.
    """
    if not tables:
        raise ValueError("table must be a FrequencyTable or a sequence of at least one, got none")
    if not torch.compiler.is_compiling():
        # Fast path: a cached stack was checked when it was made.
        stack = require_op_table("table[0]", tables[0])._stacks.get(tuple(map(id, tables)))
        if stack is not None:
            return stack.on(device)
    key_heads = query_heads = None
    for i, table in enumerate(tables):
        require_op_table(f"table[{i}]", table)
        if table.rotary_dim != tables[0].rotary_dim:
            raise ValueError(
                f"table[{i}] must have table[0]'s rotary_dim {tables[0].rotary_dim}, got {table.rotary_dim}"
            )
        if table.axes != tables[0].axes:
            raise ValueError(f"table[{i}] must have table[0]'s axes, {tables[0].axes}, got {table.axes}")
        if None not in (table.key_heads, key_heads) and table.key_heads != key_heads:
            raise ValueError(
                f"table[{i}] must hold tables for {key_heads} key heads, as those before it do, got {table.key_heads}"
            )
        key_heads = key_heads or table.key_heads
        query_heads = require_one_number(f"table[{i}]", table.query_heads, query_heads)
    require_multiple("table", query_heads, key_heads)
    if _is_tracing():
        return _stacked(tables, device)
    # setdefault: the first of two racing threads wins, as in DeviceCopies.on.
    key = tuple(map(id, tables))
    return tables[0]._stacks.setdefault(key, TableStack(tables, key)).on(device)


def require_op_table(argument: str, value: object) -> OpTable:
    """Return ``value``; raise TypeError where the ops do not take it as a table."""
    if not isinstance(value, OpTable):
        raise TypeError(f"{argument} must be a FrequencyTable, HeadTables or AxisTables, got {type(value).__name__}")
    return value


def require_table(argument: str, value: object) -> FrequencyTable:
    """Return ``value``; raise TypeError where it is no :class:`FrequencyTable`."""
    if not isinstance(value, FrequencyTable):
        raise TypeError(f"{argument} must be a FrequencyTable, got {type(value).__name__}")
    return value


def frequency_table(
    method: str,
    *,
    rotary_dim: int,
    base: float,
    original_max_position: float,
    scale: float = 1.0,
    alpha: float = 1.0,
    beta: float = 32.0,
    bounds: tuple[int, int] | None = None,
    power: float | None = None,
    factors: Iterable[float] | None = None,
    attention_factor: float | None = None,
    native: FrequencyTable | None = None,
) -> FrequencyTable:
    """Build the table of RoPE or one of its extensions.

    Args:
        method: one of :data:`METHODS`.
        rotary_dim: the number of rotated components of a head, even.
        base: RoPE's theta.
        original_max_position: the context length without the extension.
        scale: by how much to extend the context length, at least 1.
        alpha, beta: slow and fast bound, in rotations over ``original_max_position``. Pairs with more than ``beta``
            rotations keep their frequency, pairs with fewer than ``alpha`` are slowed by the full scale. ``llama3``
            calls them ``low_freq_factor`` and ``high_freq_factor``, and its models set them to 1 and 4.
        bounds: the same bounds as pair indices ``(d_l, d_h)``; overrides ``alpha`` and ``beta``.
        power: for ``mrrope_pow``, any real number: the logarithm of radix factor j is proportional to
            ``(j - d_l + 1) ** power``. 0 is ``mrrope_uni``, 1 is ``mrrope_pro``.
        factors: for ``radix`` the ``rotary_dim / 2 - 1`` radix factors, for ``longrope`` the ``rotary_dim / 2``
            cumulative scales.
        attention_factor: overrides the default, which is ``0.1 ln(scale) + 1`` for ``yarn``, ``yarn_ratio`` and
            ``mrrope_*`` and 1 for the others, times that of ``native``.
        native: the model's own table, where that is not plain RoPE. The method slows down its frequencies, which need
            not be sorted: formulas rank pairs from the fastest on.

    Returns:
        The table.

    Raises:
        ValueError, TypeError: an argument is out of range or ill-typed; the message names it and its value.
    """
    if not isinstance(method, str):
        raise TypeError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if native is not None:
        own = require_table("native", native)
        if (own.rotary_dim, own.base) != (rotary_dim, base) or not own.cumulative_scale.numel():
            raise ValueError(
                f"native must be a table of rotary_dim {rotary_dim} and base {base} with cumulative scales, got {own!r}"
            )
    return FrequencyTable(
        _core.build_table(
            method=method,
            rotary_dim=integer("rotary_dim", rotary_dim),
            base=real("base", base),
            original_max_position=real("original_max_position", original_max_position),
            scale=real("scale", scale),
            alpha=real("alpha", alpha),
            beta=real("beta", beta),
            bounds=None if bounds is None else _bounds(bounds),
            power=None if power is None else real("power", power),
            factors=[] if factors is None else list_of(real, "factors", factors),
            attention_factor=None if attention_factor is None else real("attention_factor", attention_factor),
            native_scale=[] if native is None else native.cumulative_scale.tolist(),
            native_attention_factor=1.0 if native is None else native.attention_factor,
        )
    )
