"""Pass keys hidden in a document with questions for them later on: one forward pass gives both loss and recall."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrrope.evaluation.documents import Document, encode, opening_tokens
from mrrope.evaluation.retrieval_tasks import COLOURS, THINGS, even_depths, five_digits

KEYS_A_LENGTH = 6
NAMED_KEYS = (
    "pass key",
    "access code",
    "secret number",
    "door code",
    "magic number",
    "serial number",
    "ticket number",
    "room number",
    "phone extension",
    "combination of the safe",
    "account number",
    "lottery number",
)
"""Keys that occur once in a text. The others belong to one of many owners, and are told apart by them."""
NAMED_A_LENGTH = 2
LARGEST_SHARE = 1 / 16
"""Largest share of a text that keys and questions may take."""


@dataclass(frozen=True)
class KeyedDocument(Document):
    """A document with pass keys in it."""

    answers: tuple[int, ...]
    """Positions of the answer tokens, which are predictable only from a key."""


@dataclass(frozen=True)
class Inset:
    """Tokens to insert at a position of the resulting text, or at the next free one."""

    place: int
    tokens: list[int]
    answer: range = range(0)
    """Which of the tokens are the answer to a question."""


def with_keys(
    document: Document, tokenizer: Any, lengths: Sequence[int], rng: random.Random | None = None
) -> KeyedDocument:
    """Hide keys in the text before each length and query them at its end, as many as there is room for.

    Args:
        document: the text.
        tokenizer: the model's.
        lengths: in tokens.
        rng: for keys, their names and random depths; by default the depths are even, and the rest follows the name.
    """
    are_depths_random = rng is not None
    rng = rng or random.Random(document.name)
    named = rng.sample(NAMED_KEYS, len(NAMED_KEYS))
    owned = rng.sample([f"number of the {colour} {thing}" for colour in COLOURS for thing in THINGS], k=100)
    insets: list[Inset] = []
    for length in sorted(lengths):
        hidden: list[Inset] = []
        questions: list[tuple[list[int], range]] = []
        taken = 0
        depths = even_depths(KEYS_A_LENGTH)
        if are_depths_random:
            # The last share may be taken by the questions.
            depths = [rng.uniform(0, 1 - LARGEST_SHARE) for _ in depths]
        # Named keys are queried first: a question right after others of its kind is easier.
        names = [named.pop() for _ in range(min(NAMED_A_LENGTH, len(named)))]
        names += [owned.pop() for _ in range(min(KEYS_A_LENGTH - len(names), len(owned)))]
        for depth, name in zip(depths, names, strict=False):
            key = five_digits(rng)
            sentence = encode(tokenizer, f"\nThe {name} is {key}. Remember it.\n")
            question = encode(tokenizer, f"\nWhat is the {name}? The {name} is")
            answer = encode(tokenizer, f" {key}")
            taken += len(sentence) + len(question) + len(answer)
            if taken > LARGEST_SHARE * length:
                break
            hidden.append(Inset(round(depth * length), sentence))
            questions.append((question + answer, range(len(question), len(question) + len(answer))))
        room = sum(len(question) for question, _ in questions)
        insets += [*hidden, *(Inset(length - room, *question) for question in questions)]
    return insert(document, insets, len(opening_tokens(tokenizer)))


def insert(document: Document, insets: Sequence[Inset], opening: int) -> KeyedDocument:
    """The document with the insets, cut to its original length."""
    text, answers = iter(document.tokens), []
    tokens = [next(text) for _ in range(opening)]
    for inset in sorted(insets, key=lambda inset: inset.place):
        while len(tokens) < inset.place:
            tokens.append(next(text))
        answers += [len(tokens) + place for place in inset.answer]
        tokens += inset.tokens
    tokens += text
    whole = len(document.tokens)
    asked = tuple(place for place in answers if place < whole)
    return KeyedDocument(document.name, tokens[:whole], asked, kind=document.kind)
