"""What each step of the gradient search reads: a window of a document with fresh pass keys, and its token weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mrrope.calibration.kinds import by_kind
from mrrope.calibration.pass_keys import KeyedDocument, with_keys
from mrrope.calibration.token_weights import length_weights, reading_lengths, token_weights
from mrrope.evaluation.documents import Document, opening_tokens


@dataclass(frozen=True)
class TrainingText:
    """A text to differentiate the loss of."""

    name: str
    tokens: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)


class TrainingTexts:
    """A function from step and place in the step to a text, so that a resumed run reads what it would have read."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, lengths: Sequence[int], retrieval: float) -> None:
        self.documents = documents
        self._kinds = list(by_kind(documents).values())
        self.tokenizer = tokenizer
        self.lengths = sorted(lengths)
        self.retrieval = retrieval
        self._cycle = reading_lengths(lengths)
        self._weights = length_weights(lengths)
        self._opening = opening_tokens(tokenizer)

    def length(self, step: int) -> int:
        """Tokens of the texts of a step."""
        return self._cycle[step % len(self._cycle)]

    def text(self, step: int, place: int = 0, of: int = 1) -> TrainingText:
        """The text at a place of ``of`` in a step.

        Every kind comes once before any comes again, and so does every document of a kind.
        """
        count, turn = divmod(step * of + place, len(self._kinds))
        # In random order: a fixed one could read a kind at one length only, since lengths come in a cycle, too.
        documents = random.Random(f"kinds {count}").sample(self._kinds, len(self._kinds))[turn]
        epoch, turn = divmod(count, len(documents))
        document = random.Random(f"order {epoch}").sample(documents, len(documents))[turn]
        rng = random.Random(f"text {step} {place}")
        keyed = self._window(document, self.length(step), rng)
        return TrainingText(
            document.name,
            torch.tensor(keyed.tokens),
            token_weights(len(keyed.tokens), self._weights, keyed.answers, self.retrieval),
        )

    def _window(self, document: Document, length: int, rng: random.Random) -> KeyedDocument:
        opening = len(self._opening)
        start = opening + rng.randrange(len(document.tokens) - length + 1)
        window = Document(document.name, self._opening + document.tokens[start : start + length - opening])
        lengths = [one for one in self.lengths if one <= length] if self.retrieval else []
        return with_keys(window, self.tokenizer, lengths, rng)
