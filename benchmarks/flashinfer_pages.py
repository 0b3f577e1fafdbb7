"""FlashInfer's rotary ops that write to a paged cache, and their arguments. Used where FlashInfer is installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

import mrrope


@functools.cache
def flashinfer_rope(names: tuple[str, ...]) -> Any:
    """FlashInfer's module of rotary ops, or None where it is not installed or too old to have those of these names."""
    try:
        ops = importlib.import_module("flashinfer.rope")
    except ImportError:
        return None
    return ops if all(hasattr(ops, name) for name in names) else None


@functools.lru_cache(maxsize=1)
def cos_sin_cache(table: mrrope.FrequencyTable, length: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of all positions below ``length``, float32."""
    angles = torch.arange(length, device=device).double()[:, None] * table.inv_freq.to(device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


class Pages:
    """Positions and cache blocks of tokens as FlashInfer's ops take them."""

    def __init__(
        self,
        table: mrrope.FrequencyTable,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        block_size: int,
        *,
        is_decoding: bool,
    ) -> None:
        """Build the arguments.

        Args:
            table: the rotation's frequencies.
            positions: of every token, ascending.
            blocks: the cache block of every token.
            block_size: slots per block.
            is_decoding: whether every token is that of a sequence of its own, or all are one sequence's.
        """
        device, tokens = positions.device, len(positions)
        self.cos_sin = cos_sin_cache(table, int(positions[-1]) + 1, device)
        self.positions = positions.int()
        sequence = torch.arange(tokens, device=device) if is_decoding else torch.zeros_like(positions)
        self.sequence = sequence.int()
        sequences = tokens if is_decoding else 1
        ends = torch.arange(1, sequences + 1, device=device) * (tokens // sequences)
        self.starts = torch.cat([torch.zeros_like(ends[:1]), ends]).int()
        self.lengths = self.positions[ends - 1] + 1
        page = positions // block_size
        self.table = torch.zeros(sequences, int(page.max()) + 1, device=device, dtype=torch.int32)
        self.table[sequence, page] = blocks.int()
        self.flat_table = self.table.flatten()
        self.flat_starts = torch.arange(sequences + 1, device=device, dtype=torch.int32) * self.table.shape[1]
