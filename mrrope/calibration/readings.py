"""What a model makes of a document under a table; each is read once, and never again."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from mrrope.calibration.journal import Journal
from mrrope.calibration.keys import KeyedDocument
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation.perplexity import DocumentLoss, loss_at, token_losses
from mrrope.evaluation.texts import Document
from mrrope.hf.patch import patched
from mrrope.tables import FrequencyTable


@dataclass(frozen=True)
class Figures(DocumentLoss):
    """What a document's first ``length`` tokens came to."""

    forgotten: float
    """Of the keys asked for in them, the share that was not foretold; 0 where none was asked for."""


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
        retrieval: float = 0.0,
        progress: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.model = model
        self.lengths = sorted(lengths)
        self.journal = journal
        self.chunk = chunk
        self.retrieval = retrieval
        """How much of the loss, in nats, forgetting all keys comes to."""
        self.progress = progress
        self.limit = math.inf
        """How many seconds may be spent; readings asked for after that raise :class:`BudgetSpentError`."""
        self.spent = 0.0
        """Seconds, over all readings so far, with what was done between them."""
        self.count = 0
        """How many readings so far."""
        self.longest_took = 0.0
        """Seconds for a reading of the longest length, at most."""
        self._known: dict[tuple[str, str], list[Figures]] = {}
        self._fingerprints: dict[int, str] = {}
        self._since = time.monotonic()

    def loss(self, table: FrequencyTable, rung: Rung) -> float:
        """What a search makes small: the loss of the text, and what is added for keys that were forgotten."""
        text, forgotten = self.parts(table, rung)
        loss = text + self.retrieval * forgotten
        return loss if math.isfinite(loss) else math.inf

    def parts(self, table: FrequencyTable, rung: Rung) -> tuple[float, float]:
        """The mean, over documents and lengths alike, of the second half's loss, which is the logarithm of the
        geometric mean of the perplexities; and the share of keys that were forgotten."""
        found = [self.read(table, document, rung.length) for document in rung.documents]
        text = fmean(figures.second_half for one in found for figures in one)
        return text, fmean(one[-1].forgotten for one in found)

    def read(self, table: FrequencyTable, document: Document, length: int) -> list[Figures]:
        """A document's figures at every length up to this one."""
        # Documents stay as long as the run does, and are long.
        if id(document) not in self._fingerprints:
            self._fingerprints[id(document)] = fingerprint(document.tokens)
        who = fingerprint(what_counts(table)), self._fingerprints[id(document)]
        known = self._known.get(who, [])
        if not known or known[-1].length < length:
            known = self._known[who] = self._next_reading(" ".join((*who, str(length))), table, document, length)
        return [loss for loss in known if loss.length <= length]

    def _next_reading(self, key: str, table: FrequencyTable, document: Document, length: int) -> list[Figures]:
        if self.spent >= self.limit:
            raise BudgetSpentError
        reading = self.journal.get(key)
        if reading is None:
            with patched(self.model, table, base=table.base, original_max_position=table.original_max_position):
                read = token_losses(
                    self.model, document.tokens[:length], chunk=self.chunk, progress=self._tell_progress
                )
                losses = torch.cat(list(read))
            figures = [figures_at(one, losses, document) for one in self.lengths if one <= length]
            now = time.monotonic()
            reading = {
                "document": document.name,
                "seconds": now - self._since,
                "figures": [asdict(one) for one in figures],
            }
            self.journal.put(key, reading)
        self._since = time.monotonic()
        self.spent += reading["seconds"]
        self.count += 1
        if length == self.lengths[-1]:
            self.longest_took = max(self.longest_took, reading["seconds"])
        self.progress(self.spent)
        return [Figures(**figures) for figures in reading["figures"]]

    def _tell_progress(self, _: int) -> None:
        self.progress(self.spent + time.monotonic() - self._since)


def figures_at(length: int, losses: torch.Tensor, document: Document) -> Figures:
    """From the losses of all tokens but the first."""
    answers = document.answers if isinstance(document, KeyedDocument) else ()
    asked = losses[[place - 1 for place in answers if place < length]]
    forgotten = 1 - asked.neg().exp().mean().item() if len(asked) else 0.0
    return Figures(**asdict(loss_at(length, losses)), forgotten=forgotten)


def what_counts(table: FrequencyTable) -> list[float]:
    """Numbers that are the same for tables a model could not tell apart, by whatever formula they were made."""
    return [round(number, 9) for number in (*table.inv_freq.log().tolist(), table.attention_factor)]


def weights_fingerprint(model: nn.Module) -> str:
    """From a few elements of every tensor: another model, or the same one trained on, has others."""
    return fingerprint(
        [
            (name, tuple(weights.shape), weights.detach().reshape(-1)[:: weights.numel() // 8 or 1].tolist())
            for name, weights in model.named_parameters()
        ]
    )


def fingerprint(data: Any) -> str:
    """Short, and different for what is different."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]
