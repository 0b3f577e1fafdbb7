"""learnable_rotary in differentiable float64 PyTorch, with phases from 200-bit arithmetic."""

import mpmath
import torch
from rotary_reference import unit_rotations


def exact_turns(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the frequencies in 2^-64 revolutions per position, rounded to integers that wrap."""
    with mpmath.workprec(200):
        per_radian = mpmath.mpf(2) ** 64 / (2 * mpmath.pi)
        turns = [int(mpmath.nint(mpmath.mpf(float(x)) * per_radian)) % 2**64 for x in frequencies.flatten()]
    signed = [x - 2**64 if x >= 2**63 else x for x in turns]
    return torch.tensor(signed, dtype=torch.int64).view(frequencies.shape)


def of_every_head(table: torch.Tensor, tables: int, heads: int) -> torch.Tensor:
    """Repeat the rows of a part of the table, one for each head."""
    return table.expand(tables, *table.shape[1:]).repeat_interleave(heads // tables, dim=0)


def rotated(x, positions, frequencies, attention_factor, layout="bhsd", pairing="halves") -> torch.Tensor:
    """Rotate q or k in float64; autograd differentiates cosines and sines by the frequencies."""
    x = (x.transpose(1, 2) if layout == "bhsd" else x).double()  # [..., tokens, heads, head_dim]
    tables, pairs = max(len(frequencies), len(attention_factor)), frequencies.shape[1]
    by_head = of_every_head(frequencies.double(), tables, x.shape[-2])
    unit = torch.from_numpy(unit_rotations(positions[..., None], exact_turns(by_head.detach())))
    # The value is the exact angle, and the derivative by the frequency is the position.
    angles = unit.angle() + positions.double()[..., None, None] * (by_head - by_head.detach())
    gain = of_every_head(attention_factor.double(), tables, x.shape[-2])[:, None]
    cos, sin = gain * angles.cos(), gain * angles.sin()
    rotating, tail = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if pairing == "halves":
        first, second = rotating.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    result = torch.cat([turned, tail], dim=-1)
    return result.transpose(1, 2) if layout == "bhsd" else result


def pair_norms(x: torch.Tensor, pairs: int, layout: str, pairing: str) -> torch.Tensor:
    """Return the norm of every pair, [..., tokens, heads, pairs]."""
    x = (x.transpose(1, 2) if layout == "bhsd" else x).detach().cpu().double()[..., : 2 * pairs]
    parts = x.chunk(2, dim=-1) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])
    return torch.hypot(*parts)
