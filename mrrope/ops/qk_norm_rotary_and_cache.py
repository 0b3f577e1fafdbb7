"""The op ``qk_norm_rotary_and_cache``: norms, rotation, cache write, float8 and gate in one pass over memory."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_heads, checked_index, require_tensors, require_tensors_or_none
from mrrope.ops.rotary_and_cache import cache_destination


def qk_norm_rotary_and_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    over: str = "head",
    cache_positions: torch.Tensor | None = None,
    layout: str = "bhsd",
    cache_layout: str | None = None,
    pairing: str = "halves",
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    table_index: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    q_scale_out: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize and rotate q in place, write normed and rotated k and plain v to their caches. k and v stay unmodified.

    Every element is read once, written once and rounded once, from float32 to the dtype it is stored in. Not
    differentiable: call it under ``torch.no_grad()`` or with tensors that do not require grad.

    Args:
        q: As in ``rotary``. Views of one packed projection need no copy.
        k: As in ``rotary``, but not None.
        v: Of k's shape.
        q_weight: As in ``qk_norm_rotary``; None leaves q without norm.
        k_weight: The same for k. With neither, gate nor float8 ``q_out``, this is ``rotary_and_cache_``.
        positions: As in ``rotary``.
        table: As in ``rotary``.
        key_cache: As in ``rotary_and_cache_``.
        value_cache: As in ``rotary_and_cache_``.
        slots: As in ``rotary_and_cache_``.
        eps: Added to the mean square; needed with a weight.
        weight_offset: As in ``qk_norm_rotary``: 1 for Gemma, Qwen3-Next and Qwen3.5.
        over: As in ``qk_norm_rotary``.
        cache_positions: As in ``rotary_and_cache_``; needed for a static cache where tokens have several positions.
        layout: Layout of q, k, v and gate, as in ``rotary``.
        cache_layout: As in ``rotary_and_cache_``.
        pairing: As in ``rotary``.
        key_scale: As in ``rotary_and_cache_``.
        value_scale: As in ``rotary_and_cache_``.
        table_index: As in ``rotary``.
        q_out: Destination of the rotated q, of q's shape and dtype, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``;
            q itself by default.
        q_scale: Scale of a float8 ``q_out``, float32 on q's device, one element or ``[q's heads]``; 1 by default.
            ``x / scale`` is stored, saturating.
        q_scale_out: Instead of ``q_scale``: receives the scale of every token and head, which maps the head's largest
            magnitude to the largest float8 and is at least 2**-126. Float32, of q's shape without the last dimension.
        gate: Of q's shape and dtype, replaced by its sigmoid, for models that multiply attention's output by it
            (Qwen3-Next, Qwen3.5). The other half of a projection to ``[q | gate]`` needs no copy.

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
    require_tensors_or_none(
        q_weight=q_weight,
        k_weight=k_weight,
        key_scale=key_scale,
        value_scale=value_scale,
        q_out=q_out,
        q_scale=q_scale,
        q_scale_out=q_scale_out,
        gate=gate,
    )
    if eps is None and not (q_weight is None and k_weight is None):
        raise ValueError("eps must be given with q_weight or k_weight, got None")
    slots, is_paged, cache_layout = cache_destination(positions, slots, cache_positions, cache_layout)
    norm = (0.0 if eps is None else eps, weight_offset, over)
    options = (layout, cache_layout, pairing, key_scale, value_scale, checked_index(table_index), gate)
    arguments = (k, v, q_weight, k_weight, positions, packed, key_cache, value_cache, slots, is_paged, *norm, *options)
    if q_out is None or q_out is q:
        if q_scale is not None or q_scale_out is not None:
            name = "q_scale_out" if q_scale is None else "q_scale"
            raise ValueError(f"{name} must come with a q_out of float8, got q in place")
        torch.ops.mrrope.qk_norm_rotary_and_cache_.default(q, *arguments)
        return q
    torch.ops.mrrope.qk_norm_rotary_and_cache_.into(q, q_out, *arguments, q_scale, q_scale_out)
    return q_out
