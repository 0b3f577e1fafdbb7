"""Tokens with several positions (M-RoPE, axes): how a packed table names the row of positions of each pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAIRS_PER_WORD = 8
MAX_ROWS = 128


def rows_of_sections(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Return the row of positions that rotates each pair.

    Args:
        sections: The number of pairs of each row, as ``mrope_section`` of a configuration.
        interleaved: Whether the rows alternate, as in Qwen3-VL, or follow one another, as in Qwen2-VL. Of interleaved
            sections the first row gets every pair that the others leave.
    """
    if not interleaved:
        return [row for row, count in enumerate(sections) for _ in range(count)]
    alternating = [pair % len(sections) for pair in range(sum(sections))]
    return [row if pair < len(sections) * sections[row] else 0 for pair, row in enumerate(alternating)]


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
