"""The op ``learnable_rotary``: rotates q and k by frequencies that have a gradient."""

from __future__ import annotations

import torch

from mrrope.ops import require_tensors, require_tensors_or_none

LAYOUTS = ("bhsd", "bshd", "thd")


def learnable_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: torch.Tensor,
    layout: str = "bhsd",
    pairing: str = "halves",
    query_factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by a table in floating point. Differentiable, frequencies and all factors included.

    Results are those of ``rotary`` for the same table, with its accuracy at every position, negative or huge. Gradients
    of the table are sums in float64 in a fixed order, equal bit for bit from run to run.

    Args:
        q: As in ``rotary``.
        k: As in ``rotary``.
        positions: As in ``rotary``.
        frequencies: Float32 or float64 on q's device, radians per position: ``[tables, rotary_dim / 2]``. The number
            of tables divides the heads of q and of k: one for each key head, or one for all. Query heads use the table
            of their key head. Components past ``rotary_dim`` are copied. A frequency that is not finite gives NaN.
        attention_factor: Multiplied into the rotated q and k: ``[tables]``, of the dtype of ``frequencies``. Where one
            of these two has a single table, all tables of the other share it. A negative factor gives NaN: no packed
            table holds it.
        layout: As in ``rotary``.
        pairing: As in ``rotary``.
        query_factors: Multiplied into the rotated components of q besides: ``[query heads]``, float32 or float64 on
            q's device. A negative product with the attention factor gives NaN.

    Returns:
        The rotated q and k, with the strides of q and k where those are dense. None in place of k where ``k`` is None.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        RuntimeError: The tensors are on different devices.
        NotImplementedError: The gradient of the table is differentiated again.
    """
    require_tensors(q=q, positions=positions, frequencies=frequencies, attention_factor=attention_factor)
    require_tensors_or_none(k=k, query_factors=query_factors)
    heads = [q] if k is None else [q, k]
    rotated = rotated_heads(heads, positions, frequencies, attention_factor, layout, pairing, query_factors)
    return rotated[0], None if k is None else rotated[1]


def rotated_heads(
    heads: list[torch.Tensor],
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: torch.Tensor,
    layout: str,
    pairing: str,
    query_factors: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Rotate q, or q and k, as :func:`learnable_rotary` does."""

    def rotated(heads: list[torch.Tensor], *table: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor]
        *found, _packed_tables = torch.ops.mrrope.learnable_rotary.default(heads, positions, *table, layout, pairing)
        return found

    of_query_heads = None
    if query_factors is not None:
        of_query_heads = _tables_of_query_heads(heads[0], frequencies, attention_factor, query_factors, layout)
    if of_query_heads is None:
        return rotated(heads, frequencies, attention_factor)
    # A table for every query head has its factor, and heads of one key head compute cos/sin each. A product after the
    # rotation would read and write q once more in both passes, keep a copy of it for the gradient, and round it twice.
    q = rotated(heads[:1], *of_query_heads)
    if len(heads) == 1:
        return q
    # Without heads of its own, q is what the op compares k with.
    no_q = heads[0].narrow(layout.index("h"), 0, 0)
    return q + rotated([no_q, heads[1]], frequencies, attention_factor)[1:]


def _tables_of_query_heads(
    q: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: torch.Tensor,
    query_factors: torch.Tensor,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return frequencies and attention factors that hold the factor of every query head.

    None where there are no query heads, and for arguments that the op itself refuses by name.

    Raises:
        TypeError, ValueError, RuntimeError: ``query_factors`` has the wrong dtype, shape or device.
    """
    if query_factors.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"query_factors must be float32 or float64, got {query_factors.dtype}")
    if query_factors.device != q.device:
        raise RuntimeError(f"query_factors must be on q's device {q.device}, got {query_factors.device}")
    if layout not in LAYOUTS or q.dim() != len(layout):
        return None
    heads = q.shape[layout.index("h")]
    if query_factors.dim() != 1 or query_factors.shape[0] != heads:
        raise ValueError(f"query_factors must be [{heads}], one for each of q's heads, got {list(query_factors.shape)}")
    is_alike = (attention_factor.dtype, attention_factor.device) == (frequencies.dtype, frequencies.device)
    if not is_alike or frequencies.dim() != 2 or attention_factor.dim() != 1 or frequencies.device != q.device:
        return None
    (rows, pairs), factors = frequencies.shape, attention_factor.shape[0]
    tables = max(rows, factors)
    if heads == 0 or pairs == 0 or rows not in (1, tables) or factors not in (1, tables) or heads % tables != 0:
        return None
    frequencies = _repeated(frequencies, heads) if rows > 1 else frequencies
    attention_factor = _repeated(attention_factor, heads) if factors > 1 else attention_factor
    return frequencies, (attention_factor * query_factors).to(frequencies.dtype)


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat every row for neighbouring heads, ``count`` in all. Its gradient is a sum in a fixed order."""
    return rows[:, None].expand(-1, count // rows.shape[0], *rows.shape[1:]).flatten(0, 1)
