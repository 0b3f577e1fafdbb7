"""Calibration's search: on functions with a known minimum, on spaces of tables, and the decision at its end."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from planted_tables import SMOLLM2, distance, sigmoid_table

import mrrope
from mrrope.calibration import document_sets, spaces
from mrrope.calibration.calibrate import FIXED_METHODS, Calibration
from mrrope.calibration.search import MIN_IMPROVEMENT, BudgetSpentError, descend, successive_halving
from mrrope.evaluation.documents import Document
from mrrope.tables.lookup import NativeRope

# The search, on functions with a known minimum


@dataclass
class Box:
    """A search space: all points of a cube around zero."""

    start: tuple[float, ...]
    steps: tuple[float, ...]
    halvings: int = 4
    size: float = 10.0

    def nearest(self, point):
        return tuple(min(max(value, -self.size), self.size) for value in point)


class Counted:
    """An objective that records its calls."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.asked: list[tuple] = []

    def __call__(self, point, rung):
        self.asked.append((point, rung))
        return self.function(point, rung)


def test_the_better_half_climbs() -> None:
    objective = Counted(lambda candidate, rung: abs(candidate - 3.1) if rung < 2 else candidate)
    assert successive_halving(range(8), objective, range(3)) == [3, 4]
    by_rung = [[candidate for candidate, rung in objective.asked if rung == one] for one in range(3)]
    assert by_rung == [[0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 2, 5], [3, 4]]


def bowl(point, lowest) -> float:
    """Return a quadratic with minimum 0 at ``lowest`` whose neighbouring coordinates are correlated."""
    away = [value - low for value, low in zip(point, lowest, strict=True)]
    leaning = sum(a * b for a, b in pairwise(away))
    return sum(value**2 for value in away) + 0.8 * leaning


@pytest.mark.parametrize("rungs", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_planted_optimum_is_found(rungs: int, seed: int) -> None:
    rng = random.Random(seed)
    lowest = tuple(rng.uniform(-3, 3) for _ in range(4))
    nearby = [tuple(value + rng.uniform(-0.3, 0.3) for value in lowest) for _ in range(rungs - 1)]
    # Cheap rungs have their minima elsewhere.
    found = descend(Box((0.0,) * 4, (1.0,) * 4), lambda point, rung: bowl(point, [*nearby, lowest][rung]), rungs)
    # The last steps are 1/16; without misleading rungs the error is at most a few of them.
    tolerance = 0.1 if rungs == 1 else 0.5
    assert max(abs(value - low) for value, low in zip(found, lowest, strict=True)) < tolerance


def test_the_search_tells_of_every_improvement_and_moves_only_for_what_is_worthwhile() -> None:
    improvements: list[tuple] = []
    found = descend(
        Box((4.0, 0.0), (1.0, 1.0)), lambda point, _: bowl(point, (0, 1)), 2, lambda *one: improvements.append(one)
    )
    losses = [loss for _, loss in improvements]
    assert improvements[0] == ((4.0, 0.0), bowl((4, 0), (0, 1)))
    assert improvements[-1] == (found, bowl(found, (0, 1)))
    assert all(after < before - MIN_IMPROVEMENT for before, after in pairwise(losses))
    flat = descend(Box((0.0,), (1.0,)), lambda point, _: -MIN_IMPROVEMENT / 20 * point[0], 1)
    assert flat == (0.0,)


def test_a_point_that_is_worse_on_the_last_rung_is_not_taken() -> None:
    """The first rung decreases with the point, the last increases."""
    found = descend(Box((0.0,), (1.0,)), lambda point, rung: point[0] if rung else -point[0], 2)
    assert found == (0.0,)


def test_the_best_so_far_is_kept_when_the_budget_is_spent() -> None:
    def limited(point, rung):
        if len(objective.asked) > 30:
            raise BudgetSpentError
        return bowl(point, (3, 3, 3))

    objective = Counted(limited)
    found = descend(Box((0.0,) * 3, (1.0,) * 3), objective, 2)
    assert len(objective.asked) == 31
    assert bowl(found, (3, 3, 3)) < bowl((0, 0, 0), (3, 3, 3))


# Search spaces of tables


@pytest.mark.parametrize(
    ("power", "bounds", "factor"), [(0.0, (6, 20), 1.17), (2.0, (3, 25), 1.4), (-1.0, (12, 17), 1)]
)
def test_a_planted_power_with_its_bounds_and_temperature_is_found(power, bounds, factor) -> None:
    planted = mrrope.frequency_table("mrrope_pow", power=power, bounds=bounds, attention_factor=factor, **SMOLLM2)
    space = spaces.PowerSpace(mrrope.frequency_table("mrrope_uni", **SMOLLM2), 0.0)
    assert distance(space.table(space.start), mrrope.frequency_table("mrrope_uni", **SMOLLM2)) == pytest.approx(0)
    found = space.table(descend(space, lambda point, _: distance(space.table(point), planted), 3))
    assert distance(found, planted) < min(0.02, distance(space.origin, planted) / 10)


def test_planted_radix_factors_are_found() -> None:
    planted = sigmoid_table()
    table = mrrope.frequency_table("mrrope_uni", **SMOLLM2)
    distances = [distance(table, planted)]
    for knots in (4, 8):
        space = spaces.KnotSpace(table, knots)
        point = descend(space, lambda point, _, space=space: distance(space.table(point), planted), 2)
        table = space.table(point)
        distances.append(distance(table, planted))
        assert (table.radix_factors >= 1).all()
    assert distances[2] < distances[1] < distances[0] / 5
    assert distances[2] < 5e-3


@pytest.mark.parametrize("method", FIXED_METHODS)
@pytest.mark.parametrize("knots", [1, 4, 8])
def test_knots_start_from_the_very_table(method: str, knots: int) -> None:
    table = mrrope.frequency_table(method, **SMOLLM2)
    space = spaces.KnotSpace(table, knots)
    start = space.table(space.start)
    torch.testing.assert_close(start.cumulative_scale, table.cumulative_scale, rtol=1e-14, atol=0)
    assert start.attention_factor == pytest.approx(table.attention_factor, rel=1e-8)
    assert (start.scale, start.method) == (16.0, "longrope")


def test_what_a_knot_does() -> None:
    """With bounds 10 and 20 the fixed knot is at 6 2/3 and the last of three at 23 1/3."""
    table = mrrope.frequency_table("mrrope_uni", bounds=(10, 20), **SMOLLM2)
    space = spaces.KnotSpace(table, 3)
    first, step = 10 - 10 / 3, (20 + 10 / 3 - (10 - 10 / 3)) / 3
    for knot in range(3):
        point = [0.0, 0.0, 0.0, 0.06]
        point[knot] = 0.1
        moved = space.table(tuple(point)).cumulative_scale.log() - table.cumulative_scale.log()
        for pair in range(32):
            away = abs((pair - first) / step - (knot + 1))
            beyond = knot == 2 and pair > first + 3 * step
            expected = 0.1 if beyond else 0.1 * max(0.0, 1 - away)
            # A raised knot must not make the scale decrease after it: the scale is raised there, too.
            assert moved[pair].item() == pytest.approx(expected, abs=1e-9) or (knot < 2 and moved[pair] > expected)
    assert space.table((0, 0, 0, 0.06)).attention_factor == pytest.approx(1 + 0.06 * math.log(16))
    steep = space.table((-3.0, 5.0, -9.0, 0.0))
    assert (steep.radix_factors >= 1).all()
    assert steep.cumulative_scale.max() <= 32 * (1 + 1e-12)


# The decision, on losses by a formula


class FormulaReadings:
    """Losses by a formula of table, document and length; a token takes one second."""

    def __init__(self, formula: Callable) -> None:
        self.formula = formula
        self.lengths = [64, 128, 256]
        self.limit = math.inf
        self.spent = 0.0
        self.longest_took = 256.0
        self.known: dict = {}

    def loss(self, table, rung) -> float:
        names = [document.name for document in rung.documents]
        for name in names:
            if self.known.get((table, name), 0) < rung.length:
                if self.spent >= self.limit:
                    raise BudgetSpentError
                self.spent += rung.length
                self.known[table, name] = rung.length
        return sum(self.formula(table, name, rung.length) for name in names) / len(names)

    def parts(self, table, rung) -> tuple[float, float]:
        return self.loss(table, rung), 0.0


SEARCH, DECIDE, HELD_OUT = ([Document(name, []) for name in names.split()] for names in ("s1 s2", "d1 d2", "h1"))
SETS = document_sets.DocumentSets(SEARCH, DECIDE, HELD_OUT)


def calibration_of(formula: Callable, seconds: float = 1e9, **more) -> Calibration:
    return Calibration(FormulaReadings(formula), NativeRope(64, 1e5, 8192), 16.0, SETS, seconds, **more)


def test_a_calibration_finds_what_was_planted() -> None:
    planted = sigmoid_table()
    calibration = calibration_of(lambda table, _, length: distance(table, planted) + length / 1e6)
    chosen = calibration.run()
    assert chosen == "8 knots"
    assert distance(calibration.finalists[chosen].table, planted) < 5e-3
    # Every stage improves on the one before.
    losses = [finalist.search_loss for finalist in calibration.finalists.values()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def test_an_overfitted_table_is_not_chosen() -> None:
    """The search documents prefer their own radix factors, all others a fixed method."""
    overfitted, fixed = sigmoid_table(), mrrope.frequency_table("yarn_ratio", **SMOLLM2)
    calibration = calibration_of(
        lambda table, document, _: distance(table, overfitted if document[0] == "s" else fixed)
    )
    chosen = calibration.run()
    best = min(calibration.finalists, key=lambda part: calibration.finalists[part].search_loss)
    assert best == "8 knots"
    assert chosen == "yarn_ratio"
    assert calibration.finalists[chosen].table == fixed


@pytest.mark.parametrize("minutes", [200, 400, 1000])
def test_the_budget_is_kept_with_the_decision_in_it(minutes: float) -> None:
    improvements = []
    planted = sigmoid_table()
    calibration = calibration_of(
        lambda table, *_: distance(table, planted), 60 * minutes, improved=lambda *one: improvements.append(one)
    )
    chosen = calibration.run()
    # The last reading may end after the budget.
    assert calibration.readings.spent <= 60 * minutes + 256
    assert calibration.finalists[chosen].table == improvements[-1][1]
    assert [loss for *_, loss in improvements] == sorted((loss for *_, loss in improvements), reverse=True)


def test_a_budget_that_is_too_small_for_the_fixed_methods_is_said_to_be() -> None:
    with pytest.raises(BudgetSpentError):
        calibration_of(lambda *_: 1.0, 300).run()


def test_losses_that_are_no_numbers_count_as_the_worst() -> None:
    rope = mrrope.frequency_table("rope", **SMOLLM2)
    planted = mrrope.frequency_table("mrrope_pro", **SMOLLM2)
    calibration = calibration_of(lambda table, *_: math.inf if table == rope else distance(table, planted))
    assert calibration.run() == "mrrope_pro"
