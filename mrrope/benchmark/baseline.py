"""The rotation in plain PyTorch, as model code has it: the baseline of every comparison."""

from __future__ import annotations

import math

import torch

from mrrope.tables.frequency_table import FrequencyTable


def cos_sin(positions: torch.Tensor, table: FrequencyTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[..., tokens, rotary_dim]`` for ``halves`` pairing: float32 angles, rounded to ``dtype``."""
    angles = positions.float()[..., None] * table.inv_freq.float().to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * table.attention_factor).to(dtype), (angles.sin() * table.attention_factor).to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The other component of each pair, with the sign that it has in the rotation."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[batch, heads, tokens, head_dim]``."""
    return x * cos + rotate_half(x) * sin


def exact_phases(positions: torch.Tensor, table: FrequencyTable) -> torch.Tensor:
    """Angles ``[tokens, rotary_dim / 2]`` in float64; integer phases wrap exactly, so far positions lose no bits."""
    return (positions[:, None] * table.turns.to(positions.device)).double() * (math.tau / 2**64)


def exact_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str = "halves") -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` components of ``x``; the others pass through."""
    rotary_dim = 2 * cos.shape[-1]
    rotating, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if pairing == "halves":
        first, second = rotating.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = rotating[..., ::2], rotating[..., 1::2]
        rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([rotated, rest], dim=-1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in Frobenius norm, in float64."""
    return float((got.double() - want).norm() / want.norm())
