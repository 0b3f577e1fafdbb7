"""The op ``rotary_and_cache``: rotates q, and writes rotated k and v to a KV cache, in one pass over memory."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_heads, checked_index, require_tensors, require_tensors_or_none


def rotary_and_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: Tables,
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
    """Rotate q in place, and write rotated k and unrotated v to their caches. k and v are not modified.

    Every element is read once, written once and rounded once, from float32 to the dtype it is stored in. Not
    differentiable: call it under ``torch.no_grad()`` or with tensors that do not require grad.

    Args:
        q: As in ``rotary``. Views of one packed projection need no copy.
        k: As in ``rotary``, but not None.
        v: Of k's shape.
        positions: As in ``rotary``.
        table: As in ``rotary``.
        key_cache: Of q's dtype, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, with a contiguous last dimension;
            other strides are free.
        value_cache: Like ``key_cache``.
        slots: Destination of each token in a paged cache, ``block * block_size + offset``, int32 or int64:
            ``[tokens]``, or ``[batch, tokens]`` for several sequences. Tokens with a negative slot (padding) are not
            written. Slots must be distinct. None selects a static cache.
        cache_positions: Destination of each token in its sequence of a static cache, shaped like ``positions``, which
            are the default where a token has one. Tokens with a negative one are not written.
        layout: Layout of q, k and v, as in ``rotary``.
        cache_layout: ``nhd`` ``[blocks, block_size, heads, head_dim]``, as in vLLM and the default for a paged cache,
            or ``hnd`` ``[blocks, heads, block_size, head_dim]``, as in transformers' static cache and the default for
            one. A static cache has one block per sequence.
        pairing: As in ``rotary``.
        key_scale: Scale of a float8 key cache, float32 on q's device, one element or ``[k's heads]``; 1 by default.
            ``x / scale`` is stored, saturating. A scale is from 2^-126 to 2^126 in magnitude.
        value_scale: The same for the value cache.
        table_index: As in ``rotary``.
        q_out: Destination of the rotated q, of q's shape and dtype; q itself by default.

    Returns:
        The rotated q: ``q`` or ``q_out``.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument, and nothing is written.
        ValueError: A shape, a stride or an option is invalid.
        IndexError: A slot or ``table_index`` is out of range. On CUDA the host reads neither slots nor scales, and
            tokens whose slot is out of range are not written.
        RuntimeError: The tensors are on different devices, share memory or require grad.
    """
    _, positions, packed = checked_heads(q, k, positions, table, layout)
    require_tensors(k=k, v=v, key_cache=key_cache, value_cache=value_cache)
    require_tensors_or_none(key_scale=key_scale, value_scale=value_scale, q_out=q_out)
    slots, is_paged, cache_layout = cache_destination(positions, slots, cache_positions, cache_layout)
    options = (layout, cache_layout, pairing, key_scale, value_scale, checked_index(table_index))
    cache_arguments = (key_cache, value_cache, slots, is_paged, *options)
    if q_out is None or q_out is q:
        torch.ops.mrrope.rotary_and_cache_.default(q, k, v, positions, packed, *cache_arguments)
        return q
    torch.ops.mrrope.rotary_and_cache_.into(q, q_out, k, v, positions, packed, *cache_arguments)
    return q_out


def cache_destination(
    positions: torch.Tensor,
    slots: torch.Tensor | None,
    cache_positions: torch.Tensor | None,
    cache_layout: str | None,
) -> tuple[torch.Tensor, bool, str]:
    """Return every token's place in its cache, whether the cache is paged, and the layout of the cache."""
    require_tensors_or_none(slots=slots, cache_positions=cache_positions)
    if slots is not None:
        if cache_positions is not None:
            raise ValueError("cache_positions must come without slots, which say where tokens go, got both")
        return slots, True, "nhd" if cache_layout is None else cache_layout
    places = positions if cache_positions is None else cache_positions
    return places, False, "hnd" if cache_layout is None else cache_layout
