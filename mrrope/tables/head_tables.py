"""One frequency table per key head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mrrope.tables import json as table_json
from mrrope.tables import shipped
from mrrope.tables.frequency_table import FrequencyTable, OpTable, require_table
from mrrope.tables.query_factors import bits_of_factors, checked_query_factors, factor_rows

AGREED = ("rotary_dim", "base", "original_max_position", "scale")
"""What the tables of one model have in common."""

SHOWN_FACTORS = 4
"""Up to how many query factors a repr shows all."""


def require_agreement(argument: str, tables: Sequence[Any]) -> None:
    """Raise ValueError for the first table that differs from the first one in what :data:`AGREED` lists."""
    for i, table in enumerate(tables):
        for name in AGREED:
            value, first = getattr(table, name), getattr(tables[0], name)
            if value != first:
                raise ValueError(f"{argument}[{i}] must have {argument}[0]'s {name} {first:.15g}, got {value:.15g}")


class HeadTables(OpTable):
    """One table per key head; a query head uses the table of its key head. Immutable.

    Ops and ``patch`` take it in place of a :class:`FrequencyTable`. A tensor with n times as many heads as there are
    tables uses each table for n neighbouring heads. Query heads may have a factor each, beside their table's attention
    factor: the temperature of their attention.
    """

    def __init__(self, tables: Iterable[FrequencyTable], query_factors: Iterable[float] | None = None) -> None:
        """Join tables that agree in ``rotary_dim``, ``base``, ``original_max_position`` and ``scale``.

        Args:
            tables: the table of every key head; with ``query_factors`` also one table for all key heads.
            query_factors: what the rotated components of every query head are multiplied by, beside the attention
                factor; positive, and a multiple of the tables. Keys are not multiplied.

        Raises:
            TypeError: ``tables`` or ``query_factors`` hold something else.
            ValueError: ``tables`` is empty, two of them do not agree, or a factor is out of range.
        """
        if not isinstance(tables, Iterable):
            raise TypeError(f"tables must be a FrequencyTable per key head, got {type(tables).__name__}")
        self._tables = tuple(tables)
        if not self._tables:
            raise ValueError("tables must hold a FrequencyTable per key head, got none")
        for i, table in enumerate(self._tables):
            require_table(f"tables[{i}]", table)
        require_agreement("tables", self._tables)
        self.key_heads: int | None = len(self._tables)
        with torch.inference_mode(False):
            packed = torch.stack([table.packed(torch.device("cpu")) for table in self._tables])[None, None]
            if query_factors is not None:
                self.query_factors = checked_query_factors("query_factors", query_factors, len(self))
                rows = factor_rows(bits_of_factors(self.query_factors), *packed.shape[-2:])
                packed = torch.cat([packed, torch.zeros_like(packed), rows[None]], dim=1)
                # Made here and kept: stacks are cached by identity, and torch.compile cannot make tables.
                self._of_keys: FrequencyTable | HeadTables = HeadTables(self._tables)
                if len(self) == 1:
                    self.key_heads, self._of_keys = None, self._tables[0]
            super().__init__(packed)

    def _words_of_heads(self) -> list[list[int]]:
        return [words for table in self for words in table._words_of_heads()]

    @property
    def rotary_dim(self) -> int:
        """The number of rotated components of a head."""
        return self._tables[0].rotary_dim

    @property
    def base(self) -> float:
        """RoPE's theta."""
        return self._tables[0].base

    @property
    def original_max_position(self) -> float:
        """The context length without the extension."""
        return self._tables[0].original_max_position

    @property
    def scale(self) -> float:
        """By how much the context length is extended."""
        return self._tables[0].scale

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, key_head: int) -> FrequencyTable:
        return self._tables[key_head]

    def __iter__(self) -> Iterator[FrequencyTable]:
        return iter(self._tables)

    def without_query_factors(self) -> FrequencyTable | HeadTables:
        """Return the tables of keys: these without query factors, or these tables where they have none.

        One table for all key heads, which only its query factors make head tables, is returned by itself.
        """
        return self if self.query_factors is None else self._of_keys

    def relative_to(self, other: FrequencyTable | HeadTables) -> HeadTables:
        """Return the tables that re-rotate keys rotated by ``other`` into keys rotated by these tables.

        Keys have no query factors, and neither has what is returned.

        Args:
            other: a table for all heads, or as many head tables.

        Raises:
            ValueError: the numbers of tables or their ``rotary_dim`` differ, or a quotient is out of range.
        """
        heads = len(other) if self.key_heads is None and isinstance(other, HeadTables) else len(self)
        pairs = zip(heads_of("self", self, heads), heads_of("other", other, heads), strict=True)
        return HeadTables(mine.relative_to(theirs) for mine, theirs in pairs)

    def inverse(self) -> HeadTables:
        """Return the tables that undo these; query factors are inverted, too."""
        factors = None if self.query_factors is None else [1 / factor for factor in self.query_factors]
        return HeadTables((table.inverse() for table in self), factors)

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as a JSON-serializable dict; what all of them share is stated once."""
        rows = [table.to_dict(compact=True) for table in self]
        shared = table_json.shared_fields(rows)
        heads = [table_json.unshared_fields(row, shared) for row in rows]
        factors = {} if self.query_factors is None else {"query_factors": list(self.query_factors)}
        return {**shared, "format": table_json.HEADS_FORMAT, **factors, "heads": heads}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> HeadTables:
        """Return the tables of a :meth:`to_dict` dict.

        Raises:
            TypeError, ValueError: ``data`` has missing, unknown, ill-typed or inconsistent fields.
        """
        shared = table_json.without_format(data, table_json.HEADS_FORMAT)
        rows, factors = shared.pop("heads", None), shared.pop("query_factors", None)
        heads = heads_from_rows("heads", rows, shared)
        return heads if factors is None else HeadTables(heads, factors)

    def save(self, path: str | Path) -> None:
        """Write the tables as JSON."""
        Path(path).write_text(table_json.text_of(self.to_dict()))

    @staticmethod
    def load(path: str | Path) -> HeadTables:
        """Read tables that :meth:`save` wrote, or shipped ones by their name.

        Raises:
            FileNotFoundError: there is no such file or shipped table.
            ValueError: the file does not hold head tables.
        """
        return HeadTables.from_dict(table_json.read_object(shipped.file_of(path)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadTables) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Without None, whose hash differs in every process before Python 3.12: caches are known by it.
        return hash(self._tables if self.query_factors is None else self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self._tables, self.query_factors

    def __reduce__(self) -> tuple[Callable[..., HeadTables], tuple[Any, ...]]:
        return HeadTables, self._identity

    def __repr__(self) -> str:
        heads = "all key heads" if self.key_heads is None else f"{len(self)} key heads"
        factors = "" if self.query_factors is None else f", query_factors={shown_factors(self.query_factors)}"
        return f"HeadTables({heads}, {settings_of(self)}{factors})"


def settings_of(tables: Any) -> str:
    """Return what tables agree in, for a repr."""
    return ", ".join(f"{name}={getattr(tables, name):g}" for name in AGREED)


def shown_factors(factors: Sequence[float]) -> str:
    """Return query factors for a repr: all of few, and the ends of many."""
    shown = [f"{factor:.6g}" for factor in factors]
    return f"[{', '.join(shown if len(shown) <= SHOWN_FACTORS else [*shown[:2], '...', shown[-1]])}]"


def heads_of(argument: str, table: FrequencyTable | HeadTables, key_heads: int) -> Sequence[FrequencyTable]:
    """Return a table for every key head.

    Raises:
        TypeError: ``table`` is neither a table nor head tables.
        ValueError: ``table`` holds tables for another number of key heads.
    """
    if isinstance(table, FrequencyTable):
        return [table] * key_heads
    if not isinstance(table, HeadTables):
        raise TypeError(f"{argument} must be a FrequencyTable or HeadTables, got {type(table).__name__}")
    if table.key_heads is None:
        return list(table) * key_heads
    if len(table) != key_heads:
        raise ValueError(f"{argument} must hold tables for {key_heads} key heads, got {len(table)}")
    return tuple(table)


def table_from_row(argument: str, row: object, shared: dict[str, Any]) -> FrequencyTable:
    """Return the table of a row of JSON and the fields that it shares with others; errors name ``argument``."""
    if not isinstance(row, dict):
        raise TypeError(f"{argument} must be a JSON object with the fields of a table, got {type(row).__name__}")
    if repeated := sorted(row.keys() & shared.keys()):
        raise ValueError(f"{argument} must not repeat the fields of all tables, got {repeated}")
    try:
        return FrequencyTable.from_dict({**shared, **row, "format": table_json.TABLE_FORMAT})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def heads_from_rows(argument: str, rows: object, shared: dict[str, Any]) -> HeadTables:
    """Return the head tables of a list of rows; errors name ``argument``."""
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{argument} must be a list with a table per key head, got {rows!r}")
    return HeadTables(table_from_row(f"{argument}[{i}]", row, shared) for i, row in enumerate(rows))
