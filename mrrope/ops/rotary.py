"""The rotary op: q and k rotated by their positions, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrrope.ops import checked_heads, checked_index
from mrrope.tables import FrequencyTable


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates q and k by their positions; differentiable.

    Args:
        q, k: float64, float32, float16 or bfloat16, any strides with a contiguous last dimension; ``k`` may have
            another number of heads, or be None.
        positions: int32 or int64, any value: ``[tokens]``, ``[1, tokens]`` or ``[batch, tokens]``.
        table: the frequencies; its ``rotary_dim`` may be less than the head's, whose remainder is then copied. Or
            several tables of one ``rotary_dim``: one for each sequence, or those that ``table_index`` picks from.
        layout: ``bhsd`` ``[batch, heads, tokens, head_dim]``, ``bshd`` ``[batch, tokens, heads, head_dim]``, or
            ``thd`` ``[tokens, heads, head_dim]``.
        pairing: which components turn together: ``halves`` (i, i + rotary_dim / 2), as in Llama, or
            ``interleaved`` (2i, 2i + 1), as in GPT-J.
        table_index: int32, on q's device: which table rotates each sequence, ``[batch]``; in layout ``thd`` each token,
            ``[tokens]``.

    Returns:
        The rotated q and k, with q's and k's strides where those are dense; None for a k of None.
    """
    turned = torch.ops.mrrope.rotary.default(
        *checked_heads(q, k, positions, table), layout, pairing, table_index=checked_index(table_index)
    )
    return turned[0], None if k is None else turned[1]


def rotary_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`rotary` in place: writes the rotated q and k over the given ones, and returns those.

    Where gradients are wanted it is rotary and a copy; a leaf that requires grad is refused.
    """
    torch.ops.mrrope.rotary_.default(
        *checked_heads(q, k, positions, table), layout, pairing, table_index=checked_index(table_index)
    )
    return q, k
