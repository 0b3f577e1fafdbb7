"""The same rotation in plain PyTorch, as model code writes it: what the op is measured against."""

from __future__ import annotations

import torch

from mrrope.tables import FrequencyTable


def cos_sin(positions: torch.Tensor, table: FrequencyTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[..., tokens, rotary_dim]`` of ``halves`` pairing, by float32 angles rounded to ``dtype``."""
    angles = positions.float()[..., None] * table.inv_freq.float().to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * table.attention_factor).to(dtype), (angles.sin() * table.attention_factor).to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The partner of every component, with the sign it has in the rotation."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``[batch, heads, tokens, head_dim]``."""
    return x * cos + rotate_half(x) * sin
