"""What a model makes of a document under a table; each is read once, and never again."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import nn

from mrrope.calibration.journal import Journal
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation.perplexity import DocumentLoss, document_losses
from mrrope.evaluation.texts import Document
from mrrope.patching import patched
from mrrope.tables import FrequencyTable


@dataclass(frozen=True)
class Rung:
    """What to compare tables on: the beginnings of some documents."""

    documents: Sequence[Document]
    length: int


class Readings:
    """Readings of documents, from the journal where they are in it.

    A run that goes on after a kill asks for the same readings in the same order, and gets the same answers; the time
    they took counts as if they had been made now, so that it also comes to the same decisions.
    """

    def __init__(
        self,
        model: nn.Module,
        lengths: Sequence[int],
        journal: Journal,
        *,
        chunk: int,
        progress: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.model = model
        self.lengths = sorted(lengths)
        self.journal = journal
        self.chunk = chunk
        self.progress = progress
        self.limit = math.inf
        """How many seconds may be spent; readings asked for after that raise :class:`BudgetSpentError`."""
        self.spent = 0.0
        """Seconds, over all readings so far, with what was done between them."""
        self.count = 0
        """How many readings so far."""
        self.longest_took = 0.0
        """Seconds for a reading of the longest length, at most."""
        self._known: dict[tuple[str, str], list[DocumentLoss]] = {}
        self._since = time.monotonic()

    def loss(self, table: FrequencyTable, rung: Rung) -> float:
        """The mean, over documents and lengths alike, of the second half's loss: the logarithm of the geometric mean
        of the perplexities."""
        losses = [loss.second_half for document in rung.documents for loss in self.read(table, document, rung.length)]
        mean = fmean(losses)
        return mean if math.isfinite(mean) else math.inf

    def read(self, table: FrequencyTable, document: Document, length: int) -> list[DocumentLoss]:
        """A document's figures at every length up to this one."""
        who = fingerprint(table.to_dict()), fingerprint(document.tokens)
        known = self._known.get(who, [])
        if not known or known[-1].length < length:
            known = self._known[who] = self._next_reading(" ".join((*who, str(length))), table, document, length)
        return [loss for loss in known if loss.length <= length]

    def _next_reading(self, key: str, table: FrequencyTable, document: Document, length: int) -> list[DocumentLoss]:
        if self.spent >= self.limit:
            raise BudgetSpentError
        reading = self.journal.get(key)
        if reading is None:
            lengths = [one for one in self.lengths if one <= length]
            with patched(self.model, table):
                found = document_losses(
                    self.model, document.tokens[:length], lengths, chunk=self.chunk, progress=self._tell_progress
                )
                losses = [asdict(loss) for loss in found]
            now = time.monotonic()
            reading = {"document": document.name, "seconds": now - self._since, "losses": losses}
            self.journal.put(key, reading)
        self._since = time.monotonic()
        self.spent += reading["seconds"]
        self.count += 1
        if length == self.lengths[-1]:
            self.longest_took = max(self.longest_took, reading["seconds"])
        self.progress(self.spent)
        return [DocumentLoss(**loss) for loss in reading["losses"]]

    def _tell_progress(self, _: int) -> None:
        self.progress(self.spent + time.monotonic() - self._since)


def fingerprint(data: Any) -> str:
    """Short, and different for what is different."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]
