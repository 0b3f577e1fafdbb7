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
from mrrope.evaluation.sample_text import mathematics_texts
from mrrope.evaluation.truncated import TRUNCATED, TruncatedReader
from mrrope.hf.auto_scale.ladder import scales_up_to
from mrrope.hf.patch import patched
from mrrope.tables import shipped
from mrrope.tables.lookup import ModelTables, load_tables

PLAIN, CALIBRATED = "rope", "calibrated"
PUBLISHED = "yarn"
UNCALIBRATED = "mrrope_uni"
"""For models without calibrated tables."""

PASS_KEY = "71432"
SUBJECT = "pass key to the garden gate"
FACT = f"\n\nThe {SUBJECT} is {PASS_KEY}. Remember it: the {SUBJECT} is {PASS_KEY}.\n\n"
QUESTION = f"\n\nQuestion: What is the {SUBJECT}? Answer: The {SUBJECT} is"
ANSWER_TOKENS = 7

SET_UP_FOR = 4.0
"""A deployment is set up for its longest texts: YaRN's configuration has one scale for all lengths."""


@dataclass(frozen=True)
class Course:
    """Native and total length in tokens, the scales, and the stops at which the question is asked."""

    native: int
    length: int
    wanted_scale: float | None = None
    """The scale that the deployment is set up for; by default 4, or what the total length takes."""

    def __post_init__(self) -> None:
        if self.length <= self.native + self.key_at:
            raise ValueError(
                f"tokens must be above {self.native + self.key_at}, so that the pass key lies further back than the "
                f"model's {self.native} native tokens, got {self.length}"
            )
        if self.wanted_scale is not None and self.wanted_scale < self.covering_scale:
            raise ValueError(
                f"scale must be at least {self.covering_scale:g}, to cover {self.length} tokens, "
                f"got {self.wanted_scale:g}"
            )

    @property
    def key_at(self) -> int:
        """Position of the pass key."""
        return self.native // 8

    @property
    def scored_from(self) -> int:
        """Position of the first loss: logits of what every method reads alike are not computed."""
        return self.native * 3 // 4

    @property
    def set_up_for(self) -> float:
        """The scale of a method with one scale for all lengths."""
        return self.wanted_scale or max(SET_UP_FOR, self.covering_scale)

    @property
    def covering_scale(self) -> float:
        """The power of two that covers the total length: the one that ``scale="auto"`` takes."""
        return 2.0 ** math.ceil(math.log2(self.length / self.native))

    @property
    def stops(self) -> list[int]:
        """Positions of the question: 2, 4, ... times the native length, and the end."""
        return [*(int(self.native * scale) for scale in scales_up_to(self.covering_scale)[:-1]), self.length]

    @property
    def edges(self) -> list[int]:
        """Edges of the perplexity bins: the end of the native length, then from stop to stop.

        With a single stop, the part past the native length is divided into quarters of the native length.
        """
        steps = [self.native * i // 4 for i in (5, 6, 7)] if len(self.stops) == 1 else []
        return [self.scored_from, self.native, *(step for step in steps if step < self.length), *self.stops]

    @property
    def window_shift(self) -> int:
        """By how much the window of truncation moves.

        Every move reads a whole window. A text that ends soon after the native length takes a single one.
        """
        past = self.length - self.native
        return past if past <= self.native * 3 // 8 else self.native // 8


@dataclass
class Reading:
    """Losses and answers of one method."""

    losses: torch.Tensor
    """Loss in nats of the token after each position, from ``Course.scored_from`` on."""
    answers: dict[int, str] = field(default_factory=dict)
    """By position of the question."""


def text_with_key(tokenizer: Any, course: Course) -> list[int]:
    """The sample text with the pass key in it; one token longer than is read, for the last loss."""
    opening, fact = opening_tokens(tokenizer), encode(tokenizer, FACT)
    length = course.length + 1 - len(opening) - len(fact)
    text: list[int] = []
    for part in mathematics_texts():
        text += encode(tokenizer, f"{part}\n\n")
        if len(text) >= length:
            return opening + text[: course.key_at] + fact + text[course.key_at : length]
    raise ValueError(f"tokens must be {course.length + len(text) - length} or less: the sample text is no longer")


def shipped_tables(name: str, scale: float) -> ModelTables | None:
    """The calibrated tables that ship under a name, such as ``smollm2-135m-heads``, for a scale; None without any."""
    return next((table for table in map(load_tables, shipped.ladder(name)) if table.scale == scale), None)


def reading_contexts(
    model: Any, course: Course, calibrated: ModelTables | None = None
) -> dict[str, AbstractContextManager[Any]]:
    """A context manager per method: the stock model, twice, then the model patched with YaRN and with mrrope.

    mrrope has the scale that ``scale="auto"`` takes for the length of the text.
    """
    if calibrated is None:
        ours = {UNCALIBRATED: patched(model, UNCALIBRATED, scale=course.covering_scale)}
    else:
        ours = {CALIBRATED: patched(model, calibrated)}
    stock = {PLAIN: contextlib.nullcontext(), TRUNCATED: contextlib.nullcontext()}
    return {**stock, PUBLISHED: patched(model, PUBLISHED, scale=course.set_up_for), **ours}


def read_all(
    model: Any,
    contexts: dict[str, AbstractContextManager[Any]],
    course: Course,
    tokenizer: Any,
    *,
    chunk: int,
    progress: Progress | None = None,
) -> dict[str, Reading]:
    """Read the sample text with every method, and ask the question at every stop.

    Args:
        model: a causal language model of transformers.
        contexts: of :func:`reading_contexts`, the stock model first.
        course: where to read and to ask.
        tokenizer: of the model.
        chunk: tokens per forward pass.
        progress: called with the number of tokens read; every method counts all of them once.
    """
    tokens = text_with_key(tokenizer, course)
    readings: dict[str, Reading] = {}
    for method, context in contexts.items():
        with context:
            if method == TRUNCATED:
                readings[method] = _read_truncated(
                    model, tokens, course, tokenizer, readings[PLAIN], chunk=chunk, progress=progress
                )
            else:
                reader = Reader(model, chunk=chunk, progress=progress)
                readings[method] = _read(reader, tokens, course, tokenizer, scored_from=course.scored_from)
    return readings


def _read(
    reader: Reader, tokens: Sequence[int], course: Course, tokenizer: Any, *, scored_from: int, start: int = 0
) -> Reading:
    """Read ``tokens``, which are the text from position ``start`` on, and ask the question at every stop."""
    question = encode(tokenizer, QUESTION)
    reading = Reading(torch.empty(0))
    for stop in course.stops:
        skip = max(scored_from - start - reader.position, 0)
        reading.losses = torch.cat([reading.losses, *next_token_losses(reader, tokens[: stop - start + 1], skip=skip)])
        asked = reader if stop == course.length else reader.fork()
        asked.progress = None
        answer = asked.answer(question, ANSWER_TOKENS, end_token=tokenizer.eos_token_id)
        reading.answers[stop] = tokenizer.decode(answer)
    return reading


def _read_truncated(
    model: Any,
    tokens: Sequence[int],
    course: Course,
    tokenizer: Any,
    stock: Reading,
    *,
    chunk: int,
    progress: Progress | None,
) -> Reading:
    """Read with the stock model over a sliding window.

    Up to the native length, losses are the stock model's. The first window ends ``window_shift`` tokens past it, less
    the room for the question: a text with a single window takes no other one for the answer.
    """
    opening = opening_tokens(tokenizer)
    start = course.window_shift + len(encode(tokenizer, QUESTION))
    if progress:
        progress(start)
    reader = TruncatedReader(model, native_length=course.native, opening=len(opening), chunk=chunk, progress=progress)
    reader.shift = course.window_shift
    text = opening + list(tokens[start + len(opening) :])
    reading = _read(reader, text, course, tokenizer, scored_from=course.native, start=start)
    known = stock.losses[: course.native - course.scored_from]
    return Reading(torch.cat([known, reading.losses]), reading.answers)
