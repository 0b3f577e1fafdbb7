"""The ladder of ``scale="auto"``: tables of increasing scale, and the length up to which each is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS, FrequencyTable
from mrrope.tables.lookup import PLAIN_ROPE_OPTIONS, ModelTables, NativeRope, nearest

DEFAULT_REACH = 16.0
"""Default reach of a ladder, in native lengths."""

Table = TypeVar("Table")
"""What a ladder has at each scale."""
Loadable = TypeVar("Loadable", bound=ModelTables)
Entry = str | ModelTables | Path
"""What names a table or a set of a ladder."""


@dataclass(frozen=True)
class Ladder(Generic[Table]):
    """Tables of one rotary_dim, and the length in tokens that each reaches. The last also serves longer texts."""

    tables: tuple[Table, ...]
    reaches: tuple[float, ...]
    reserve: int | None = None
    """Number of new tokens that ``generate`` reserves room for; None for as many as it may write."""

    @staticmethod
    def of_one(table: Table) -> Ladder[Table]:
        """Return a ladder with one table for all lengths."""
        return Ladder((table,), (math.inf,))

    @property
    def is_fixed(self) -> bool:
        """Whether there is one table only."""
        return len(self.tables) == 1


def scales_up_to(max_scale: float) -> list[float]:
    """Return the powers of two from 2 to below ``max_scale``, and ``max_scale``."""
    scales = [2.0**i for i in range(1, math.ceil(math.log2(max_scale)))]
    return [*scales, float(max_scale)]


def ladder_for(
    trained: NativeRope,
    native: Loadable,
    method: Entry | Sequence[Entry],
    max_scale: float | None,
    options: dict[str, Any],
    resolve: Callable[[NativeRope, Any, float | None, dict[str, Any]], Loadable],
) -> Ladder[Loadable]:
    """Return a ladder that starts with the model's own table, up to its native length.

    Args:
        trained: The model's own RoPE.
        native: The model's own table.
        method: A method's name, for tables of increasing scale; a list of ready tables or sets, one per scale; or
            the name of a ladder that comes with the package.
        max_scale: The largest scale of a method or of a shipped ladder; by default a method reaches 16 native lengths.
        options: More arguments of ``frequency_table``.
        resolve: ``resolve_table``, or ``resolve_tables`` where head tables and sets are allowed.

    Raises:
        ValueError: The native length is unknown, an argument is invalid, or no table reaches past the native length.
    """
    native_length = trained.original_max_position
    if native_length is None:
        raise ValueError("scale must be a number for this model: its configuration states no native length")
    is_shipped = False
    if isinstance(method, str) and method not in METHODS:
        is_shipped = True
        method = _shipped_ladder(method)
    if isinstance(method, Sequence) and not isinstance(method, str):
        given = {**({"max_scale": max_scale} if max_scale is not None and not is_shipped else {}), **options}
        if given.keys() - PLAIN_ROPE_OPTIONS:
            raise ValueError(f"method is a list of ready tables, which leaves no room for {given}")
        extended = [resolve(trained, entry, None, options) for entry in method]
        if max_scale is not None:
            _expect_above_one(max_scale)
            extended = [table for table in extended if table.scale <= max_scale]
    else:
        if isinstance(method, ModelTables):
            what = "one table" if isinstance(method, FrequencyTable) else f"one {type(method).__name__}"
            raise ValueError(f"method must be a method's name or a list of tables with scale='auto', got {what}")
        if max_scale is None:
            start = (trained.table_arguments(options) | options)["original_max_position"]
            max_scale = DEFAULT_REACH * native_length / start
        _expect_above_one(max_scale)
        extended = [resolve(trained, method, scale, options) for scale in scales_up_to(max_scale)]
    reach = {table: table.original_max_position * table.scale for table in extended}
    longer = sorted((table for table in extended if reach[table] > native_length), key=lambda table: reach[table])
    if len({reach[table] for table in longer}) < len(longer):
        raise ValueError(f"method must give one table for each length, got two that reach as far: {longer!r}")
    if not longer:
        past = f"past the {native_length:g} native tokens"
        if max_scale is None:
            raise ValueError(f"method must hold a table that reaches {past}, got {extended!r}")
        raise ValueError(f"max_scale must reach {past}, got {max_scale}")
    return Ladder((native, *longer), (native_length, *(reach[table] for table in longer)))


def _expect_above_one(max_scale: Any) -> None:
    is_number = isinstance(max_scale, (int, float)) and not isinstance(max_scale, bool)
    if not is_number or not 1.0 < max_scale < math.inf:
        raise ValueError(f"max_scale must be a number above 1, got {max_scale!r}")


def _shipped_ladder(name: str) -> list[str]:
    if found := shipped.ladder(name):
        return found
    raise ValueError(
        f"method must be one of {', '.join(METHODS)}, a list of tables, or the name of a ladder that comes with mrrope "
        f"({', '.join(shipped.ladders()) or 'there is none yet'}) with scale='auto', got {name!r}"
        f"{nearest(name, (*METHODS, *shipped.ladders()))}"
    )
