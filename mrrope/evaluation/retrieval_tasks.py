"""Synthetic retrieval tasks; prompts depend on task, length and trial only, so all methods get the same ones."""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrrope.evaluation.documents import encode
from mrrope.evaluation.prompts import Haystack

NAMES = ("Amara", "Boris", "Chiara", "Dmitri", "Elena", "Farid", "Greta", "Hiroshi", "Ingrid", "Jorge", "Katya", "Luca")
COLOURS = ("purple", "orange", "silver", "crimson", "turquoise", "yellow", "ivory", "emerald", "scarlet", "bronze")
THINGS = (
    "lantern",
    "violin",
    "teapot",
    "compass",
    "umbrella",
    "telescope",
    "accordion",
    "suitcase",
    "candle",
    "kettle",
)

KEYS_TOGETHER = 8
CHAIN = 5
TILES = (2, 4, 8)
COPIED_TOKENS = 32

PASSKEY_SENTENCE = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True)
class Trial:
    """A prompt and the score of an answer to it."""

    prompt: list[int]
    expected: str
    depth: float
    """The fraction of the prompt's text before the needle."""
    answer_tokens: int
    """Maximum length of the answer."""
    score: Callable[[list[int]], float]
    """Maps the tokens of an answer to the fraction that is right."""


def contains_score(tokenizer: Any, *wanted: str) -> Callable[[list[int]], float]:
    """Score: the fraction of the wanted strings that occur in the answer."""
    return lambda answer: sum(one in tokenizer.decode(answer) for one in wanted) / len(wanted)


def token_match_score(expected: list[int]) -> Callable[[list[int]], float]:
    """Score: the fraction of positions whose token is the expected one."""
    return lambda answer: sum(map(int.__eq__, answer, expected)) / len(expected)


def retrieval_trial(haystack: Haystack, prompt: list[int], depth: float, *wanted: str) -> Trial:
    """A trial whose answer contains some strings; it may be twice as long plus 4 tokens, for words between them."""
    expected = " ".join(wanted)
    answer_tokens = 2 * len(encode(haystack.tokenizer, f" {expected}")) + 4
    return Trial(prompt, expected, depth, answer_tokens, contains_score(haystack.tokenizer, *wanted))


def five_digits(rng: random.Random) -> str:
    """A random five-digit number."""
    return str(rng.randrange(10_000, 100_000))


def even_depths(count: int) -> list[float]:
    """The midpoints of ``count`` equal parts."""
    return [(part + 0.5) / count for part in range(count)]


def passkey(haystack: Haystack, length: int, trial: int, count: int) -> Trial:
    """One five-digit key, at evenly spaced depths."""
    depth = even_depths(count)[trial]
    key = five_digits(random.Random(f"passkey {length} {trial}"))
    prompt = haystack.prompt(trial, length, [(depth, PASSKEY_SENTENCE.format(key=key))], PASSKEY_QUESTION)
    return retrieval_trial(haystack, prompt, depth, key)


def needle(haystack: Haystack, length: int, trial: int, count: int) -> Trial:
    """One odd sentence, at depths from 0 to 1: a column of the needle grid."""
    rng = random.Random(f"needle {length} {trial}")
    name, thing = rng.choice(NAMES), f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
    depth = trial / (count - 1) if count > 1 else 0.5
    question = f"The present that {name} hid in the garden is a"
    prompt = haystack.prompt(trial, length, [(depth, f"{question} {thing}.")], question)
    return retrieval_trial(haystack, prompt, depth, thing)


def multikey(haystack: Haystack, length: int, trial: int, count: int) -> Trial:
    """The keys of several people; the question is about one of them."""
    rng = random.Random(f"multikey {length} {trial}")
    names = rng.sample(NAMES, KEYS_TOGETHER)
    keys = [five_digits(rng) for _ in names]
    depths = even_depths(KEYS_TOGETHER)
    hidden = [
        (depth, f"The pass key of {name} is {key}.") for depth, name, key in zip(depths, names, keys, strict=True)
    ]
    which = trial % KEYS_TOGETHER
    question = f"What is the pass key of {names[which]}? The pass key of {names[which]} is"
    prompt = haystack.prompt(trial, length, hidden, question)
    return retrieval_trial(haystack, prompt, depths[which], keys[which])


def tracking(haystack: Haystack, length: int, trial: int, count: int) -> Trial:
    """A chain of variable assignments; the answer is all variables with the value."""
    rng = random.Random(f"tracking {length} {trial}")
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(CHAIN)]
    value = five_digits(rng)
    values = [value, *(f"VAR {name}" for name in names)]
    depths = sorted(rng.uniform(0, 1) for _ in names)
    hidden = [(depth, f"VAR {name} = {held}") for depth, name, held in zip(depths, names, values[:CHAIN], strict=True)]
    question = (
        f"Question: Find all variables that are assigned the value {value} in the text above.\n"
        f"Answer: The {CHAIN} variables that are assigned the value {value} are VAR"
    )
    prompt = haystack.prompt(trial, length, hidden, question)
    return retrieval_trial(haystack, prompt, depths[0], *names)


def tiled_copy(haystack: Haystack, length: int, trial: int, count: int) -> Trial:
    """A passage repeated until the prompt is full, cut before its last tokens, which are the answer."""
    tiles = TILES[trial % len(TILES)]
    tile = (length - len(haystack.opening)) // tiles
    if tile <= COPIED_TOKENS:
        raise ValueError(f"lengths must be above {max(TILES) * COPIED_TOKENS} tokens for tiled_copy, got {length}")
    passage = haystack.text(trial, tile, even_depths(count)[trial])
    prompt = haystack.opening + (passage * tiles)[:-COPIED_TOKENS]
    expected = passage[-COPIED_TOKENS:]
    answer = haystack.tokenizer.decode(expected)
    return Trial(prompt, answer, 1 - tile / len(prompt), COPIED_TOKENS, token_match_score(expected))


def all_trials(
    make: Callable[[Haystack, int, int, int], Trial], haystack: Haystack, length: int, count: int
) -> list[Trial]:
    """``count`` trials of a task."""
    return [make(haystack, length, trial, count) for trial in range(count)]


TASKS: dict[str, Callable[[Haystack, int, int], list[Trial]]] = {
    make.__name__: functools.partial(all_trials, make) for make in (passkey, needle, multikey, tracking, tiled_copy)
}
"""Functions of haystack, length and number of trials, by task name."""
