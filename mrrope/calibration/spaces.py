"""Tables as points: a few numbers first, then the radix factors themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from mrrope.calibration.search import Point
from mrrope.tables import FrequencyTable, frequency_table

USUAL_TEMPERATURE = 0.1
"""The coefficient that YaRN and MrRoPE come with: the attention factor is 1 + temperature ln(scale)."""

TEMPERATURES = (-0.1, 0.5)
POWERS = (-4.0, 8.0)
TOUCHED = 1e-9


def temperature_of(table: FrequencyTable, native: FrequencyTable | None = None) -> float:
    """The coefficient that gives a table's attention factor, beside that of the table it extends."""
    own = 1.0 if native is None else native.attention_factor
    return (table.attention_factor / own - 1) / math.log(table.scale)


def attention_factor(temperature: float, scale: float, native: FrequencyTable | None = None) -> float:
    """What a coefficient gives."""
    own = 1.0 if native is None else native.attention_factor
    return own * (1 + temperature * math.log(scale))


def clamp(value: float, low: float, high: float) -> float:
    """The number in the range that is nearest."""
    return min(max(value, low), high)


@dataclass(frozen=True)
class PowerSpace:
    """Power, bounds and temperature of ``mrrope_pow``, from a table of that family on."""

    origin: FrequencyTable
    power: float
    native: FrequencyTable | None = None
    """What the model rotates by as it is, where that is not plain RoPE."""

    steps = (1.0, 4.0, 4.0, 0.04)
    halvings = 2

    @property
    def start(self) -> Point:
        assert self.origin.bounds is not None
        return (self.power, *map(float, self.origin.bounds), temperature_of(self.origin, self.native))

    def nearest(self, point: Point) -> Point:
        """Bounds are whole numbers, in order, within the table; pairs between them share the scale."""
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
        """The table that a point stands for."""
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
    """Free radix factors: what is added to the logarithm of a table's cumulative scale at a few knots, and between
    them in proportion; and the temperature.

    The knots cover the pairs that the table slows by a part of the scale and some on either side. Pairs before them
    stay as they are; pairs after them move with the last knot, so that the end need not be the scale itself. No radix
    factor gets below 1, and no pair is slowed by more than twice the scale.
    """

    origin: FrequencyTable
    knots: int
    native: FrequencyTable | None = None
    """What the model rotates by as it is, where that is not plain RoPE."""

    halvings = 2

    @property
    def start(self) -> Point:
        return (*[0.0] * self.knots, temperature_of(self.origin, self.native))

    @property
    def steps(self) -> Point:
        return (*[math.log(self.origin.scale) / 12] * self.knots, 0.02)

    def nearest(self, point: Point) -> Point:
        """Any point will do: the table keeps its order."""
        return (*(round(value, 9) for value in point[:-1]), round(clamp(point[-1], *TEMPERATURES), 9))

    @cached_property
    def fastest_first(self) -> torch.Tensor:
        """The pairs in the order in which the model rotates them."""
        table = self.native or self.origin
        return table.inv_freq.argsort(descending=True, stable=True)

    @cached_property
    def log_scales(self) -> torch.Tensor:
        """By how much the table that the search starts from slows each pair, the fastest first."""
        native = torch.ones_like(self.origin.inv_freq) if self.native is None else self.native.cumulative_scale
        return (self.origin.cumulative_scale / native).log()[self.fastest_first]

    @cached_property
    def weights(self) -> torch.Tensor:
        """How much of each knot's value every pair gets, ``[pairs, knots]``."""
        pairs = torch.arange(len(self.log_scales), dtype=torch.float64)
        moving = self.log_scales.diff().abs() > TOUCHED
        between = torch.nonzero(moving).flatten()
        first, last = (int(between[0]), int(between[-1]) + 1) if len(between) else (0, len(pairs) - 1)
        margin = (last - first) / self.knots
        low, high = max(first - margin, 0.0), min(last + margin, len(pairs) - 1.0)
        # In units of the distance between knots; the one at 0 is fixed, the others are 1, 2, ...
        place = ((pairs - low) / (high - low) * self.knots).clamp(0, self.knots)
        return (1 - (place[:, None] - torch.arange(1, self.knots + 1)).abs()).clamp(min=0)

    def table(self, point: Point) -> FrequencyTable:
        """The table that a point stands for."""
        moved = self.log_scales + self.weights @ torch.tensor(point[:-1], dtype=torch.float64)
        rising = moved.cummax(0).values.clamp(0, math.log(2 * self.origin.scale))
        factors = torch.empty_like(rising)
        factors[self.fastest_first] = rising.exp()
        return frequency_table(
            # Radix factors alone would have the first pair keep its speed, which PI slows.
            "longrope",
            rotary_dim=self.origin.rotary_dim,
            base=self.origin.base,
            original_max_position=self.origin.original_max_position,
            scale=self.origin.scale,
            factors=factors,
            attention_factor=attention_factor(point[-1], self.origin.scale, self.native),
            native=self.native,
        )
