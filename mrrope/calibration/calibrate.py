"""From the published tables to one that suits the model: first its few numbers, then its radix factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mrrope.calibration.documents import DocumentSets
from mrrope.calibration.readings import Readings, Rung
from mrrope.calibration.search import Point, climb, descend
from mrrope.calibration.spaces import KnotSpace, PowerSpace
from mrrope.evaluation.perplexity import perplexity
from mrrope.evaluation.results import EvaluationStoppedError
from mrrope.table_lookup import NativeRope, resolve_table
from mrrope.tables import METHOD_TRAITS, SCALE_ONLY_METHODS, FrequencyTable

FIXED_METHODS = SCALE_ONLY_METHODS
POWER_OF = {name: method.power for name, method in METHOD_TRAITS.items() if method.power is not None}
KNOTS = (4, 8)
POWER_SHARE = 0.4
"""Of the time, for power, bounds and temperature at most; the radix factors have the rest."""


class CalibrationStoppedError(EvaluationStoppedError):
    """Why a calibration could not go on; what it had read by then is kept."""


@dataclass
class Finalist:
    """The best table of one part of the search."""

    table: FrequencyTable
    search_loss: float
    decide_loss: float = math.nan
    """Of the documents that decide."""
    perplexity: float = math.nan
    """Of those documents, too: the geometric mean over lengths."""
    forgotten: float = math.nan
    """Of the keys in those documents."""


@dataclass
class Calibration:
    """A search for the table that reads the documents best."""

    readings: Readings
    trained: NativeRope
    scale: float
    documents: DocumentSets
    seconds: float
    """What may be spent, but for the reading of held-out documents."""
    improved: Callable[[str, FrequencyTable, float], object] = lambda *_: None
    """Told every new best table, the part of the search that found it, and its loss."""
    finalists: dict[str, Finalist] = field(default_factory=dict)
    """By the part of the search that found them."""

    def __post_init__(self) -> None:
        self.fixed = {method: resolve_table(self.trained, method, self.scale, {}) for method in FIXED_METHODS}
        lengths, search = self.readings.lengths, self.documents.search
        # Half the length is about a quarter of the work.
        rungs = [Rung(search[:1], lengths[-2:][0]), Rung(search[:1], lengths[-1]), Rung(search, lengths[-1])]
        self.rungs = [rung for i, rung in enumerate(rungs) if rung not in rungs[:i]]

    def loss(self, table: FrequencyTable, rung: int) -> float:
        """What the search makes small."""
        return self.readings.loss(table, self.rungs[rung])

    def run(self) -> str:
        """Searches, then decides; the name of the finalist that won."""
        self.search()
        return self.decide()

    def search(self) -> None:
        """Fills the finalists, from the plainest to the most intricate; the last ones may fall to the budget."""
        self.readings.limit = self.seconds
        ranked = climb(self.fixed, lambda method, rung: self.loss(self.fixed[method], rung), range(len(self.rungs)))
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
        """One part of the search."""

        def objective(point: Point, rung: int) -> float:
            return self.loss(space.table(point), rung)

        return descend(space, objective, len(self.rungs), lambda point, _: self.enter(part, space.table(point)))

    def enter(self, part: str, table: FrequencyTable) -> None:
        """Makes a table the finalist of a part of the search."""
        loss = self.loss(table, len(self.rungs) - 1)
        is_best = all(loss < finalist.search_loss for finalist in self.finalists.values())
        self.finalists[part] = Finalist(table, loss)
        if is_best:
            self.improved(part, table, loss)

    def decide(self) -> str:
        """The finalist that reads the documents best that no part of the search has seen."""
        self.readings.limit = math.inf
        rung = Rung(self.documents.decide, self.readings.lengths[-1])
        for finalist in self.finalists.values():
            finalist.decide_loss = self.readings.loss(finalist.table, rung)
            text, finalist.forgotten = self.readings.parts(finalist.table, rung)
            finalist.perplexity = perplexity([text])
        return min(self.finalists, key=lambda part: self.finalists[part].decide_loss)
