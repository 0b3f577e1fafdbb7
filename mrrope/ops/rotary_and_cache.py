"""Rotation on the way to a cache: q rotated, k rotated and v written where a cache keeps them, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrrope.ops import checked_heads, checked_index
from mrrope.tables import FrequencyTable


def rotary_and_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    cache_positions: torch.Tensor | None = None,
    layout: str = "bhsd",
    cache_layout: str | None = None,
    pairing: str = "halves",
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    table_index: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates q in place, and writes k, rotated, and v straight to their caches; k and v themselves stay as they are.

    Everything is read once, written once and rounded once, from float32 to the dtype it is kept in. No gradients: under
    ``torch.no_grad()`` or of tensors that require none.

    Args:
        q, k, v: as :func:`mrrope.rotary` takes q and k; v has k's shape. Views of one packed projection need no copy.
        positions, table, pairing, table_index: as :func:`mrrope.rotary` takes them.
        key_cache, value_cache: of q's dtype, or ``torch.float8_e4m3fn``; any strides with a contiguous last dimension.
        slots: of a paged cache, where each token goes: ``block * block_size + offset``, int32 or int64, ``[tokens]``,
            or ``[batch, tokens]`` of several sequences. Tokens with a negative slot, padding, are not written; no two
            tokens may have the same one. Without slots the cache is a static one.
        cache_positions: of a static cache, where in its sequence each token goes, shaped as ``positions``; by default
            those. Tokens at negative ones are not written.
        layout: of q, k and v, ``bhsd``, ``bshd`` or ``thd``.
        cache_layout: ``nhd``, ``[blocks, block_size, heads, head_dim]``, as vLLM has it and the default for a paged
            cache, or ``hnd``, ``[blocks, heads, block_size, head_dim]``, as transformers' static cache has it and the
            default there. A static cache has a block for each sequence.
        key_scale, value_scale: float32, of one element or ``[k's heads]``, on q's device: ``x / scale`` is written,
            saturating, to a cache of float8; 1 where not given. Finite, and so large that the inverse is, too.
        q_out: where the rotated q goes instead of q's own place; of q's shape and dtype.

    Returns:
        The rotated q: q itself, or q_out.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: naming the argument; nothing has been written then. On a GPU
            nobody looks at slots and scales before they are used: tokens whose slot is not there are not written.
    """
    _, positions, packed = checked_heads(q, k, positions, table)
    for name, value in (("k", k), ("v", v), ("key_cache", key_cache), ("value_cache", value_cache)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    places = (("slots", slots), ("cache_positions", cache_positions))
    for name, maybe in (*places, ("key_scale", key_scale), ("value_scale", value_scale), ("q_out", q_out)):
        if maybe is not None and not isinstance(maybe, torch.Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(maybe).__name__}")
    if slots is not None and cache_positions is not None:
        raise ValueError("cache_positions must come without slots, which say where tokens go, got both")
    paged = slots is not None
    if slots is None:
        slots = positions if cache_positions is None else cache_positions
    if cache_layout is None:
        cache_layout = "nhd" if paged else "hnd"
    options = (layout, cache_layout, pairing, key_scale, value_scale, checked_index(table_index))
    written = (key_cache, value_cache, slots, paged, *options)
    if q_out is None or q_out is q:
        torch.ops.mrrope.rotary_and_cache_.default(q, k, v, positions, packed, *written)
        return q
    torch.ops.mrrope.rotary_and_cache_.into(q, q_out, k, v, positions, packed, *written)
    return q_out
