"""Retrieval prompts of an exact length: real text with hidden sentences, then a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrrope.evaluation.documents import Document, encode, opening_tokens


class Haystack:
    """Documents to hide sentences in."""

    def __init__(self, tokenizer: Any, documents: Sequence[Document]) -> None:
        self.tokenizer = tokenizer
        self.opening = opening_tokens(tokenizer)
        self._documents = [document.tokens[len(self.opening) :] for document in documents]

    def text(self, trial: int, length: int, depth: float = 0.0) -> list[int]:
        """``length`` tokens of the trial's document, from its beginning (depth 0) to its end (depth 1)."""
        document = self._documents[trial % len(self._documents)]
        if len(document) < length:
            raise ValueError(f"documents must have {length} tokens for this prompt, got one of {len(document)}")
        start = round(depth * (len(document) - length))
        return document[start : start + length]

    def prompt(self, trial: int, length: int, hidden: Sequence[tuple[float, str]], question: str) -> list[int]:
        """A prompt of ``length`` tokens.

        Args:
            trial: selects the document.
            length: of the whole prompt, in tokens.
            hidden: the sentences to hide, each with its depth: the share of the text that comes before it.
            question: the end of the prompt.
        """
        needles = [(depth, encode(self.tokenizer, f"\n{sentence}\n")) for depth, sentence in sorted(hidden)]
        end = encode(self.tokenizer, f"\n{question}")
        room = length - len(self.opening) - sum(len(needle) for _, needle in needles) - len(end)
        if room < 0:
            raise ValueError(f"lengths must be {length - room} tokens or more for this task's prompts, got {length}")
        text = self.text(trial, room)
        prompt, start = list(self.opening), 0
        for depth, needle in needles:
            place = round(depth * room)
            prompt += text[start:place] + needle
            start = place
        return prompt + text[start:] + end
