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

OfOneLayer = FrequencyTable | HeadTables
"""What rotates one layer: one table for all heads, or one per key head."""


def every_table(tables: OfOneLayer | TableSet) -> Iterator[FrequencyTable]:
    """Yield the tables of all layers and key heads."""
    if isinstance(tables, FrequencyTable):
        yield tables
    else:
        for part in tables:
            yield from every_table(part)


class TableSet:
    """The tables of every layer of a model: one for all heads of the layer, or one per key head. Immutable."""

    def __init__(self, layers: Iterable[OfOneLayer]) -> None:
        """Join the tables of all layers.

        They must agree in ``rotary_dim``, ``base``, ``original_max_position`` and ``scale``, and head tables in the
        number of key heads.

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
        for i, tables in enumerate(self._layers):
            if not isinstance(tables, OfOneLayer):
                raise TypeError(f"layers[{i}] must be a FrequencyTable or HeadTables, got {type(tables).__name__}")
            if tables.key_heads is not None and tables.key_heads != (self._key_heads or tables.key_heads):
                raise ValueError(
                    f"layers[{i}] must hold tables for {self._key_heads} key heads, as those before it do, got "
                    f"{tables.key_heads}"
                )
            self._key_heads = self._key_heads or tables.key_heads
        require_agreement("layers", self._layers)
        heads = self._key_heads or 1
        with torch.inference_mode(False):
            words = [words_per_head(tables.packed(torch.device("cpu"))).expand(heads, -1) for tables in self._layers]
            self._packed = DeviceCopies(torch.stack(words)[None])

    @property
    def key_heads(self) -> int | None:
        """The number of key heads that have a table each; None where every layer has one table for all heads."""
        return self._key_heads

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
        """Return all tables as one int64 tensor ``[1, layers, key heads or 1, words]``; the copy is cached."""
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
        layers: list[Any] = [
            [table.to_dict(compact=True) for table in tables]
            if isinstance(tables, HeadTables)
            else tables.to_dict(compact=True)
            for tables in self
        ]
        rows = [row for layer in layers for row in (layer if isinstance(layer, list) else [layer])]
        shared = table_json.shared_fields(rows)
        return {
            **shared,
            "format": table_json.SET_FORMAT,
            "layers": [
                [table_json.unshared_fields(row, shared) for row in layer]
                if isinstance(layer, list)
                else table_json.unshared_fields(layer, shared)
                for layer in layers
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
        return TableSet(
            heads_from_rows(f"layers[{i}]", layer, shared)
            if isinstance(layer, list)
            else table_from_row(f"layers[{i}]", layer, shared)
            for i, layer in enumerate(layers)
        )

    def save(self, path: str | Path) -> None:
        """Write the set as JSON, a line per layer."""
        Path(path).write_text(table_json.text_of(self.to_dict(), "layers"))

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
        return f"TableSet({len(self)} layers{heads}, {settings_of(self)})"
