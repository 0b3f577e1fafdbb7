"""Tables for tokens with several positions: rows, columns and frames of images and video, or M-RoPE's sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mrrope.tables.frequency_table import FrequencyTable, OpTable, require_table
from mrrope.tables.numbers import integers
from mrrope.tables.position_rows import MAX_ROWS, packed_rows, rows_of_sections


class AxisTables(OpTable):
    """One position axis per pair: a table and a range of pairs for each axis. Immutable.

    The ops take it with positions of ``[axes, batch, tokens]``; positions of ``[batch, tokens]`` are those of all axes.
    """

    axes: int
    axis_of_pair: tuple[int, ...]
    """The axis whose position rotates each pair."""

    def __init__(self, tables: Iterable[FrequencyTable]) -> None:
        """Join one table per axis: the first pairs rotate by the first axis and the first table, and so on.

        Args:
            tables: of any ``rotary_dim`` and one attention factor. Their pairs follow one another, so that their
                ``rotary_dim`` add up.

        Raises:
            TypeError: ``tables`` holds something else.
            ValueError: ``tables`` is empty or has more than 128, or two attention factors differ.
        """
        if not isinstance(tables, Iterable):
            raise TypeError(f"tables must be a FrequencyTable per axis, got {type(tables).__name__}")
        tables = tuple(tables)
        if not 0 < len(tables) <= MAX_ROWS:
            raise ValueError(
                f"tables must hold a FrequencyTable per axis, 1 to {MAX_ROWS}, got {len(tables) or 'none'}"
            )
        for i, table in enumerate(tables):
            factor = require_table(f"tables[{i}]", table).attention_factor
            if factor != tables[0].attention_factor:
                raise ValueError(
                    f"tables[{i}] must have tables[0]'s attention_factor {tables[0].attention_factor:.15g}, got "
                    f"{factor:.15g}"
                )
        self._join(tables, [axis for axis, table in enumerate(tables) for _ in range(table.rotary_dim // 2)])

    @classmethod
    def of_sections(cls, table: FrequencyTable, sections: Sequence[int], *, interleaved: bool = False) -> AxisTables:
        """Return M-RoPE: the pairs of one table, divided among the axes.

        Args:
            table: the frequencies of all pairs.
            sections: the number of pairs of each axis, as ``mrope_section`` of a config.
            interleaved: whether the axes alternate, as in Qwen3-VL, or follow one another, as in Qwen2-VL. Of
                interleaved sections the first axis gets every pair that the others leave.

        Raises:
            TypeError: ``table`` is not a FrequencyTable, or ``sections`` are not integers.
            ValueError: ``sections`` do not add up to the table's pairs, or are more than 128.
        """
        pairs = require_table("table", table).rotary_dim // 2
        counts = integers("sections", sections)
        if min(counts, default=-1) < 0 or sum(counts) != pairs:
            raise ValueError(f"sections must add up to the table's {pairs} pairs, got {counts}")
        if len(counts) > MAX_ROWS:
            raise ValueError(f"sections must be at most {MAX_ROWS}, got {len(counts)}")
        joined = cls.__new__(cls)
        joined._join((table,), rows_of_sections(counts, interleaved), len(counts))
        return joined

    def _join(self, tables: tuple[FrequencyTable, ...], axis_of_pair: list[int], axes: int | None = None) -> None:
        self._tables = tables
        self.axes = axes or len(tables)
        self.axis_of_pair = tuple(axis_of_pair)
        phase_steps = [word for table in tables for word in table._core.packed()[:-1]]
        factor = tables[0]._core.packed()[-1]
        with torch.inference_mode(False):
            steps, axes_of_pairs = (
                torch.tensor(x, dtype=torch.int64, device="cpu") for x in ([*phase_steps, factor], axis_of_pair)
            )
            super().__init__(torch.stack([steps, packed_rows(axes_of_pairs)])[None])

    def _words_of_heads(self) -> list[list[int]]:
        steps, axes = self.packed(torch.device("cpu"))[0].tolist()
        return [[*steps, *axes]]

    @property
    def rotary_dim(self) -> int:
        """The number of rotated components of a head."""
        return 2 * len(self.axis_of_pair)

    @property
    def attention_factor(self) -> float:
        """The factor on rotated q and k."""
        return self._tables[0].attention_factor

    @property
    def inv_freq(self) -> torch.Tensor:
        """Radians per position of every pair, float64 ``[rotary_dim / 2]``."""
        return torch.cat([table.inv_freq for table in self._tables])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisTables) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self._tables, self.axis_of_pair, self.axes

    def __reduce__(self) -> tuple[Callable[..., AxisTables], tuple[Any, ...]]:
        return _rebuilt, self._identity

    def __repr__(self) -> str:
        pairs = [self.axis_of_pair.count(axis) for axis in range(self.axes)]
        return f"AxisTables({self.axes} axes of {pairs} pairs, attention_factor={self.attention_factor:.6g})"


def _rebuilt(tables: tuple[FrequencyTable, ...], axis_of_pair: tuple[int, ...], axes: int) -> AxisTables:
    """Return the tables of :meth:`AxisTables.__reduce__`."""
    joined = AxisTables.__new__(AxisTables)
    joined._join(tables, list(axis_of_pair), axes)
    return joined
