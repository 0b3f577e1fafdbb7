"""Evolutionary search for a table, as in LongRoPE: the baseline for the search of the calibration.

An individual has the monotone cumulative scales of all pairs and the temperature. The first generation is the
published tables. Children are mutated, or crossed from two parents and mutated. Successive halving selects them on the
rungs of the calibration, and the best of parents and children survive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from mrrope.calibration.objective import Figures, Readings
from mrrope.calibration.search import BudgetSpentError, Objective, Point, successive_halving
from mrrope.calibration.spaces import TEMPERATURES, attention_factor, clamp, temperature_of
from mrrope.evaluation.documents import Document
from mrrope.evaluation.truncated import Truncation
from mrrope.tables.frequency_table import FrequencyTable, frequency_table
from mrrope.tables.lookup import ModelTables

PARENTS = 8
CHILDREN = 16
MUTATED_GENES = 0.3
"""Mutation probability of a gene."""


@dataclass(frozen=True)
class TableGenes:
    """Tables as points: the log cumulative scales of all pairs, and the temperature."""

    origin: FrequencyTable
    """Any table for the model at the scale."""

    def point(self, table: FrequencyTable) -> Point:
        """The point of a table."""
        return self.nearest((*table.cumulative_scale.log().tolist(), temperature_of(table)))

    def nearest(self, point: Point) -> Point:
        """Make the scales monotone and at most twice the table's scale, as in the calibration."""
        highest = math.log(2 * self.origin.scale)
        rising = accumulate((clamp(gene, 0.0, highest) for gene in point[:-1]), max)
        return (*(round(gene, 9) for gene in rising), round(clamp(point[-1], *TEMPERATURES), 9))

    def table(self, point: Point) -> FrequencyTable:
        """The table of a point."""
        return frequency_table(
            "longrope",
            rotary_dim=self.origin.rotary_dim,
            base=self.origin.base,
            original_max_position=self.origin.original_max_position,
            scale=self.origin.scale,
            factors=[math.exp(gene) for gene in point[:-1]],
            attention_factor=attention_factor(point[-1], self.origin.scale),
        )

    def mutated(self, point: Point, rng: random.Random) -> Point:
        """Mutate some genes, by about the first step size of the calibration."""
        steps = [math.log(self.origin.scale) / 12] * (len(point) - 1) + [0.02]
        moved = [
            gene + (rng.gauss(0, step) if rng.random() < MUTATED_GENES else 0)
            for gene, step in zip(point, steps, strict=True)
        ]
        return self.nearest(tuple(moved))

    def crossed(self, one: Point, other: Point, rng: random.Random) -> Point:
        """Uniform crossover of two parents."""
        return self.nearest(tuple(rng.choice(genes) for genes in zip(one, other, strict=True)))

    def children(self, parents: Sequence[Point], rng: random.Random) -> list[Point]:
        """New children: half of them mutated, half crossed and then mutated."""
        return bred(self, parents, rng)


class Genes(Protocol):
    """Mutation and crossover of points."""

    def mutated(self, point: Point, rng: random.Random) -> Point:
        """Mutate some genes."""

    def crossed(self, one: Point, other: Point, rng: random.Random) -> Point:
        """Cross two parents."""

    def children(self, parents: Sequence[Point], rng: random.Random) -> list[Point]:
        """New children."""


def bred(genes: Genes, parents: Sequence[Point], rng: random.Random) -> list[Point]:
    """New children: half of them mutated, half crossed and then mutated."""
    found: dict[Point, None] = {}
    while len(found) < CHILDREN:
        child = rng.choice(parents)
        if len(found) % 2 and len(parents) > 1:
            one, other = rng.sample(parents, 2)
            child = genes.crossed(one, other, rng)
        child = genes.mutated(child, rng)
        if child not in parents:
            found[child] = None
    return list(found)


def evolve(
    genes: Genes,
    first: Sequence[Point],
    objective: Objective[Point],
    rungs: int,
    seed: int = 0,
    improved: Callable[[Point, float], object] = lambda *_: None,
) -> Point:
    """Evolve until the objective raises BudgetSpentError, and return the best individual.

    Args:
        genes: mutation and crossover.
        first: the first generation.
        objective: the function to minimize.
        rungs: the objective's number of rungs.
        seed: of the random generator.
        improved: called with the best individual of every generation and its loss on the last rung.

    Raises:
        BudgetSpentError: the budget does not suffice for the first generation.
    """
    rng = random.Random(seed)
    parents = successive_halving(dict.fromkeys(first), objective, range(rungs))
    try:
        while True:
            improved(parents[0], objective(parents[0], rungs - 1))
            survivors = successive_halving(genes.children(parents, rng), objective, range(rungs))
            parents = sorted([*parents, *survivors], key=lambda one: objective(one, rungs - 1))[:PARENTS]
    except BudgetSpentError:
        return parents[0]


class TokenLimitedReadings(Readings):
    """Readings with a budget in tokens instead of seconds."""

    def __init__(self, *arguments: Any, max_tokens: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.max_tokens = max_tokens
        self.tokens = 0

    def _next_reading(
        self, key: str, table: ModelTables | Truncation, document: Document, length: int
    ) -> list[Figures]:
        if self.tokens + length > self.max_tokens:
            raise BudgetSpentError
        self.tokens += length
        return super()._next_reading(key, table, document, length)
