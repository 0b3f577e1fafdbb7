"""How positions and a packed table travel from a patched rotary embedding to the fused apply function.

Modeling code of transformers passes ``position_embeddings`` from its rotary embedding to the apply function of every
layer without looking inside. A patched rotary embedding returns :func:`pack` in place of cosines and sines; the apply
function calls :func:`unpack`. The integer dtype tells packed embeddings from cosines and sines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PACKED_TABLE_DTYPE = torch.int64


def pack(positions: torch.Tensor, table: torch.Tensor, *, in_one_tensor: bool) -> tuple[torch.Tensor, ...]:
    """Return what replaces the output of a rotary embedding.

    Args:
        positions: ``[batch, tokens]``, or ``[rows, batch, tokens]`` for M-RoPE.
        table: the packed table, or one row per sequence.
        in_one_tensor: whether the model passes one complex tensor instead of cosines and sines.
    """
    if not in_one_tensor:
        return positions, table
    batch = max(positions.shape[0], table.shape[0] if table.dim() == 2 else 1)
    return (torch.cat([positions.expand(batch, -1), table.expand(batch, -1)], dim=1),)


def is_packed(embedding: Sequence[Any]) -> bool:
    """Whether the embedding of an apply call comes from a patched rotary embedding."""
    return isinstance(embedding[0], torch.Tensor) and embedding[0].dtype == PACKED_TABLE_DTYPE


def unpack(embedding: Sequence[torch.Tensor], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and the table that :func:`pack` was given."""
    if len(embedding) == 2:
        return embedding[0], embedding[1]
    return embedding[0][:, :tokens], embedding[0][:, tokens:].contiguous()
