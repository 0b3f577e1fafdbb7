"""The op ``learnable_rotary``: rotates q and k by frequencies that have a gradient."""

from __future__ import annotations

import torch

from mrrope.ops import require_tensors, require_tensors_or_none


def learnable_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: torch.Tensor,
    layout: str = "bhsd",
    pairing: str = "halves",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by a table in floating point. Differentiable, frequencies and attention factors included.

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

    Returns:
        The rotated q and k, with the strides of q and k where those are dense. None in place of k where ``k`` is None.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        RuntimeError: The tensors are on different devices.
        NotImplementedError: The gradient of the table is differentiated again.
    """
    require_tensors(q=q, positions=positions, frequencies=frequencies, attention_factor=attention_factor)
    require_tensors_or_none(k=k)
    heads = [q] if k is None else [q, k]
    *rotated, _packed_tables = torch.ops.mrrope.learnable_rotary.default(
        heads, positions, frequencies, attention_factor, layout, pairing
    )
    return rotated[0], None if k is None else rotated[1]
