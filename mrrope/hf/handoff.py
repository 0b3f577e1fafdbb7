"""How positions and a packed table travel from a patched rotary embedding to the fused apply function.

Modeling code of transformers passes ``position_embeddings`` from its rotary embedding to the apply function of every
layer without looking inside. A patched rotary embedding returns :func:`pack` in place of cosines and sines; the apply
function calls :func:`unpack`. The integer dtype tells packed embeddings from cosines and sines.

Attention that multiplies what it is handed as if it were cosines and sines must fail, not return other numbers: the
last dimension of positions, :data:`COPIES`, broadcasts with no head. It is a view, which costs nothing to make.

| table | shape | the apply function runs |
|---|---|---|
| one for all heads | ``[W]``, ``[N, W]``, M-RoPE ``[N, 2, W]`` | ``rotary`` |
| one per key head | ``[N, R, H, W]`` | ``rotary`` |
| learned: float32 or float64 radians per position, attention factor last | ``[1 + F, H, W]`` | ``learnable_rotary`` |
| by layer: one of the two above per layer | ``[L, N, R, H, W]``, ``[L, 1 + F, H, W]`` | after :func:`of_layer` |

W is rotary_dim / 2 + 1, N 1 or the batch, H 1 or the number of key heads. R is 1, with M-RoPE's rows of positions 2,
and with query factors 2 and the rows that hold them. F rows of a learned table hold the factors of query heads, none
without (:func:`learned_table`). Tables by layer pass through the model whole; a hook on every attention module
(:mod:`mrrope.hf.layer_tables`) replaces them by the layer's own.

Positions are integers. Fractions of a position, as the frames of a video have in Qwen3-Omni, are counted in small units
(:func:`in_units`), with phase steps per unit.

Attention that selects tokens of cosines and sines, ``[batch, tokens, rotary_dim]``, gets both by token: positions
``[batch, tokens, rows, copies]``, and a view of the table for every token, ``[batch, tokens, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PACKED_TABLE_DTYPE = torch.int64
LEARNED_IN_ONE_TENSOR_DTYPE = torch.float64
"""Of positions and a learned table in one tensor: exact for positions up to 2^53, and differentiable."""

COPIES = 5
"""How often every position is handed over: odd, so that no head has as many components, and few, so that a slice for
half a head leaves them all. Doubled or halved, as attention does with cosines, they still broadcast with no head that
rotates more than 10 components. One tensor of both needs no copies: it is longer than the complex half of a head."""

UNIT_BITS = 20
"""Positions with fractions count units of 2^-20. Rounding them, and phase steps per unit, moves an angle by less than
1e-6 up to position 2^20; float32 cannot tell positions past 8 this far apart."""


def in_units(positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions with fractions as integers, in units of 2^-20, and a packed table with phase steps per unit."""
    is_step = torch.ones_like(table, dtype=torch.bool)
    is_step[..., -1] = False
    if table.dim() >= 3:
        rows = 1 if table.dim() == 3 else table.dim() - 3
        is_step.narrow(rows, 1, table.shape[rows] - 1).fill_(False)
    half = 1 << (UNIT_BITS - 1)
    units = (positions.double() * 2.0**UNIT_BITS).round().to(PACKED_TABLE_DTYPE)
    return units, torch.where(is_step, (table + half) >> UNIT_BITS, table)


def whole(positions: torch.Tensor) -> torch.Tensor:
    """Return positions as integers.

    Raises:
        ValueError: they have fractions. Compiled code raises a RuntimeError of the device instead.
    """
    if positions.is_floating_point():
        expected = "position_ids must be whole numbers where the scale follows the text or tables are learned"
        is_whole = positions == positions.round()
        if torch.compiler.is_compiling():
            torch._assert_async(is_whole.all(), expected)
        elif not is_whole.all():  # synchronizes; transformers gives integers, but for Qwen3-Omni
            raise ValueError(f"{expected}, got {float(positions[~is_whole][0]):g}")
    return positions.to(PACKED_TABLE_DTYPE)


def learned_table(tables: torch.Tensor, query_factors: torch.Tensor | None) -> torch.Tensor:
    """Return a learned table of the forms above.

    Args:
        tables: ``[H, W]`` or ``[layers, H, W]``.
        query_factors: ``[query heads]`` or ``[layers, query heads]``. NaN follows the last one, so that a query head
            without a factor shows.
    """
    rows = tables.unsqueeze(-3)
    if query_factors is None:
        return rows
    heads, words = tables.shape[-2:]
    missing = -query_factors.shape[-1] % (heads * words)
    padded = torch.nn.functional.pad(query_factors, (0, missing), value=torch.nan)
    return torch.cat([rows, torch.unflatten(padded, -1, (-1, heads, words)).to(rows.dtype)], dim=-3)


def query_factors_of(learned: torch.Tensor, heads: int) -> torch.Tensor | None:
    """Return the factors of so many query heads in a learned table of one layer, or None where it has none."""
    return learned[1:].flatten()[:heads] if learned.shape[0] > 1 else None


def pack(
    positions: torch.Tensor, table: torch.Tensor, *, in_one_tensor: bool, by_token: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return what replaces the output of a rotary embedding.

    Args:
        positions: ``[batch, tokens]``, or ``[rows, batch, tokens]`` for M-RoPE; handed over with copies.
        table: a table of any form above. Tables by layer stay a tensor of their own until :func:`of_layer`.
        in_one_tensor: whether the model passes one complex tensor instead of cosines and sines.
        by_token: whether the model selects tokens of cosines and sines; for one table for all heads and layers.

    Raises:
        ValueError: a learned table cannot be packed by token.
    """
    if by_token:
        if is_learned(table):
            raise ValueError(
                "a table can be learned where attention takes cosines and sines whole, and this selects tokens"
            )
        positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
        batch, tokens = positions.shape[:2]
        table = table[None] if table.dim() == 1 else table
        return _copied(positions), table[:, None].expand(batch, tokens, *table.shape[1:])
    if not in_one_tensor or is_by_layer(table):
        return _copied(positions), table
    if is_learned(table):
        positions, table = positions.to(LEARNED_IN_ONE_TENSOR_DTYPE), table[None].to(LEARNED_IN_ONE_TENSOR_DTYPE)
    elif table.dim() == 1:
        table = table.expand(1, -1)
    batch = max(positions.shape[0], table.shape[0])
    if table.dim() == 4:
        positions = positions[:, None, None].expand(-1, *table.shape[1:3], -1)
    expanded = [part.expand(batch, *part.shape[1:]) for part in (positions, table)]
    return (torch.cat(expanded, dim=-1),)


def _copied(positions: torch.Tensor) -> torch.Tensor:
    return positions[..., None].expand(*positions.shape, COPIES)


def is_packed(embedding: Sequence[Any]) -> bool:
    """Whether the embedding of an apply call comes from a patched rotary embedding."""
    if not isinstance(embedding[0], torch.Tensor):
        return False
    dtype = embedding[0].dtype
    # Where a model passes one tensor, its own is complex.
    return dtype == PACKED_TABLE_DTYPE or (len(embedding) == 1 and dtype == LEARNED_IN_ONE_TENSOR_DTYPE)


def is_learned(table: torch.Tensor) -> bool:
    """Whether a table holds frequencies to be learned, not phase steps."""
    return table.is_floating_point()


def is_by_layer(table: torch.Tensor) -> bool:
    """Whether a table holds one per layer."""
    return table.dim() == (4 if is_learned(table) else 5)


def of_layer(embedding: Any, layer: int, *, in_one_tensor: bool) -> Any:
    """Return the embedding of one layer, given that of all; other embeddings are returned unchanged."""
    if isinstance(embedding, dict):  # by layer type, of which the attention takes one
        return {key: of_layer(value, layer, in_one_tensor=in_one_tensor) for key, value in embedding.items()}
    is_pair = isinstance(embedding, (tuple, list)) and len(embedding) == 2
    if not is_pair or not is_packed(embedding) or not is_by_layer(embedding[1]):
        return embedding
    positions, table = embedding[0], embedding[1][layer]
    if not in_one_tensor:
        return positions, table
    return pack(positions.select(-1, 0), table, in_one_tensor=True)[0]


def unpack(
    embedding: Sequence[torch.Tensor], tokens: int, *, by_token: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and the table that :func:`pack` was given; by token, those of the selected tokens.

    Raises:
        ValueError: the table is one by layer, and the attention module has no hook that replaces it.
    """
    if by_token:
        positions, table = embedding if embedding[0].dim() == 4 else (part[None] for part in embedding)
        positions, table = positions.select(-1, 0), table[:, 0].contiguous()
        return (positions[..., 0] if positions.shape[-1] == 1 else positions.movedim(-1, 0)), table
    if len(embedding) == 2:
        if is_by_layer(embedding[1]):
            raise ValueError(
                f"a table of {embedding[1].shape[0]} layers must pass an attention module that knows its layer, and "
                "did not: patch the model with a TableSet, or with tables that are the same for all layers"
            )
        return embedding[0].select(-1, 0), embedding[1]
    packed = embedding[0]
    positions, table = packed[..., :tokens], packed[..., tokens:]
    if packed.dim() == 2:
        return positions, table.contiguous()
    positions = positions[:, 0, 0]
    return (positions.to(PACKED_TABLE_DTYPE), table[0]) if is_learned(packed) else (positions, table.contiguous())
