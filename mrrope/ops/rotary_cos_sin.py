"""The op ``rotary_cos_sin``: rotates q and k by cosines and sines that the model computed."""

from __future__ import annotations

import torch

from mrrope.ops import require_tensors, require_tensors_or_none


def rotary_cos_sin(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "bhsd",
    pairing: str = "halves",
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by given cosines and sines. Differentiable in q and k.

    For code that has cosines and sines and no table, such as the modeling code of transformers. The result is rounded
    once, but no more accurate than ``cos`` and ``sin``; ``rotary`` computes them from 64-bit phases.

    Args:
        q: As in ``rotary``.
        k: As in ``rotary``.
        cos: Float32, or of q's dtype, on q's device, with a contiguous last dimension: ``[tokens, columns]``,
            ``[1, tokens, columns]`` or ``[batch, tokens, columns]``; in layout ``thd`` ``[tokens, columns]``. With
            ``rotary_dim`` columns, one for each component, the two of a pair are equal, and the first is read: column i
            in pairing ``halves``, column 2i in ``interleaved``. With ``rotary_dim / 2`` columns, pair i uses column i.
        sin: Like ``cos``.
        layout: As in ``rotary``.
        pairing: As in ``rotary``.
        rotary_dim: The leading components of a head that are rotated; the others are copied. Default: the columns of
            ``cos``. Must be given where ``cos`` has one column per pair.

    Returns:
        The rotated q and k, with the strides of q and k where those are dense. None in place of k where ``k`` is None.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        RuntimeError: The tensors are on different devices, or ``cos`` or ``sin`` requires grad.
    """
    require_tensors(q=q, cos=cos, sin=sin)
    require_tensors_or_none(k=k)
    heads = [q] if k is None else [q, k]
    rotated = torch.ops.mrrope.rotary_cos_sin.default(heads, cos, sin, layout, pairing, rotary_dim)
    return rotated[0], None if k is None else rotated[1]
