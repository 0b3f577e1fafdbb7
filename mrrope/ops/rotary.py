"""The op ``rotary``: rotates q and k by their positions, in one pass over memory."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_heads, checked_index


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by their positions. Differentiable.

    Args:
        q: Float64, float32, float16 or bfloat16, with a contiguous last dimension; other strides are free.
        k: Like ``q``, with any number of heads, or None.
        positions: Int32 or int64, any value: ``[tokens]``, ``[1, tokens]`` or ``[batch, tokens]``. With ``AxisTables``
            also ``[axes, batch, tokens]`` or ``[axes, 1, tokens]``.
        table: The frequencies. Components past its ``rotary_dim`` are copied. ``HeadTables`` have a table for each
            key head, which its query heads share; the heads of q and of k are multiples of their number. Their query
            factors are those of q's heads; for k alone use ``without_query_factors()``. A list with tables of both
            kinds and of one ``rotary_dim`` has one per sequence, or those that ``table_index`` selects from.
            ``AxisTables`` rotate each pair by one of a token's positions; in a list they stand alone.
        layout: ``bhsd`` ``[batch, heads, tokens, head_dim]``, ``bshd`` ``[batch, tokens, heads, head_dim]``, or
            ``thd`` ``[tokens, heads, head_dim]``.
        pairing: ``halves`` pairs components i and i + rotary_dim / 2, as in Llama; ``interleaved`` pairs 2i and
            2i + 1, as in GPT-J.
        table_index: Int32 on q's device, the table of each sequence, ``[batch]``; in layout ``thd`` of each token,
            ``[tokens]``.

    Returns:
        The rotated q and k, with the strides of q and k where those are dense. None in place of k where ``k`` is None.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        IndexError: ``table_index`` is out of range. On CUDA the indices are not read by the host.
        RuntimeError: The tensors are on different devices.
    """
    rotated = torch.ops.mrrope.rotary.default(
        *checked_heads(q, k, positions, table, layout), layout, pairing, table_index=checked_index(table_index)
    )
    return rotated[0], None if k is None else rotated[1]


def rotary_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    layout: str = "bhsd",
    pairing: str = "halves",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k in place, with the arguments of ``rotary``.

    Under autograd this is ``rotary`` and a copy. A leaf that requires grad raises RuntimeError.

    Returns:
        The given q and k.
    """
    torch.ops.mrrope.rotary_.default(
        *checked_heads(q, k, positions, table, layout), layout, pairing, table_index=checked_index(table_index)
    )
    return q, k
