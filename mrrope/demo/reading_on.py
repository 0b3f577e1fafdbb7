"""A text that goes on past a model's native length, read by several methods, with a pass key to remember.

Up to the native length all methods read alike, as the model was trained; so that part is read once. Past it each reads
on from a copy of the cache, whose keys are turned to the method's table: what ``scale="auto"`` does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from mrrope.demo.library_text import library_texts
from mrrope.evaluation.perplexity import losses_ahead
from mrrope.evaluation.reading import Progress, Reader
from mrrope.evaluation.texts import encode, opening_tokens
from mrrope.hf.auto_scale.ladder import scales_up_to
from mrrope.hf.patch import patched
from mrrope.tables import FrequencyTable

PLAIN, CALIBRATED = "rope", "calibrated"
METHODS = ("yarn", "mrrope_pro")

PASS_KEY = "71432"
SUBJECT = "pass key to the garden gate"
FACT = f"\n\nThe {SUBJECT} is {PASS_KEY}. Remember it: the {SUBJECT} is {PASS_KEY}.\n\n"
QUESTION = f"\n\nQuestion: What is the {SUBJECT}? Answer: The {SUBJECT} is"
ANSWER_TOKENS = 7


@dataclass(frozen=True)
class Course:
    """How far to read, in tokens, and where to stop and ask."""

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
        """Where the pass key is given away: early on."""
        return self.native // 8

    @property
    def max_scale(self) -> float:
        """The power of two that reaches to the end."""
        return 2.0 ** math.ceil(math.log2(self.length / self.native))

    @property
    def stops(self) -> list[int]:
        """Where to ask: at twice the native length, twice that, and so on, and at the end."""
        return [*(int(self.native * scale) for scale in scales_up_to(self.max_scale)[:-1]), self.length]

    @property
    def edges(self) -> list[int]:
        """Between which perplexity is told: the second half of the native length, then from stop to stop; quarters
        where there is but one.
        """
        steps = [self.native * i // 4 for i in (5, 6, 7)] if len(self.stops) == 1 else []
        return [self.native // 2, self.native, *(step for step in steps if step < self.length), *self.stops]


@dataclass
class Reading:
    """What a method made of the text."""

    losses: torch.Tensor
    """In nats, of what comes after each position."""
    answers: dict[int, str] = field(default_factory=dict)
    """By the place where the pass key was asked for."""


def text_with_key(tokenizer: Any, course: Course) -> list[int]:
    """The library's text, one token longer than is read, with the pass key in it."""
    opening, fact = opening_tokens(tokenizer), encode(tokenizer, FACT)
    length = course.length + 1 - len(opening) - len(fact)
    text: list[int] = []
    for part in library_texts():
        text += encode(tokenizer, f"{part}\n\n")
        if len(text) >= length:
            return opening + text[: course.key_at] + fact + text[course.key_at : length]
    raise ValueError(f"tokens must be {course.length + len(text) - length} or less: Python's library is no longer")


def calibrated_tables(name: str, max_scale: float) -> list[FrequencyTable]:
    """The tables found for a model that come with the package, as far as there are any, for scales 2, 4 and so on."""
    tables = []
    for scale in scales_up_to(max_scale):
        with contextlib.suppress(OSError):
            tables.append(FrequencyTable.load(f"{name}-{scale:g}x"))
    return tables


Ways = dict[str, AbstractContextManager[Any]]


def ways_to_read(model: Any, max_scale: float, calibrated: Sequence[FrequencyTable] = ()) -> Ways:
    """By name, what to read within: the model as it is, then patched with each method."""
    ways: Ways = {PLAIN: contextlib.nullcontext()}
    ways |= {method: patched(model, method, scale="auto", max_scale=max_scale) for method in METHODS}
    if calibrated:
        ways[CALIBRATED] = patched(model, list(calibrated), scale="auto")
    return ways


def read_native(model: Any, tokens: Sequence[int], native: int, chunk: int, progress: Progress) -> tuple[Reader, Any]:
    """A reader that has come as far as the native length, and the losses until there."""
    reader = Reader(model, chunk=chunk, progress=progress)
    return reader, torch.cat(list(losses_ahead(reader, tokens[: native + 1])))


def read_on(reader: Reader, losses: torch.Tensor, tokens: Sequence[int], course: Course, tokenizer: Any) -> Reading:
    """From the native length to the end, with the question at every stop."""
    reader = reader.fork()
    question = encode(tokenizer, QUESTION)
    reading = Reading(losses)
    for stop in course.stops:
        reading.losses = torch.cat([reading.losses, *losses_ahead(reader, tokens[: stop + 1])])
        asked = reader.fork()
        asked.progress = None
        answer = asked.answer(question, ANSWER_TOKENS, end_token=tokenizer.eos_token_id)
        reading.answers[stop] = tokenizer.decode(answer)
    return reading
