"""The op ``qk_norm_rotary``: RMSNorm of q and k and their rotation, in one pass over memory."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_heads, checked_index, require_tensors


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    *,
    eps: float,
    weight_offset: float = 0.0,
    over: str = "head",
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalize q and k by their RMS, then rotate them as ``rotary`` does. Differentiable, weights included.

    A head ``x`` becomes ``x / sqrt(mean(x**2) + eps) * (weight + weight_offset)``, rotated by its position. The result
    is rounded once.

    Args:
        q: As in ``rotary``.
        k: As in ``rotary``.
        q_weight: Of q's dtype, ``[head_dim]``, or ``[heads * head_dim]`` with ``over="all_heads"``.
        k_weight: The same for k; None where ``k`` is None.
        positions: As in ``rotary``; with ``AxisTables`` also ``[axes, batch, tokens]``.
        table: As in ``rotary``.
        eps: Added to the mean square.
        weight_offset: Added to the weights: 1 for models that store their difference from 1, such as Gemma.
        over: What one mean covers: ``head``, a single head (Qwen3, Gemma 3), or ``all_heads``, all heads of a token
            (OLMo 2).
        layout: As in ``rotary``.
        pairing: As in ``rotary``.
        table_index: As in ``rotary``.

    Returns:
        The normed and rotated q and k, with the strides of q and k where those are dense. None in place of k where
        ``k`` is None.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        IndexError: ``table_index`` is out of range. On CUDA the indices are not read by the host.
        RuntimeError: The tensors are on different devices.
    """
    normed = torch.ops.mrrope.qk_norm_rotary.default(
        *_checked_operands(q, k, q_weight, k_weight, positions, table, layout),
        eps,
        weight_offset,
        over,
        layout,
        pairing,
        table_index=checked_index(table_index),
    )
    return normed[0], None if k is None else normed[1]


def qk_norm_rotary_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    *,
    eps: float,
    weight_offset: float = 0.0,
    over: str = "head",
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalize and rotate q and k in place, with the arguments of ``qk_norm_rotary``. Not differentiable.

    Returns:
        The given q and k.
    """
    torch.ops.mrrope.qk_norm_rotary_.default(
        *_checked_operands(q, k, q_weight, k_weight, positions, table, layout),
        eps,
        weight_offset,
        over,
        layout,
        pairing,
        table_index=checked_index(table_index),
    )
    return q, k


def _checked_operands(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    layout: str,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return heads, weights, positions and packed table in the form of the op's schema."""
    heads, positions, packed = checked_heads(q, k, positions, table, layout)
    require_tensors(q_weight=q_weight)
    if k is None:
        if k_weight is not None:
            raise TypeError(f"k_weight must be None where k is, got {type(k_weight).__name__}")
        return heads, [q_weight], positions, packed
    if not isinstance(k_weight, torch.Tensor):
        raise TypeError(f"k_weight must be a tensor where k is one, got {type(k_weight).__name__}")
    return heads, [q_weight, k_weight], positions, packed
