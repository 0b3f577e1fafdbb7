"""Tasks that ask for something the model has read far back. Every method gets the same prompts."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.texts import encode

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
    """A prompt, and how to judge the answer to it."""

    prompt: list[int]
    expected: str
    depth: float
    """The share of the prompt's text before what has to be found."""
    answer_tokens: int
    """How many tokens the model may answer with."""
    score: Callable[[list[int]], float]
    """From the tokens of an answer to the share of it that is right."""


def found_whole(tokenizer: Any, *wanted: str) -> Callable[[list[int]], float]:
    """Scores an answer by the share of these that occur in it."""
    return lambda answer: sum(one in tokenizer.decode(answer) for one in wanted) / len(wanted)


def same_tokens(expected: list[int]) -> Callable[[list[int]], float]:
    """Scores an answer by the share of its tokens that are the expected one at that place."""
    return lambda answer: sum(map(int.__eq__, answer, expected)) / len(expected)


def asked(haystack: Haystack, prompt: list[int], depth: float, *wanted: str) -> Trial:
    """A trial that asks for some words; the answer may be twice as long, and a little, for what stands between them."""
    expected = " ".join(wanted)
    answer_tokens = 2 * len(encode(haystack.tokenizer, f" {expected}")) + 4
    return Trial(prompt, expected, depth, answer_tokens, found_whole(haystack.tokenizer, *wanted))


def five_digits(chance: random.Random) -> str:
    """A number that a model cannot guess."""
    return str(chance.randrange(10_000, 100_000))


def even_depths(count: int) -> list[float]:
    """The middles of ``count`` equal parts of a text."""
    return [(part + 0.5) / count for part in range(count)]


def passkey(haystack: Haystack, length: int, count: int) -> list[Trial]:
    """One five-digit key in each prompt, in prompt after prompt a little deeper."""
    trials = []
    for trial, depth in enumerate(even_depths(count)):
        key = five_digits(random.Random(f"passkey {length} {trial}"))
        sentence = PASSKEY_SENTENCE.format(key=key)
        prompt = haystack.prompt(trial, length, [(depth, sentence)], PASSKEY_QUESTION)
        trials.append(asked(haystack, prompt, depth, key))
    return trials


def needle(haystack: Haystack, length: int, count: int) -> list[Trial]:
    """One odd sentence in each prompt, from the very beginning to the very end: a column of the grid."""
    trials = []
    for trial in range(count):
        chance = random.Random(f"needle {length} {trial}")
        name, thing = chance.choice(NAMES), f"{chance.choice(COLOURS)} {chance.choice(THINGS)}"
        depth = trial / (count - 1) if count > 1 else 0.5
        sentence = f"The present that {name} hid in the garden is a {thing}."
        prompt = haystack.prompt(trial, length, [(depth, sentence)], f"The present that {name} hid in the garden is a")
        trials.append(asked(haystack, prompt, depth, thing))
    return trials


def multikey(haystack: Haystack, length: int, count: int) -> list[Trial]:
    """Several people's keys in each prompt; one of them is asked for."""
    trials = []
    for trial in range(count):
        chance = random.Random(f"multikey {length} {trial}")
        names = chance.sample(NAMES, KEYS_TOGETHER)
        keys = [five_digits(chance) for _ in names]
        depths = even_depths(KEYS_TOGETHER)
        hidden = [
            (depth, f"The pass key of {name} is {key}.") for depth, name, key in zip(depths, names, keys, strict=True)
        ]
        which = trial % KEYS_TOGETHER
        question = f"What is the pass key of {names[which]}? The pass key of {names[which]} is"
        prompt = haystack.prompt(trial, length, hidden, question)
        trials.append(asked(haystack, prompt, depths[which], keys[which]))
    return trials


def tracking(haystack: Haystack, length: int, count: int) -> list[Trial]:
    """A number goes from variable to variable; all that hold it are asked for."""
    trials = []
    for trial in range(count):
        chance = random.Random(f"tracking {length} {trial}")
        names = ["".join(chance.choices(string.ascii_uppercase, k=5)) for _ in range(CHAIN)]
        value = five_digits(chance)
        values = [value, *(f"VAR {name}" for name in names)]
        depths = sorted(chance.uniform(0, 1) for _ in names)
        hidden = [
            (depth, f"VAR {name} = {held}") for depth, name, held in zip(depths, names, values[:CHAIN], strict=True)
        ]
        question = (
            f"Question: Find all variables that are assigned the value {value} in the text above.\n"
            f"Answer: The {CHAIN} variables that are assigned the value {value} are VAR"
        )
        prompt = haystack.prompt(trial, length, hidden, question)
        trials.append(asked(haystack, prompt, depths[0], *names))
    return trials


def tiled_copy(haystack: Haystack, length: int, count: int) -> list[Trial]:
    """A passage over and over until the text is full, but for the last tokens: what comes next?"""
    trials = []
    for trial, start in enumerate(even_depths(count)):
        tiles = TILES[trial % len(TILES)]
        tile = (length - len(haystack.opening)) // tiles
        if tile <= COPIED_TOKENS:
            raise ValueError(f"lengths must be above {max(TILES) * COPIED_TOKENS} tokens for tiled_copy, got {length}")
        passage = haystack.text(trial, tile, start)
        prompt = haystack.opening + (passage * tiles)[:-COPIED_TOKENS]
        expected = passage[-COPIED_TOKENS:]
        answer = haystack.tokenizer.decode(expected)
        trials.append(Trial(prompt, answer, 1 - tile / len(prompt), COPIED_TOKENS, same_tokens(expected)))
    return trials


TASKS: dict[str, Callable[[Haystack, int, int], list[Trial]]] = {
    "passkey": passkey,
    "needle": needle,
    "multikey": multikey,
    "tracking": tracking,
    "tiled_copy": tiled_copy,
}
"""By name: a function of haystack, length and number of trials."""
