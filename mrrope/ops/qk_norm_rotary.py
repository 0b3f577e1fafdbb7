"""RMSNorm of q and k and their rotation, in one pass over memory, as models with QK-norm do it in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrrope.ops import checked_heads, checked_index
from mrrope.tables import FrequencyTable


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    *,
    eps: float,
    weight_offset: float = 0.0,
    over: str = "head",
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm of q and k, then :func:`rotary`, rounded once; differentiable, for the weights too.

    A head ``x`` becomes ``x / sqrt(mean(x**2) + eps) * (weight + weight_offset)``, rotated by its position.

    Args:
        q, k, positions, table, layout, pairing, table_index: as :func:`rotary` takes them.
        q_weight, k_weight: of q's dtype: ``[head_dim]``, or ``[heads * head_dim]`` over all heads; ``k_weight`` is None
            where ``k`` is.
        eps: what is added to the mean square.
        weight_offset: what is added to the weights: 1 for models that keep what theirs differ from 1 by, as Gemma.
        over: what one mean is taken of: ``head``, each head by itself (Qwen3, Gemma 3), or ``all_heads``, those of a
            token together (OLMo 2).

    Returns:
        The normed and rotated q and k, with q's and k's strides where those are dense; None for a k of None.
    """
    found = torch.ops.mrrope.qk_norm_rotary.default(
        *_norm_arguments(q, k, q_weight, k_weight, positions, table),
        eps,
        weight_offset,
        over,
        layout,
        pairing,
        table_index=checked_index(table_index),
    )
    return found[0], None if k is None else found[1]


def qk_norm_rotary_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    *,
    eps: float,
    weight_offset: float = 0.0,
    over: str = "head",
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`qk_norm_rotary` in place, without gradients: writes over the given q and k, and returns those."""
    torch.ops.mrrope.qk_norm_rotary_.default(
        *_norm_arguments(q, k, q_weight, k_weight, positions, table),
        eps,
        weight_offset,
        over,
        layout,
        pairing,
        table_index=checked_index(table_index),
    )
    return q, k


def _norm_arguments(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
) -> tuple[Any, ...]:
    heads, positions, packed = checked_heads(q, k, positions, table)
    weights = [q_weight]
    if not isinstance(q_weight, torch.Tensor):
        raise TypeError(f"q_weight must be a tensor, got {type(q_weight).__name__}")
    if k is not None:
        if not isinstance(k_weight, torch.Tensor):
            raise TypeError(f"k_weight must be a tensor where k is one, got {type(k_weight).__name__}")
        weights.append(k_weight)
    elif k_weight is not None:
        raise TypeError(f"k_weight must be None where k is, got {type(k_weight).__name__}")
    return heads, weights, positions, packed
