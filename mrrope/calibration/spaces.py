"""Search spaces of tables: power, bounds and temperature; and free radix factors at knots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from mrrope.calibration.search import Point
from mrrope.tables.frequency_table import FrequencyTable, frequency_table

USUAL_TEMPERATURE = 0.1
"""The default coefficient of YaRN and MrRoPE: the attention factor is 1 + temperature ln(scale)."""

TEMPERATURES = (-0.1, 0.5)
POWERS = (-4.0, 8.0)
SAME_SCALE = 1e-9
"""Log scales of neighbouring pairs that differ by less are equal."""


def temperature_of(table: FrequencyTable, native: FrequencyTable | None = None) -> float:
    """The temperature of a table's attention factor, relative to that of the table it extends."""
    own = 1.0 if native is None else native.attention_factor
    return (table.attention_factor / own - 1) / math.log(table.scale)


def attention_factor(temperature: float, scale: float, native: FrequencyTable | None = None) -> float:
    """The attention factor of a temperature."""
    own = 1.0 if native is None else native.attention_factor
    return own * (1 + temperature * math.log(scale))


def clamp(value: float, low: float, high: float) -> float:
    """Clamp a value to a range."""
    return min(max(value, low), high)


@dataclass(frozen=True)
class PowerSpace:
    """Power, bounds and temperature of ``mrrope_pow``, starting from a table of that family."""

    origin: FrequencyTable
    power: float
    native: FrequencyTable | None = None
    """The model's own table if it is not plain RoPE."""

    steps = (1.0, 4.0, 4.0, 0.04)
    halvings = 2

    @property
    def start(self) -> Point:
        assert self.origin.bounds is not None
        return (self.power, *map(float, self.origin.bounds), temperature_of(self.origin, self.native))

    def nearest(self, point: Point) -> Point:
        """Round bounds to integers with d_l < d_h within the table; clamp power and temperature."""
        power, low, high, temperature = point
        last = self.origin.rotary_dim // 2 - 1
        low = clamp(round(low), 0, last - 1)
        return (
            clamp(power, *POWERS),
            float(low),
            float(clamp(round(high), low + 1, last)),
            round(clamp(temperature, *TEMPERATURES), 9),
        )

    def table(self, point: Point) -> FrequencyTable:
        """The table of a point."""
        power, low, high, temperature = point
        return frequency_table(
            "mrrope_pow",
            rotary_dim=self.origin.rotary_dim,
            base=self.origin.base,
            original_max_position=self.origin.original_max_position,
            scale=self.origin.scale,
            power=power,
            bounds=(int(low), int(high)),
            attention_factor=attention_factor(temperature, self.origin.scale, self.native),
            native=self.native,
        )


@dataclass(frozen=True)
class KnotSpace:
    """Free radix factors: offsets of the log cumulative scale at knots, linearly interpolated; and the temperature.

    The knots cover the pairs that the table scales partially, with a margin on either side. Pairs before them keep
    their scale; pairs after them move with the last knot, so that the largest scale is free too. No radix factor is
    below 1, and no cumulative scale above twice the table's scale.
    """

    origin: FrequencyTable
    knots: int
    native: FrequencyTable | None = None
    """The model's own table if it is not plain RoPE."""

    halvings = 2

    @property
    def start(self) -> Point:
        return (*[0.0] * self.knots, temperature_of(self.origin, self.native))

    @property
    def steps(self) -> Point:
        return (*[math.log(self.origin.scale) / 12] * self.knots, 0.02)

    def nearest(self, point: Point) -> Point:
        """Every offset is valid, since :meth:`table` makes the scales monotone; clamp the temperature."""
        return (*(round(value, 9) for value in point[:-1]), round(clamp(point[-1], *TEMPERATURES), 9))

    @cached_property
    def fastest_first(self) -> torch.Tensor:
        """Pair indices by decreasing frequency."""
        table = self.native or self.origin
        return table.inv_freq.argsort(descending=True, stable=True)

    @cached_property
    def log_scales(self) -> torch.Tensor:
        """Log scale of each pair relative to the model's own table, the fastest first."""
        native = torch.ones_like(self.origin.inv_freq) if self.native is None else self.native.cumulative_scale
        return (self.origin.cumulative_scale / native).log()[self.fastest_first]

    @cached_property
    def weights(self) -> torch.Tensor:
        """Interpolation weights ``[pairs, knots]``."""
        pairs = torch.arange(len(self.log_scales), dtype=torch.float64)
        moving = self.log_scales.diff().abs() > SAME_SCALE
        between = torch.nonzero(moving).flatten()
        first, last = (int(between[0]), int(between[-1]) + 1) if len(between) else (0, len(pairs) - 1)
        margin = (last - first) / self.knots
        low, high = max(first - margin, 0.0), min(last + margin, len(pairs) - 1.0)
        # In units of the knot spacing; the offset at 0 is fixed at zero, the knots are at 1, 2, ...
        place = ((pairs - low) / (high - low) * self.knots).clamp(0, self.knots)
        return (1 - (place[:, None] - torch.arange(1, self.knots + 1)).abs()).clamp(min=0)

    def table(self, point: Point) -> FrequencyTable:
        """The table of a point."""
        moved = self.log_scales + self.weights @ torch.tensor(point[:-1], dtype=torch.float64)
        rising = moved.cummax(0).values.clamp(0, math.log(2 * self.origin.scale))
        factors = torch.empty_like(rising)
        factors[self.fastest_first] = rising.exp()
        return frequency_table(
            # Not "radix", whose first pair keeps its frequency, which PI scales.
            "longrope",
            rotary_dim=self.origin.rotary_dim,
            base=self.origin.base,
            original_max_position=self.origin.original_max_position,
            scale=self.origin.scale,
            factors=factors,
            attention_factor=attention_factor(point[-1], self.origin.scale, self.native),
            native=self.native,
        )
