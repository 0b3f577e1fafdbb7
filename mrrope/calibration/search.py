"""Multi-fidelity search: successive halving and coordinate descent for an objective with cheap and costly rungs.

Independent of models and tables: any objective of this form can be searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

Point = tuple[float, ...]
Candidate = TypeVar("Candidate")

Objective = Callable[[Candidate, int], float]
"""The loss of a candidate on a rung. Rungs count from 0; each is costlier and more accurate than the one below.
Losses compare only within a rung."""

MIN_IMPROVEMENT = 1e-3
"""Smallest decrease of the loss that counts on the last rung: 0.1 % of perplexity. Smaller ones are likely overfit."""


class BudgetSpentError(Exception):
    """Raised by an objective when its budget is spent; the search then returns its best point."""


class Space(Protocol):
    """A search space."""

    @property
    def start(self) -> Point:
        """The starting point."""

    @property
    def steps(self) -> Point:
        """Initial step size of each coordinate."""

    @property
    def halvings(self) -> int:
        """Number of times the steps are halved before the search ends."""

    def nearest(self, point: Point) -> Point:
        """The point projected to the valid ones."""


def successive_halving(
    candidates: Iterable[Candidate], objective: Objective[Candidate], rungs: range
) -> list[Candidate]:
    """Keep the better half on every rung but the last; return the survivors, best first."""
    left = list(candidates)
    for rung in rungs:
        left = sorted(left, key=lambda candidate: objective(candidate, rung))
        if rung != rungs[-1]:
            left = left[: math.ceil(len(left) / 2)]
    return left


def descend(
    space: Space, objective: Objective[Point], rungs: int, improved: Callable[[Point, float], object] = lambda *_: None
) -> Point:
    """Coordinate descent: sweep steps along the coordinates, and halve them when no step helps.

    Args:
        space: the search space.
        objective: the function to minimize.
        rungs: the objective's number of rungs. A move is accepted only if it is better on the last one.
        improved: called with every new best point and its loss on the last rung.

    Returns:
        The best point found, also if the objective's budget is spent.
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
                # Repeat a successful move while it keeps helping.
                while is_better(further := extrapolated(space, best, before), best, objective, rungs):
                    before, best = best, further
                    improved(best, objective(best, last))
    except BudgetSpentError:
        pass
    return best


def extrapolated(space: Space, best: Point, before: Point) -> Point:
    """The move from ``before`` to ``best`` applied once more."""
    return space.nearest(tuple(2 * new - old for new, old in zip(best, before, strict=True)))


def is_better(point: Point, than: Point, objective: Objective[Point], rungs: int) -> bool:
    """Whether a point is better on every rung; costly rungs are evaluated only if the cheap ones agree."""
    gains = (objective(than, rung) - objective(point, rung) for rung in range(rungs))
    return point != than and all(
        gain > (MIN_IMPROVEMENT if rung == rungs - 1 else 0) for rung, gain in enumerate(gains)
    )


def sweep(space: Space, best: Point, steps: Sequence[float], objective: Objective[Point], rungs: int) -> Point:
    """The better of the best single step and all helpful steps combined, or ``best`` if neither helps."""
    moves = neighbours(space, best, steps)
    last = rungs - 1
    screening = range(max(last, 1))
    survivors = successive_halving(moves, objective, screening)
    helping = [point for point in survivors if objective(point, screening[-1]) < objective(best, screening[-1])]
    # Of two helpful steps along one coordinate, the better one is kept.
    together = space.nearest(combined(best, {moves[point]: point for point in reversed(helping)}))
    winner = min([*helping[:1], together], key=lambda point: objective(point, last))
    return winner if objective(best, last) - objective(winner, last) > MIN_IMPROVEMENT else best


def neighbours(space: Space, best: Point, steps: Sequence[float]) -> dict[Point, int]:
    """The points one step away in either direction, with the coordinate of each step."""
    found: dict[Point, int] = {}
    for coordinate, step in enumerate(steps):
        for move in (step, -step):
            point = space.nearest((*best[:coordinate], best[coordinate] + move, *best[coordinate + 1 :]))
            if point != best:
                found.setdefault(point, coordinate)
    return found


def combined(best: Point, moved: dict[int, Point]) -> Point:
    """All moves at once, each along one coordinate."""
    return tuple(
        moved[coordinate][coordinate] if coordinate in moved else value for coordinate, value in enumerate(best)
    )
