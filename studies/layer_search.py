"""Search for a table per layer without gradients, the baseline for the search by gradient.

Each layer has its own bounds and temperature, of a family with one power. The search is that of
``evolutionary_search.py``. The nearest published idea is LPES, arXiv 2606.27705.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from evolutionary_search import MUTATED_GENES, bred

from mrrope.calibration.search import Point
from mrrope.calibration.spaces import PowerSpace
from mrrope.tables.table_set import TableSet

STEPS = (2.0, 2.0, 0.02)
"""Standard deviations of a mutation: of either bound in pairs, and of the temperature."""


@dataclass(frozen=True)
class LayerGenes:
    """Sets of tables as points: both bounds and the temperature of every layer."""

    space: PowerSpace
    layers: int

    def start(self) -> Point:
        """The point whose layers all have the space's first table."""
        return self.space.start[1:] * self.layers

    def nearest(self, point: Point) -> Point:
        """Make the bounds of every layer valid."""
        return tuple(number for layer in self._by_layer(point) for number in self._projected(layer)[1:])

    def table(self, point: Point) -> TableSet:
        """The set of a point."""
        return TableSet([self.space.table(self._projected(layer)) for layer in self._by_layer(point)])

    def mutated(self, point: Point, rng: random.Random) -> Point:
        """Mutate some layers."""
        moved: list[float] = []
        for layer in self._by_layer(point):
            is_moved = rng.random() < MUTATED_GENES
            moved += [gene + rng.gauss(0, step) * is_moved for gene, step in zip(layer, STEPS, strict=True)]
        return self.nearest(tuple(moved))

    def crossed(self, one: Point, other: Point, rng: random.Random) -> Point:
        """Take every layer from either parent."""
        pairs = zip(self._by_layer(one), self._by_layer(other), strict=True)
        return tuple(number for pair in pairs for number in rng.choice(pair))

    def children(self, parents: Sequence[Point], rng: random.Random) -> list[Point]:
        """New children: half of them mutated, half crossed and then mutated."""
        return bred(self, parents, rng)

    def _projected(self, layer: Point) -> Point:
        return self.space.nearest((self.space.power, *layer))

    def _by_layer(self, point: Point) -> list[Point]:
        width = len(STEPS)
        return [point[start : start + width] for start in range(0, len(point), width)]
