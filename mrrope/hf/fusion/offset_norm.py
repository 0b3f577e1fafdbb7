"""RMSNorms by ``weight + offset``, such as Gemma's ``1 + weight``, in one kernel.

torch's ``rms_norm`` takes a weight of the input's dtype, to which the sum would be rounded. ``qk_norm_rotary`` adds the
offset in float32 and rounds once; its table is the identity here.
"""

from __future__ import annotations

import math

import torch

LARGEST_HEAD = 256
"""Rows up to this size are a head each; longer ones are all heads of a token."""
PART_OF_ROW = 128
"""Size of the heads that a longer row is divided into, where it is a multiple of that."""

_identity_tables: dict[tuple[int, torch.device], torch.Tensor] = {}


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2) + eps) * (weight + offset)`` over the last dimension, of an even size."""
    heads, over, layout = _as_heads(x)
    table = identity_table(heads.shape[-1], x.device)
    positions = table[:1].expand(heads.shape[{"thd": 0, "bshd": 1, "bhsd": 2}[layout]])
    normed: list[torch.Tensor] = torch.ops.mrrope.qk_norm_rotary.default(
        [heads], [weight], positions, table, eps, offset, over, layout, "halves"
    )
    return normed[0].reshape(x.shape)


def _as_heads(x: torch.Tensor) -> tuple[torch.Tensor, str, str]:
    """Return rows as heads, with what a mean covers and the layout."""
    size = x.shape[-1]
    is_head = size <= LARGEST_HEAD
    if is_head and x.dim() == 4:
        # By its strides: q and k are normed before or after their transpose.
        return x, "head", "bhsd" if x.stride(1) < x.stride(2) else "bshd"
    rows = x if x.dim() in (2, 3) else x.reshape(-1, size)
    head_dim = size if is_head else math.gcd(size, PART_OF_ROW)
    heads = rows.view(*rows.shape[:-1], size // head_dim, head_dim)
    return heads, "head" if is_head else "all_heads", "thd" if rows.dim() == 2 else "bshd"


def identity_table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return a packed table of frequencies 0 and attention factor 1. Its first word is also a position, 0."""
    table = _identity_tables.get((rotary_dim, device))
    if table is not None:
        return table
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _new_identity_table(rotary_dim, device, made_on=device)  # not kept: it has no values before a replay
    # The copy from the host ends before it returns, so that every stream can read the table.
    table = _new_identity_table(rotary_dim, device, made_on=torch.device("cpu"))
    return _identity_tables.setdefault((rotary_dim, device), table)


@torch.inference_mode(mode=False)  # inference tensors could not be saved for a backward pass
def _new_identity_table(rotary_dim: int, device: torch.device, *, made_on: torch.device) -> torch.Tensor:
    table = torch.zeros(rotary_dim // 2 + 1, dtype=torch.float64, device=made_on)
    table[-1:].fill_(1.0)  # an assignment would copy from the host, which no capture takes
    return table.view(torch.int64).to(device)
