"""Keys hidden in a document and asked for later on: the same reading that tells how well a text is foretold tells how
well it is remembered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrrope.evaluation.tasks import COLOURS, THINGS, even_depths, five_digits
from mrrope.evaluation.texts import Document, encode, opening_tokens

KEYS_A_LENGTH = 3
LARGEST_SHARE = 1 / 16
"""Of a text, that keys and questions may take up."""


@dataclass(frozen=True)
class KeyedDocument(Document):
    """A document with keys in it."""

    answers: tuple[int, ...]
    """The places of tokens that only one who remembers a key can foretell."""


@dataclass(frozen=True)
class Inset:
    """Something to put into a text, where its turn comes at a place of the text that results."""

    place: int
    tokens: list[int]
    answer: range = range(0)
    """Which of its tokens are a key that was asked for."""


def with_keys(document: Document, tokenizer: Any, lengths: Sequence[int]) -> KeyedDocument:
    """Hides keys all over the text before each length and asks for them there, as far as there is room."""
    chance = random.Random(document.name)
    owners = iter(chance.sample([f"the {colour} {thing}" for colour in COLOURS for thing in THINGS], k=100))
    insets: list[Inset] = []
    for length in sorted(lengths):
        hidden, asked = [], []
        for depth, owner in zip(even_depths(KEYS_A_LENGTH), owners, strict=False):
            key = five_digits(chance)
            sentence = encode(tokenizer, f"\nThe pass key of {owner} is {key}. Remember it.\n")
            hidden.append(Inset(round(depth * length), sentence))
            question = encode(tokenizer, f"\nWhat is the pass key of {owner}? The pass key of {owner} is")
            answer = encode(tokenizer, f" {key}")
            asked.append((question + answer, range(len(question), len(question) + len(answer))))
        room = sum(len(question) for question, _ in asked)
        if room + sum(len(inset.tokens) for inset in hidden) > LARGEST_SHARE * length:
            continue
        insets += [*hidden, *(Inset(length - room, *question) for question in asked)]
    return put_in(document, insets, len(opening_tokens(tokenizer)))


def put_in(document: Document, insets: Sequence[Inset], opening: int) -> KeyedDocument:
    """The document with all these in it, cut to the length that it had."""
    text, answers = iter(document.tokens), []
    tokens = [next(text) for _ in range(opening)]
    for inset in sorted(insets, key=lambda inset: inset.place):
        while len(tokens) < inset.place:
            tokens.append(next(text))
        answers += [len(tokens) + place for place in inset.answer]
        tokens += inset.tokens
    tokens += text
    whole = len(document.tokens)
    return KeyedDocument(document.name, tokens[:whole], tuple(place for place in answers if place < whole))
