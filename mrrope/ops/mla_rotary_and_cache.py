"""The op ``mla_rotary_and_cache``: rotates q, and writes latent and rotated key to the cache of latent attention."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_index, require_tensors, require_tensors_or_none, table_without_factors


def mla_rotary_and_cache_(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    table: Tables,
    cache: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    cache_positions: torch.Tensor | None = None,
    layout: str = "bhsd",
    pairing: str = "interleaved",
    scale: torch.Tensor | None = None,
    table_index: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q_rope in place, and write a row ``[latent | rotated k_rope]`` per token to the cache.

    For multi-head latent attention (MLA: DeepSeek-V2 and V3, Kimi), whose cache holds one row per token for all heads.
    k_rope and latent are not modified. Every element is read once, written once and rounded once, from float32 to the
    dtype it is stored in. Not differentiable: call it under ``torch.no_grad()`` or with tensors that do not require
    grad.

    Args:
        q_rope: The rope parts of all query heads, as q in ``rotary``, with ``table.rotary_dim`` components: a view of
            the query's last components needs no copy.
        k_rope: The rope part of the key, shared by all heads: ``[batch, tokens, rotary_dim]``, in layout ``thd``
            ``[tokens, rotary_dim]``, or with a dimension of one head where ``layout`` has the heads.
        latent: The compressed keys and values: ``[batch, tokens, latent_dim]``, in layout ``thd``
            ``[tokens, latent_dim]``.
        positions: As in ``rotary``, one per token.
        table: As in ``rotary``, but for one head: not ``HeadTables`` of several.
        cache: ``[blocks, block_size, latent_dim + rotary_dim]``, of q_rope's dtype or float8 (e4m3fn, e5m2), with a
            contiguous last dimension; other strides are free. A static cache has one block per sequence,
            ``[batch, max_tokens, latent_dim + rotary_dim]``.
        slots: As in ``rotary_and_cache_``: the destination of each token in a paged cache. None selects a static one.
        cache_positions: As in ``rotary_and_cache_``: the destination of each token in its sequence of a static cache;
            ``positions`` by default.
        layout: Layout of q_rope, as in ``rotary``.
        pairing: As in ``rotary``. ``interleaved`` is that of DeepSeek's weights; pairs stay where they are.
        scale: Scale of a float8 cache, float32 on q_rope's device, one element; 1 by default. ``x / scale`` is stored,
            saturating. It is from 2^-126 to 2^126 in magnitude.
        table_index: As in ``rotary``.
        q_out: Destination of the rotated q_rope, of its shape and dtype, such as the last components of the absorbed
            query; q_rope itself by default.

    Returns:
        The rotated q_rope: ``q_rope`` or ``q_out``.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument, and nothing is written.
        ValueError: A shape, a stride or an option is invalid.
        IndexError: A slot or ``table_index`` is out of range. On CUDA the host reads neither slots nor the scale, and
            tokens whose slot is out of range are not written.
        RuntimeError: The tensors are on different devices, share memory or require grad.
    """
    require_tensors(q_rope=q_rope, k_rope=k_rope, latent=latent, positions=positions, cache=cache)
    require_tensors_or_none(slots=slots, cache_positions=cache_positions, scale=scale, q_out=q_out)
    if slots is not None and cache_positions is not None:
        raise ValueError("cache_positions must come without slots, which say where tokens go, got both")
    is_paged = slots is not None
    if slots is None:
        slots = positions if cache_positions is None else cache_positions
    packed = table_without_factors(table, q_rope.device)
    options = (layout, pairing, scale, checked_index(table_index))
    others = (k_rope, latent, positions, packed, cache, slots, is_paged, *options)
    if q_out is None or q_out is q_rope:
        torch.ops.mrrope.mla_rotary_and_cache_.default(q_rope, *others)
        return q_rope
    torch.ops.mrrope.mla_rotary_and_cache_.into(q_rope, q_out, *others)
    return q_out
