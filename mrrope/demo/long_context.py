"""A text longer than the model's native length, with a hidden pass key, read with several methods."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from mrrope.evaluation.chunked_reader import Progress, Reader
from mrrope.evaluation.documents import encode, opening_tokens
from mrrope.evaluation.perplexity import next_token_losses
from mrrope.evaluation.sample_text import library_texts
from mrrope.hf.auto_scale.ladder import scales_up_to
from mrrope.hf.patch import patched
from mrrope.tables import shipped
from mrrope.tables.lookup import ModelTables, load_tables

PLAIN, CALIBRATED = "rope", "calibrated"
PUBLISHED = "yarn"
UNCALIBRATED = "mrrope_pro"
"""For models without calibrated tables."""

PASS_KEY = "71432"
SUBJECT = "pass key to the garden gate"
FACT = f"\n\nThe {SUBJECT} is {PASS_KEY}. Remember it: the {SUBJECT} is {PASS_KEY}.\n\n"
QUESTION = f"\n\nQuestion: What is the {SUBJECT}? Answer: The {SUBJECT} is"
ANSWER_TOKENS = 7


@dataclass(frozen=True)
class Course:
    """Native and total length in tokens, and the stops at which the question is asked."""

    native: int
    length: int

    def __post_init__(self) -> None:
        if self.length <= self.native + self.key_at:
            raise ValueError(
                f"tokens must be above {self.native + self.key_at}, so that the pass key lies further back than the "
                f"model's {self.native} native tokens, got {self.length}"
            )

    @property
    def key_at(self) -> int:
        """Position of the pass key."""
        return self.native // 8

    @property
    def max_scale(self) -> float:
        """The power of two that covers the total length."""
        return 2.0 ** math.ceil(math.log2(self.length / self.native))

    @property
    def stops(self) -> list[int]:
        """Positions of the question: 2, 4, ... times the native length, and the end."""
        return [*(int(self.native * scale) for scale in scales_up_to(self.max_scale)[:-1]), self.length]

    @property
    def edges(self) -> list[int]:
        """Edges of the perplexity bins: the second half of the native length, then from stop to stop.

        With a single stop, the part past the native length is divided into quarters.
        """
        steps = [self.native * i // 4 for i in (5, 6, 7)] if len(self.stops) == 1 else []
        return [self.native // 2, self.native, *(step for step in steps if step < self.length), *self.stops]


@dataclass
class Reading:
    """Losses and answers of one method."""

    losses: torch.Tensor
    """Loss in nats of the token after each position."""
    answers: dict[int, str] = field(default_factory=dict)
    """By position of the question."""


def text_with_key(tokenizer: Any, course: Course) -> list[int]:
    """The sample text with the pass key in it; one token longer than is read, for the last loss."""
    opening, fact = opening_tokens(tokenizer), encode(tokenizer, FACT)
    length = course.length + 1 - len(opening) - len(fact)
    text: list[int] = []
    for part in library_texts():
        text += encode(tokenizer, f"{part}\n\n")
        if len(text) >= length:
            return opening + text[: course.key_at] + fact + text[course.key_at : length]
    raise ValueError(f"tokens must be {course.length + len(text) - length} or less: Python's library is no longer")


def shipped_tables(name: str, scale: float) -> ModelTables | None:
    """The calibrated tables that ship under a name, such as ``smollm2-135m-heads``, for a scale; None without any."""
    return next((table for table in map(load_tables, shipped.ladder(name)) if table.scale == scale), None)


def reading_contexts(
    model: Any, scale: float, calibrated: ModelTables | None = None
) -> dict[str, AbstractContextManager[Any]]:
    """A context manager per method: the unpatched model, then the model patched with YaRN and with mrrope."""
    if calibrated is None:
        ours = {UNCALIBRATED: patched(model, UNCALIBRATED, scale=scale)}
    else:
        ours = {CALIBRATED: patched(model, calibrated)}
    return {PLAIN: contextlib.nullcontext(), PUBLISHED: patched(model, PUBLISHED, scale=scale), **ours}


def read(model: Any, tokens: Sequence[int], course: Course, tokenizer: Any, chunk: int, progress: Progress) -> Reading:
    """Read the text, and ask the question at every stop."""
    reader = Reader(model, chunk=chunk, progress=progress)
    question = encode(tokenizer, QUESTION)
    reading = Reading(torch.empty(0))
    for stop in course.stops:
        reading.losses = torch.cat([reading.losses, *next_token_losses(reader, tokens[: stop + 1])])
        fork = reader.fork()
        fork.progress = None
        answer = fork.answer(question, ANSWER_TOKENS, end_token=tokenizer.eos_token_id)
        reading.answers[stop] = tokenizer.decode(answer)
    return reading
