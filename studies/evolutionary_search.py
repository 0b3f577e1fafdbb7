"""An evolutionary search for a table, of LongRoPE's kind: what calibration's own search is compared with.

An individual is every pair's cumulative scale, which never falls from pair to pair, and the temperature. The first
generation are the published tables. Children are mutated, or crossed from two parents; they successive_halving the same rungs as
the candidates of the calibration, cheap ones first, and the best of parents and children live on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mrrope.calibration.objective import Figures, Readings
from mrrope.calibration.search import BudgetSpentError, Objective, Point, successive_halving
from mrrope.calibration.spaces import TEMPERATURES, attention_factor, clamp, temperature_of
from mrrope.evaluation.documents import Document
from mrrope.tables import FrequencyTable, frequency_table

PARENTS = 8
CHILDREN = 16
MUTATED_GENES = 0.3
"""The share of a child's genes that change."""


@dataclass(frozen=True)
class TableGenes:
    """Tables as points: the logarithms of all cumulative scales, and the temperature."""

    origin: FrequencyTable
    """Any table of the model at the scale."""

    def point(self, table: FrequencyTable) -> Point:
        """That of a table."""
        return self.nearest((*table.cumulative_scale.log().tolist(), temperature_of(table)))

    def nearest(self, point: Point) -> Point:
        """Scales that never fall, and are no more than twice the whole, as in the calibration."""
        highest = math.log(2 * self.origin.scale)
        rising = accumulate((clamp(gene, 0.0, highest) for gene in point[:-1]), max)
        return (*(round(gene, 9) for gene in rising), round(clamp(point[-1], *TEMPERATURES), 9))

    def table(self, point: Point) -> FrequencyTable:
        """The table that a point stands for."""
        return frequency_table(
            "longrope",
            rotary_dim=self.origin.rotary_dim,
            base=self.origin.base,
            original_max_position=self.origin.original_max_position,
            scale=self.origin.scale,
            factors=[math.exp(gene) for gene in point[:-1]],
            attention_factor=attention_factor(point[-1], self.origin.scale),
        )

    def mutated(self, point: Point, chance: random.Random) -> Point:
        """Some genes moved, about as far as the calibration's first steps."""
        steps = [math.log(self.origin.scale) / 12] * (len(point) - 1) + [0.02]
        moved = [
            gene + (chance.gauss(0, step) if chance.random() < MUTATED_GENES else 0)
            for gene, step in zip(point, steps, strict=True)
        ]
        return self.nearest(tuple(moved))

    def crossed(self, one: Point, other: Point, chance: random.Random) -> Point:
        """Every gene from one of two parents."""
        return self.nearest(tuple(chance.choice(genes) for genes in zip(one, other, strict=True)))

    def children(self, parents: Sequence[Point], chance: random.Random) -> list[Point]:
        """Half of them mutated, half crossed and then mutated; children like a parent are none."""
        found: dict[Point, None] = {}
        while len(found) < CHILDREN:
            child = chance.choice(parents)
            if len(found) % 2 and len(parents) > 1:
                one, other = chance.sample(parents, 2)
                child = self.crossed(one, other, chance)
            child = self.mutated(child, chance)
            if child not in parents:
                found[child] = None
        return list(found)


def evolve(
    genes: TableGenes,
    first: Sequence[Point],
    objective: Objective[Point],
    rungs: int,
    seed: int = 0,
    improved: Callable[[Point, float], object] = lambda *_: None,
) -> Point:
    """The best individual when the objective has enough and raises BudgetSpentError.

    Args:
        genes: how children come from parents.
        first: the first generation.
        objective: what to make small.
        rungs: how many the objective has.
        seed: of all that is left to chance.
        improved: told the best of every generation, and its loss on the last rung.

    Raises:
        BudgetSpentError: where there was not enough for the first generation.
    """
    chance = random.Random(seed)
    parents = successive_halving(dict.fromkeys(first), objective, range(rungs))
    try:
        while True:
            improved(parents[0], objective(parents[0], rungs - 1))
            risen = successive_halving(genes.children(parents, chance), objective, range(rungs))
            parents = sorted([*parents, *risen], key=lambda one: objective(one, rungs - 1))[:PARENTS]
    except BudgetSpentError:
        return parents[0]


class TokenLimitedReadings(Readings):
    """Readings that end after so many tokens, however long they take."""

    def __init__(self, *arguments: Any, ration: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ration = ration
        self.tokens = 0

    def _next_reading(self, key: str, table: FrequencyTable, document: Document, length: int) -> list[Figures]:
        if self.tokens + length > self.ration:
            raise BudgetSpentError
        self.tokens += length
        return super()._next_reading(key, table, document, length)
