"""Tables whose scales and attention factors are parameters: one for the model, one per layer, or one per key head."""

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
DIGITS = 7
"""Significant digits of the resulting scales, which keep the JSON short: a relative rounding error of up to 5e-7."""


class LearnableTables:
    """Log cumulative scales and log attention factors around a start, as one parameter with one learning rate.

    ``moves`` ``[layers or 1, heads or 1, pairs + 1]`` starts at 0. The log cumulative scale of a pair is that of the
    start plus its move times its rate; the last column moves the log attention factor. Adam takes steps of one size in
    ``moves``, so the rates are relative learning rates.
    """

    def __init__(
        self,
        start: ModelTables,
        trained: NativeRope,
        *,
        layers: int,
        heads: int,
        per: Sharing,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start from a table or a set.

        Args:
            start: a table for the model; must not vary over layers or heads that share a table.
            trained: the model's own RoPE.
            layers: number of layers.
            heads: number of key heads of a layer.
            per: what gets a table of its own.
            device: the model's.

        Raises:
            ValueError: the start does not fit the model or the sharing.
        """
        tables = expanded(start, layers, heads)
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
        self._start = shared.to(device)
        self._rates = torch.cat([rates, rates.new_tensor([FACTOR_RATE])]).to(device)
        self._log_frequencies = log_frequencies.to(device)
        # float64: in float32 the angle of the fastest pair is off by 0.004 at 131072 tokens.
        self.moves = torch.zeros_like(self._start, requires_grad=True)

    def logarithms(self) -> torch.Tensor:
        """Log cumulative scales, relative to the model's own table, and log attention factor."""
        return self._start + self.moves * self._rates

    def frequencies(self) -> torch.Tensor:
        """The floating tables of all layers and key heads, ``[layers, heads, pairs + 1]``, differentiable."""
        logarithms = self.logarithms()
        columns = [self._log_frequencies - logarithms[..., :-1], logarithms[..., -1:]]
        return torch.cat(columns, dim=-1).exp().expand(self.layers, self.heads, -1)

    @torch.no_grad()
    def tables(self) -> FrequencyTable | TableSet:
        """The tables: one for the model, or a set."""
        rows = [[self._table(one) for one in layer] for layer in self.logarithms().cpu()]
        if self.per == "model":
            return rows[0][0]
        return TableSet([row[0] if len(row) == 1 else HeadTables(row) for row in rows])

    def _table(self, logarithms: torch.Tensor) -> FrequencyTable:
        *scales, factor = (float(f"{value:.{DIGITS}g}") for value in logarithms.exp().tolist())
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


def _numbers(table: FrequencyTable, native: FrequencyTable) -> torch.Tensor:
    """Log scales relative to the model's own table, and the log attention factor."""
    factor = torch.tensor([table.attention_factor], dtype=torch.float64)
    return torch.cat([native.inv_freq / table.inv_freq, factor]).log()
