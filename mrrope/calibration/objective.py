"""The objective of the search: the loss of documents under a table.

A reading is one forward pass over one document with one table. It is made once and kept in the journal.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from mrrope.calibration.journal import Journal
from mrrope.calibration.kinds import mean_over_kinds
from mrrope.calibration.pass_keys import KeyedDocument
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation.chunked_reader import Reader, ReaderMaker
from mrrope.evaluation.documents import Document
from mrrope.evaluation.perplexity import DocumentLoss, loss_at, token_losses
from mrrope.evaluation.truncated import TRUNCATED, Truncation
from mrrope.hf.patch import patched
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables


@dataclass(frozen=True)
class Figures(DocumentLoss):
    """Losses and forgotten keys of a document's first ``length`` tokens."""

    forgotten: float
    """1 minus the mean probability of the answer tokens; 0 without questions."""


@dataclass(frozen=True)
class Rung:
    """A fidelity level of the objective: some documents, cut to a length."""

    documents: Sequence[Document]
    length: int


class Readings:
    """Readings of documents, taken from the journal if they are in it.

    A resumed run requests the same readings in the same order and gets the same results. The recorded seconds count
    against its budget, so that it also makes the same decisions.
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
        """Nats that are added to the loss if all keys are forgotten."""
        self.progress = progress
        self.limit = math.inf
        """Budget in seconds; readings beyond it raise :class:`BudgetSpentError`."""
        self.spent = 0.0
        """Seconds of all readings so far, including the time between them."""
        self.count = 0
        """Number of readings so far."""
        self.longest_took = 0.0
        """Seconds of the slowest reading of the longest length."""
        self._known: dict[tuple[str, str], list[Figures]] = {}
        self._fingerprints: dict[int, str] = {}
        self._since = time.monotonic()

    def restart_clock(self) -> None:
        """Leave the time since the last reading out of the next one's."""
        self._since = time.monotonic()

    def loss(self, table: ModelTables, rung: Rung) -> float:
        """The objective: the loss of the text plus the penalty for forgotten keys."""
        text, forgotten = self.parts(table, rung)
        loss = text + self.retrieval * forgotten
        return loss if math.isfinite(loss) else math.inf

    def parts(self, table: ModelTables, rung: Rung) -> tuple[float, float]:
        """The second-half loss, averaged over documents and lengths, and the share of forgotten keys.

        The mean loss is the logarithm of the geometric mean of the perplexities. All kinds of text weigh the same.
        """
        found = [self.read(table, document, rung.length) for document in rung.documents]
        text = mean_over_kinds(rung.documents, [fmean(figures.second_half for figures in one) for one in found])
        return text, mean_over_kinds(rung.documents, [one[-1].forgotten for one in found])

    def read(self, table: ModelTables | Truncation, document: Document, length: int) -> list[Figures]:
        """A document's figures at every length up to ``length``, with tables or of the truncated text."""
        # Cached by id: documents live as long as the run, and hashing long ones takes time.
        if id(document) not in self._fingerprints:
            self._fingerprints[id(document)] = fingerprint(document.tokens)
        if isinstance(table, Truncation):
            row = f"{TRUNCATED}-{table.native_length}"
        else:
            row = fingerprint(table_numbers(table))
        key = row, self._fingerprints[id(document)]
        known = self._known.get(key, [])
        if not known or known[-1].length < length:
            known = self._known[key] = self._next_reading(" ".join((*key, str(length))), table, document, length)
        return [loss for loss in known if loss.length <= length]

    def _next_reading(
        self, key: str, table: ModelTables | Truncation, document: Document, length: int
    ) -> list[Figures]:
        if self.spent >= self.limit:
            raise BudgetSpentError
        reading = self.journal.get(key)
        if reading is None:
            applied: AbstractContextManager[object]
            reader: ReaderMaker = Reader
            if isinstance(table, Truncation):
                applied, reader = table.applied(self.model), table.reader
            else:
                known = {"base": table.base, "original_max_position": table.original_max_position}
                # Norms are fused as in the search by gradient.
                applied = patched(self.model, table, fuse_norms=True, **known)
            with applied:
                read = token_losses(
                    self.model,
                    document.tokens[:length],
                    chunk=self.chunk,
                    progress=self._report_progress,
                    reader=reader,
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

    def _report_progress(self, _: int) -> None:
        self.progress(self.spent + time.monotonic() - self._since)


def figures_at(length: int, losses: torch.Tensor, document: Document) -> Figures:
    """The figures at a length; ``losses`` starts with the second token."""
    answers = document.answers if isinstance(document, KeyedDocument) else ()
    answered = losses[[place - 1 for place in answers if place < length]]
    forgotten = 1 - answered.neg().exp().mean().item() if len(answered) else 0.0
    return Figures(**asdict(loss_at(length, losses)), forgotten=forgotten)


def table_numbers(table: ModelTables) -> list[Any]:
    """The numbers that determine a rotation; equal for equal tables of different methods. Nested for heads, layers."""
    if isinstance(table, FrequencyTable):
        return [round(number, 9) for number in (*table.inv_freq.log().tolist(), table.attention_factor)]
    numbers = [table_numbers(one) for one in table]
    factors = table.query_factors if isinstance(table, HeadTables) else None
    return numbers if factors is None else [*numbers, [round(factor, 9) for factor in factors]]


def weights_fingerprint(model: nn.Module) -> str:
    """A fingerprint of a few elements of every weight, which changes with the model and with training."""
    return fingerprint(
        [
            (name, tuple(weights.shape), weights.detach().reshape(-1)[:: weights.numel() // 8 or 1].tolist())
            for name, weights in model.named_parameters()
        ]
    )


def fingerprint(data: Any) -> str:
    """A short hash of ``repr(data)``."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]
