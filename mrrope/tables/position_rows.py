"""Tokens with several positions (M-RoPE, axes): how a packed table names the row of positions of each pair."""

from __future__ import annotations

import torch

PAIRS_PER_WORD = 8
MAX_ROWS = 128


def packed_rows(row_of_pair: torch.Tensor) -> torch.Tensor:
    """Return the second row of a packed table, int64 ``[..., pairs + 1]``.

    Byte i of a pair's word is the row of the pair i pairs after it, so that a GPU thread gets those of all its pairs by
    one load. The last word is unused.

    Args:
        row_of_pair: The row of positions that rotates each pair, less than ``MAX_ROWS``, int64 ``[..., pairs]``.
    """
    words = row_of_pair.shape[-1] + 1
    padded = torch.nn.functional.pad(row_of_pair, (0, PAIRS_PER_WORD))
    packed = torch.zeros_like(padded[..., :words])
    for ahead in range(PAIRS_PER_WORD):
        packed += padded[..., ahead : ahead + words] << 8 * ahead
    return packed
