"""Tables whose scales and factors are parameters: one for the model, one per layer, or one per key head.

Query heads may have a factor each besides, with one table per key head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from mrrope.tables.frequency_table import FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables, NativeRope
from mrrope.tables.table_set import TableSet

Sharing = Literal["model", "layer", "head"]
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
"""What gets a table of its own."""

FREE_SHARE = 0.5
"""Pairs whose wavelength is at least this share of the native length move freely, faster ones in proportion to it.

Training has shown the model all angles of fast pairs, so they need not move, and what moves them is chance: in two
searches of SmolLM2 that let pairs from 256 tokens on move freely, the moves of pairs below 700 tokens had a cosine of
0.0, from 4096 tokens (half the native length) on 0.7 to 0.9.
"""
FACTOR_RATE = 2 / 15
"""Step size of the log attention factor, relative to that of the log scale of a slow pair: 0.004 to 0.03."""
QUERY_FACTOR_RATE = 2 * FACTOR_RATE
"""Step size of the log query factor, relative to that of the log scale of a slow pair: 0.008 to 0.03.

An attention factor is in a score twice, by q and by k, and a query factor once, so twice the step changes scores as
much. Three times that is no better: searches of 60 s from SmolLM2's set for scale 2 took the validation loss from 2.057
to 1.989 with it, and to 1.993 with three times that.
"""
DIGITS = 7
"""Significant digits of the resulting scales and factors, which keep the JSON short: a relative rounding error of up to
5e-7."""


class LearnableTables:
    """Log cumulative scales and log factors around a start, as one parameter with one learning rate.

    ``moves`` ``[layers or 1, heads or 1, pairs + 1 + group]`` starts at 0. The log cumulative scale of a pair is that
    of the start plus its move times its rate; the column after the pairs moves the log attention factor. The group are
    the log factors of the query heads that share a key head, none without query factors. Adam takes steps of one size
    in ``moves``, so the rates are relative learning rates.
    """

    def __init__(
        self,
        start: ModelTables,
        trained: NativeRope,
        *,
        layers: int,
        heads: int,
        per: Sharing,
        query_heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start from a table or a set.

        Args:
            start: a table for the model; must not vary over layers or heads that share a table.
            trained: the model's own RoPE.
            layers: number of layers.
            heads: number of key heads of a layer.
            per: what gets a table of its own.
            query_heads: number of query heads of a layer that get a factor each, with a table per key head; None for
                tables without query factors.
            device: the model's.

        Raises:
            ValueError: the start does not fit the model or the sharing.
        """
        if query_heads is not None and (per != "head" or query_heads % heads):
            raise ValueError(
                f"query_heads must be None, or a multiple of {heads} key heads with a table each, got {query_heads}"
            )
        tables = expanded(start, layers, heads)
        factors = expanded_query_factors(start, layers, query_heads)
        self.trained = trained
        self.layers, self.heads, self.per = layers, heads, per
        self.scale = start.scale
        self.original_max_position = start.original_max_position
        own = frequency_table(
            "rope",
            rotary_dim=start.rotary_dim,
            base=start.base,
            original_max_position=start.original_max_position,
        )
        native = trained.native or own
        log_frequencies = native.inv_freq.log()
        numbers = torch.stack([torch.stack([_numbers(table, native) for table in row]) for row in tables])
        shared = numbers[: 1 if per == "model" else layers, : heads if per == "head" else 1]
        if not torch.equal(shared.expand_as(numbers), numbers):
            raise ValueError(f"start must be one table per {per} for a search per {per}, got {start!r}")
        free = FREE_SHARE * start.original_max_position
        rates = (2 * math.pi / native.inv_freq / free).clamp(max=1.0)
        # One row per key head, with the factors of its query heads; no columns without query factors.
        group = factors.log().view(layers, heads, (query_heads or 0) // heads)[: len(shared), : shared.shape[1]]
        self._table_columns = shared.shape[-1]
        self._start = torch.cat([shared, group], dim=-1).to(device)
        of_factors = [FACTOR_RATE] + [QUERY_FACTOR_RATE] * group.shape[-1]
        self._rates = torch.cat([rates, rates.new_tensor(of_factors)]).to(device)
        self._log_frequencies = log_frequencies.to(device)
        # float64: in float32 the angle of the fastest pair is off by 0.004 at 131072 tokens.
        self.moves = torch.zeros_like(self._start, requires_grad=True)

    @property
    def has_query_factors(self) -> bool:
        """Whether query heads have factors."""
        return self._start.shape[-1] > self._table_columns

    def logarithms(self) -> torch.Tensor:
        """Log cumulative scales, relative to the model's own table, log attention factor, and log query factors."""
        return self._start + self.moves * self._rates

    def frequencies(self) -> torch.Tensor:
        """The floating tables of all layers and key heads, ``[layers, heads, pairs + 1]``, differentiable."""
        scales, factor = self.logarithms()[..., : self._table_columns].tensor_split([-1], dim=-1)
        columns = [self._log_frequencies - scales, factor]
        return torch.cat(columns, dim=-1).exp().expand(self.layers, self.heads, -1)

    def query_factors(self) -> torch.Tensor | None:
        """The factors of all layers and query heads, ``[layers, query heads]``, differentiable; None without."""
        return self.logarithms()[..., self._table_columns :].exp().flatten(1) if self.has_query_factors else None

    @torch.no_grad()
    def tables(self) -> FrequencyTable | TableSet:
        """The tables: one for the model, or a set."""
        logarithms = self.logarithms().cpu()
        rows = [[self._table(one) for one in layer] for layer in logarithms[..., : self._table_columns]]
        if self.per == "model":
            return rows[0][0]
        if (factors := self.query_factors()) is not None:
            return TableSet(
                HeadTables(row, map(_shortened, of_layer)) for row, of_layer in zip(rows, factors.tolist(), strict=True)
            )
        return TableSet([row[0] if len(row) == 1 else HeadTables(row) for row in rows])

    def _table(self, logarithms: torch.Tensor) -> FrequencyTable:
        *scales, factor = map(_shortened, logarithms.exp().tolist())
        return frequency_table(
            "longrope",
            rotary_dim=self.trained.rotary_dim,
            base=self.trained.base,
            original_max_position=self.original_max_position,
            scale=self.scale,
            factors=scales,
            attention_factor=factor,
            native=self.trained.native,
        )


def expanded(tables: ModelTables, layers: int, heads: int) -> list[list[FrequencyTable]]:
    """One table for every layer and key head.

    Raises:
        ValueError: the tables are for another number of layers or heads.
    """
    rows: Sequence[FrequencyTable | HeadTables] = list(tables) if isinstance(tables, TableSet) else [tables] * layers
    if len(rows) != layers:
        raise ValueError(f"start must be a set for the model's {layers} layers, got one for {len(rows)}")
    found = []
    for row in rows:
        own = list(row) if isinstance(row, HeadTables) else [row]
        if len(own) not in (1, heads):
            raise ValueError(f"start must have a table for each of the model's {heads} key heads, got {len(own)}")
        found.append(own * (heads // len(own)))
    return found


def expanded_query_factors(tables: ModelTables, layers: int, query_heads: int | None) -> torch.Tensor:
    """The factors of every layer and query head, ``[layers, query heads]``; 1 where the tables have none.

    Raises:
        ValueError: the tables have factors for another number of query heads, or have them and ``query_heads`` is None.
    """
    of_layers = list(tables) if isinstance(tables, TableSet) else [tables] * layers
    rows = [one.query_factors for one in of_layers]
    for row in rows:
        if row is not None and query_heads is None:
            raise ValueError(f"start must have no query factors for a search without them, got {tables!r}")
        if row is not None and len(row) != query_heads:
            raise ValueError(
                f"start must have a factor for each of the model's {query_heads} query heads, got {len(row)}"
            )
    return torch.tensor([row or [1.0] * (query_heads or 0) for row in rows], dtype=torch.float64)


def _shortened(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _numbers(table: FrequencyTable, native: FrequencyTable) -> torch.Tensor:
    """Log scales relative to the model's own table, and the log attention factor."""
    factor = torch.tensor([table.attention_factor], dtype=torch.float64)
    return torch.cat([native.inv_freq / table.inv_freq, factor]).log()
