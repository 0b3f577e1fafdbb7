"""Search for the lowest point of a function that is dear to evaluate and has cheaper versions of itself.

Knows nothing of models and tables: any objective of this form can be searched, by this or by other means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

Point = tuple[float, ...]
Candidate = TypeVar("Candidate")

Objective = Callable[[Candidate, int], float]
"""The loss of a candidate on a rung. Rungs count from 0; each is dearer and nearer the truth than the one below.
Losses compare only on the same rung."""

WORTHWHILE = 1e-3
"""How much lower a loss must be to count as better on the last rung: 0.1 % of perplexity. Less is not worth following,
and would be learnt by heart sooner than learnt."""


class BudgetSpentError(Exception):
    """An objective raises it instead of going on; the search then ends with the best it has."""


class Space(Protocol):
    """Where to search."""

    @property
    def start(self) -> Point:
        """Where to begin."""

    @property
    def steps(self) -> Point:
        """How far to go at first, in each coordinate."""

    @property
    def halvings(self) -> int:
        """How often the steps are halved before the search ends."""

    def nearest(self, point: Point) -> Point:
        """The point itself, or one nearby that makes sense."""


def climb(candidates: Iterable[Candidate], objective: Objective[Candidate], rungs: range) -> list[Candidate]:
    """Successive halving: on every rung but the last, the better half go on. Those that reach the end, best first."""
    left = list(candidates)
    for rung in rungs:
        left = sorted(left, key=lambda candidate: objective(candidate, rung))
        if rung != rungs[-1]:
            left = left[: math.ceil(len(left) / 2)]
    return left


def descend(
    space: Space, objective: Objective[Point], rungs: int, improved: Callable[[Point, float], object] = lambda *_: None
) -> Point:
    """The lowest point found by sweeps of steps along the coordinates, halved where they lead nowhere.

    Args:
        space: where to search.
        objective: what to make small.
        rungs: how many the objective has. A move counts as better only where it is so on the last of them.
        improved: told every new best point, and its loss on the last rung.
    """
    best = space.nearest(space.start)
    last = rungs - 1
    try:
        improved(best, objective(best, last))
        for halving in range(space.halvings + 1):
            steps = [step / 2**halving for step in space.steps]
            while (moved := sweep(space, best, steps, objective, rungs)) != best:
                before, best = best, moved
                improved(best, objective(best, last))
                # What led down once often leads further down.
                while is_better(further := moved_by(space, best, before), best, objective, rungs):
                    before, best = best, further
                    improved(best, objective(best, last))
    except BudgetSpentError:
        pass
    return best


def moved_by(space: Space, best: Point, before: Point) -> Point:
    """Once more the way that led from ``before`` to ``best``."""
    return space.nearest(tuple(2 * new - old for new, old in zip(best, before, strict=True)))


def is_better(point: Point, than: Point, objective: Objective[Point], rungs: int) -> bool:
    """Whether a point is better on every rung; the dear ones are not asked where a cheap one denies it."""
    gains = (objective(than, rung) - objective(point, rung) for rung in range(rungs))
    return point != than and all(gain > (WORTHWHILE if rung == rungs - 1 else 0) for rung, gain in enumerate(gains))


def sweep(space: Space, best: Point, steps: Sequence[float], objective: Objective[Point], rungs: int) -> Point:
    """Where the best step along a coordinate leads, or all steps that help together; ``best`` if neither is better."""
    moves = neighbours(space, best, steps)
    last = rungs - 1
    screening = range(max(last, 1))
    survivors = climb(moves, objective, screening)
    helping = [point for point in survivors if objective(point, screening[-1]) < objective(best, screening[-1])]
    # Of two steps along the same coordinate the better one counts.
    together = space.nearest(combined(best, {moves[point]: point for point in reversed(helping)}))
    winner = min([*helping[:1], together], key=lambda point: objective(point, last))
    return winner if objective(best, last) - objective(winner, last) > WORTHWHILE else best


def neighbours(space: Space, best: Point, steps: Sequence[float]) -> dict[Point, int]:
    """One step either way along every coordinate: where it leads, and which coordinate it is along."""
    found: dict[Point, int] = {}
    for coordinate, step in enumerate(steps):
        for move in (step, -step):
            point = space.nearest((*best[:coordinate], best[coordinate] + move, *best[coordinate + 1 :]))
            if point != best:
                found.setdefault(point, coordinate)
    return found


def combined(best: Point, moved: dict[int, Point]) -> Point:
    """All these moves at once, each of which is along one coordinate."""
    return tuple(
        moved[coordinate][coordinate] if coordinate in moved else value for coordinate, value in enumerate(best)
    )
