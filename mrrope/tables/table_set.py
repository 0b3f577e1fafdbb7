"""Tables for every layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mrrope.tables import json as table_json
from mrrope.tables import shipped
from mrrope.tables.frequency_table import DeviceCopies, FrequencyTable, words_per_head
from mrrope.tables.head_tables import HeadTables, heads_from_rows, require_agreement, settings_of, table_from_row
from mrrope.tables.query_factors import checked_query_factors, require_multiple, require_one_number

OfOneLayer = FrequencyTable | HeadTables
"""What rotates one layer: one table for all heads, or one per key head."""

FIELDS_WITH_FACTORS = {"heads", "query_factors"}
"""The fields of a layer's JSON where its query heads have factors."""


def every_table(tables: OfOneLayer | TableSet) -> Iterator[FrequencyTable]:
    """Yield the tables of all layers and key heads."""
    if isinstance(tables, FrequencyTable):
        yield tables
    else:
        for part in tables:
            yield from every_table(part)


def without_query_factors(tables: OfOneLayer) -> OfOneLayer:
    """Return what rotates the keys of a layer."""
    return tables.without_query_factors()


class TableSet:
    """The tables of every layer of a model: one for all heads of the layer, or one per key head. Immutable."""

    def __init__(self, layers: Iterable[OfOneLayer]) -> None:
        """Join the tables of all layers.

        They must agree in ``rotary_dim``, ``base``, ``original_max_position`` and ``scale``, head tables in the number
        of key heads, and those with query factors in the number of query heads.

        Args:
            layers: a :class:`FrequencyTable` or :class:`HeadTables` per layer, first layer first.

        Raises:
            TypeError: ``layers`` holds something else.
            ValueError: ``layers`` is empty, or two of them do not agree.
        """
        # HeadTables are iterable too, but hold a table for each head, not for each layer.
        if not isinstance(layers, Iterable) or isinstance(layers, HeadTables):
            raise TypeError(f"layers must be the tables of every layer, got {type(layers).__name__}")
        self._layers = tuple(layers)
        if not self._layers:
            raise ValueError("layers must hold the tables of every layer, got none")
        self._key_heads: int | None = None
        self._query_heads: int | None = None
        for i, tables in enumerate(self._layers):
            if not isinstance(tables, OfOneLayer):
                raise TypeError(f"layers[{i}] must be a FrequencyTable or HeadTables, got {type(tables).__name__}")
            if tables.key_heads is not None and tables.key_heads != (self._key_heads or tables.key_heads):
                raise ValueError(
                    f"layers[{i}] must hold tables for {self._key_heads} key heads, as those before it do, got "
                    f"{tables.key_heads}"
                )
            self._key_heads = self._key_heads or tables.key_heads
            self._query_heads = require_one_number(f"layers[{i}]", tables.query_heads, self._query_heads)
        require_multiple("layers", self._query_heads, self._key_heads)
        require_agreement("layers", self._layers)
        # Made here and kept: torch.compile cannot make tables.
        self._of_keys: TableSet | None = None
        if self._query_heads is not None:
            self._of_keys = TableSet(map(without_query_factors, self._layers))
        heads = self._key_heads or 1
        with torch.inference_mode(False):
            words = [words_per_head(tables.packed(torch.device("cpu"))).expand(heads, -1) for tables in self._layers]
            self._packed = DeviceCopies(torch.stack(words)[None])

    @property
    def key_heads(self) -> int | None:
        """The number of key heads that have a table each; None where every layer has one table for all heads."""
        return self._key_heads

    @property
    def query_heads(self) -> int | None:
        """The number of query heads that have a factor each; None where no layer has query factors."""
        return self._query_heads

    def without_query_factors(self) -> TableSet:
        """Return the tables of keys: these without query factors, or these tables where they have none."""
        return self._of_keys or self

    @property
    def rotary_dim(self) -> int:
        """The number of rotated components of a head."""
        return self._layers[0].rotary_dim

    @property
    def base(self) -> float:
        """RoPE's theta."""
        return self._layers[0].base

    @property
    def original_max_position(self) -> float:
        """The context length without the extension."""
        return self._layers[0].original_max_position

    @property
    def scale(self) -> float:
        """By how much the context length is extended."""
        return self._layers[0].scale

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> OfOneLayer:
        return self._layers[layer]

    def __iter__(self) -> Iterator[OfOneLayer]:
        return iter(self._layers)

    def packed(self, device: torch.device) -> torch.Tensor:
        """Return all tables as one int64 tensor ``[1, layers, key heads or 1, words]``; the copy is cached.

        Query factors are not in it: it re-rotates keys.
        """
        return self._packed.on(device)

    def to(self, device: torch.device | str) -> TableSet:
        """Cache a copy on ``device`` ahead of CUDA-graph capture or torch.compile, and return this set."""
        self.packed(torch.empty(0, device=device).device)
        return self

    def is_like(self, other: OfOneLayer | TableSet) -> bool:
        """Whether both rotate alike in every layer, whatever their methods and settings."""
        if not isinstance(other, TableSet):
            return all(tables.is_like(other) for tables in self)
        return len(self) == len(other) and all(a.is_like(b) for a, b in zip(self, other, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the set as a JSON-serializable dict; what all tables share is stated once."""
        layers = [
            [table.to_dict(compact=True) for table in (tables if isinstance(tables, HeadTables) else [tables])]
            for tables in self
        ]
        shared = table_json.shared_fields([row for rows in layers for row in rows])
        return {
            **shared,
            "format": table_json.SET_FORMAT,
            "layers": [
                _row_of_layer(tables, [table_json.unshared_fields(row, shared) for row in rows])
                for tables, rows in zip(self, layers, strict=True)
            ],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TableSet:
        """Return the set of a :meth:`to_dict` dict.

        Raises:
            TypeError, ValueError: ``data`` has missing, unknown, ill-typed or inconsistent fields.
        """
        shared = table_json.without_format(data, table_json.SET_FORMAT)
        layers = shared.pop("layers", None)
        if not isinstance(layers, list) or not layers:
            raise ValueError(f"layers must be a list with the tables of every layer, got {layers!r}")
        return TableSet(_layer_of_row(f"layers[{i}]", layer, shared) for i, layer in enumerate(layers))

    def save(self, path: str | Path) -> None:
        """Write the set as JSON, a line per layer."""
        Path(path).write_text(table_json.text_of(self.to_dict()))

    @staticmethod
    def load(path: str | Path) -> TableSet:
        """Read a set that :meth:`save` wrote, or a shipped one by its name.

        Raises:
            FileNotFoundError: there is no such file or shipped set.
            ValueError: the file does not hold a set.
        """
        return TableSet.from_dict(table_json.read_object(shipped.file_of(path)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableSet) and self._layers == other._layers

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._layers)

    def __reduce__(self) -> tuple[Callable[..., TableSet], tuple[Any, ...]]:
        return TableSet, (self._layers,)

    def __repr__(self) -> str:
        heads = "" if self.key_heads is None else f" x {self.key_heads} key heads"
        factors = "" if self.query_heads is None else f", factors of {self.query_heads} query heads"
        return f"TableSet({len(self)} layers{heads}, {settings_of(self)}{factors})"


def _row_of_layer(tables: OfOneLayer, rows: list[dict[str, Any]]) -> Any:
    """Return the row of JSON of a layer, given those of its tables."""
    if not isinstance(tables, HeadTables):
        return rows[0]
    return rows if tables.query_factors is None else {"heads": rows, "query_factors": list(tables.query_factors)}


def _layer_of_row(argument: str, row: Any, shared: dict[str, Any]) -> OfOneLayer:
    """Return the tables of a layer's row of JSON; errors name ``argument``."""
    if isinstance(row, list):
        return heads_from_rows(argument, row, shared)
    if not isinstance(row, dict) or row.keys().isdisjoint(FIELDS_WITH_FACTORS):
        return table_from_row(argument, row, shared)
    if row.keys() != FIELDS_WITH_FACTORS:
        raise ValueError(
            f"{argument} must have the fields {sorted(FIELDS_WITH_FACTORS)} for head tables with query factors, got "
            f"{sorted(row)}"
        )
    heads = heads_from_rows(f"{argument}.heads", row["heads"], shared)
    return HeadTables(heads, checked_query_factors(f"{argument}.query_factors", row["query_factors"], len(heads)))
