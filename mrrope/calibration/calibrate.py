"""The calibration: compare the published tables, search power, bounds and temperature, then the radix factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mrrope.calibration.document_sets import DocumentSets
from mrrope.calibration.kinds import first_of_each_kind
from mrrope.calibration.objective import Readings, Rung
from mrrope.calibration.search import Point, descend, successive_halving
from mrrope.calibration.spaces import KnotSpace, PowerSpace
from mrrope.evaluation.perplexity import perplexity
from mrrope.evaluation.results import EvaluationStoppedError
from mrrope.tables.frequency_table import METHOD_TRAITS, SCALE_ONLY_METHODS, FrequencyTable
from mrrope.tables.lookup import NativeRope, resolve_table

FIXED_METHODS = SCALE_ONLY_METHODS
POWER_OF = {name: method.power for name, method in METHOD_TRAITS.items() if method.power is not None}
KNOTS = (4, 8)
POWER_SHARE = 0.4
"""Largest share of the search time for power, bounds and temperature; the radix factors get the rest."""


class CalibrationStoppedError(EvaluationStoppedError):
    """A calibration stopped early; its readings so far are in the journal."""


@dataclass
class Finalist:
    """The best table of one part of the search, with its losses."""

    table: FrequencyTable
    search_loss: float
    decide_loss: float = math.nan
    """On the validation documents."""
    perplexity: float = math.nan
    """On the validation documents: the geometric mean over lengths."""
    forgotten: float = math.nan
    """On the validation documents: the share of pass keys that was not predicted."""


@dataclass
class Calibration:
    """A search for the table with the lowest loss on the documents."""

    readings: Readings
    trained: NativeRope
    scale: float
    documents: DocumentSets
    seconds: float
    """Time budget, excluding the held-out documents."""
    improved: Callable[[str, FrequencyTable, float], object] = lambda *_: None
    """Called with the part of the search, the table and its loss, for every new best table."""
    finalists: dict[str, Finalist] = field(default_factory=dict)
    """By part of the search."""

    def __post_init__(self) -> None:
        self.fixed = {method: resolve_table(self.trained, method, self.scale, {}) for method in FIXED_METHODS}
        lengths, search = self.readings.lengths, list(self.documents.search)
        some = first_of_each_kind(search)
        # The first rung has half the length, which is about a quarter of the work.
        rungs = [Rung(some, lengths[-2:][0]), Rung(some, lengths[-1]), Rung(search, lengths[-1])]
        self.rungs = [rung for i, rung in enumerate(rungs) if rung not in rungs[:i]]

    def loss(self, table: FrequencyTable, rung: int) -> float:
        """The objective of the search on a rung."""
        return self.readings.loss(table, self.rungs[rung])

    def run(self) -> str:
        """Search, then select on the validation documents; return the name of the winning finalist."""
        self.search()
        return self.decide()

    def search(self) -> None:
        """Fill the finalists, from the simplest search space to the largest; the budget may cut the last ones."""
        self.readings.limit = self.seconds
        ranked = successive_halving(
            self.fixed, lambda method, rung: self.loss(self.fixed[method], rung), range(len(self.rungs))
        )
        self.enter(ranked[0], self.fixed[ranked[0]])
        for_search = self.seconds - (2 + len(KNOTS)) * len(self.documents.decide) * self.readings.longest_took
        self.readings.limit = POWER_SHARE * for_search
        family = min(POWER_OF, key=lambda method: self.loss(self.fixed[method], 0))
        space = PowerSpace(self.fixed[family], POWER_OF[family], self.trained.native)
        found = self.descend("power, bounds, temperature", space)
        self.power_space = PowerSpace(space.table(found), found[0], self.trained.native)
        self.readings.limit = for_search
        for knots in KNOTS:
            best = min(self.finalists.values(), key=lambda finalist: finalist.search_loss)
            self.descend(f"{knots} knots", KnotSpace(best.table, knots, self.trained.native))

    def descend(self, part: str, space: PowerSpace | KnotSpace) -> Point:
        """Run one part of the search."""

        def objective(point: Point, rung: int) -> float:
            return self.loss(space.table(point), rung)

        return descend(space, objective, len(self.rungs), lambda point, _: self.enter(part, space.table(point)))

    def enter(self, part: str, table: FrequencyTable) -> None:
        """Make a table the finalist of a part of the search."""
        loss = self.loss(table, len(self.rungs) - 1)
        is_best = all(loss < finalist.search_loss for finalist in self.finalists.values())
        self.finalists[part] = Finalist(table, loss)
        if is_best:
            self.improved(part, table, loss)

    def decide(self) -> str:
        """The finalist with the lowest loss on the validation documents, which the search has not seen."""
        self.readings.limit = math.inf
        rung = Rung(self.documents.decide, self.readings.lengths[-1])
        for finalist in self.finalists.values():
            finalist.decide_loss = self.readings.loss(finalist.table, rung)
            text, finalist.forgotten = self.readings.parts(finalist.table, rung)
            finalist.perplexity = perplexity([text])
        return min(self.finalists, key=lambda part: self.finalists[part].decide_loss)
