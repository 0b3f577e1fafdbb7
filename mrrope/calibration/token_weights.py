"""The objective of the gradient search as one weight per token: loss = sum of weight * negative log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

SCHEDULES = {1: (0,), 2: (0, 1, 0), 3: (0, 1, 0, 2, 0, 1, 0)}
"""Which of the reading lengths, by their number, each step of a cycle reads. A reading of twice the length costs four
times as much where attention dominates: halving its frequency spends time as the square root of the cost."""


def reading_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths of a cycle's readings: the three longest in the order of the schedule.

    Longer readings contain the shorter lengths, so none of these needs a reading of its own.
    """
    longest = sorted(lengths)[-max(SCHEDULES) :]
    return [longest[place] for place in SCHEDULES[len(longest)]]


def length_weights(lengths: Sequence[int]) -> dict[int, float]:
    """The weight of each length in the readings that contain it.

    A length that only some readings contain weighs the more in them, so that every length has the same weight in the
    mean over a cycle: 1 / number of lengths.
    """
    cycle = reading_lengths(lengths)
    return {
        length: len(cycle) / sum(reading >= length for reading in cycle) / len(lengths) for length in sorted(lengths)
    }


def token_weights(
    length: int, weights: dict[int, float], answers: Sequence[int] = (), retrieval: float = 0.0
) -> torch.Tensor:
    """The weights of a reading's tokens, float64 ``[length]``.

    Args:
        length: of the reading, in tokens.
        weights: of the mean loss over the second half of every length; longer ones than the reading are left out.
        answers: positions of the answer tokens of pass keys, which are queried at the end of each length.
        retrieval: weight of the mean loss of the answers before a length, and behind the next shorter one, relative
            to the length's.
    """
    inside = sorted(one for one in weights if one <= length)
    found = torch.zeros(length, dtype=torch.float64)
    for one in inside:
        found[one // 2 : one] += weights[one] / (one - one // 2)
    for before, one in pairwise([0, *inside]):
        queried = [place for place in answers if before <= place < one]
        if queried:
            found[queried] += retrieval * weights[one] / len(queried)
    return found
