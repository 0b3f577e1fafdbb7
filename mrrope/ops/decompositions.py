"""The decomposition of ``rotary``: the same arithmetic in ATen ops, which Inductor fuses with the surrounding kernels.

At one token per sequence launch overhead dominates, so under torch.compile the decomposition is emitted and Inductor
fuses it, for example into the cache write. Phases are the op's 64-bit integers. All other arithmetic is float32, so
that 16-bit results are rounded once.
"""

from __future__ import annotations

import math

import torch

from mrrope.tables.query_factors import factors_in, has_query_factors

RADIANS_PER_PHASE_UNIT = 2 * math.pi * 2.0**-64
"""Phases are 64-bit fixed-point fractions of a revolution."""


def should_decompose(heads: list[torch.Tensor], layout: str) -> bool:
    """Whether to emit the decomposition: while compiling a decode step for a GPU.

    CPUs are excluded because Inductor's C++ does not define overflow of signed products, and phases must wrap. Float64
    is excluded because its angles need more than the 53 bits that a double has.
    """
    x = heads[0]
    return torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64 and is_decode_step(heads, layout)


def is_decode_step(heads: list[torch.Tensor], layout: str) -> bool:
    """Whether every sequence has one token; False where the compiler does not know the size."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import, but loaded while compiling

    return bool(guard_or_false(heads[0].shape[2 if layout == "bhsd" else 1] == 1))


def rotary(
    heads: list[torch.Tensor],
    positions: torch.Tensor,
    table: torch.Tensor,
    layout: str,
    pairing: str,
    conjugate: bool,
) -> list[torch.Tensor]:
    """Decompose ``torch.ops.mrrope.rotary``, for positions of ``[batch, tokens]`` or ``[rows, batch, tokens]``.

    ``table`` has any form that the op takes.
    """
    cos, sin = _cos_sin(positions, table, pairing, conjugate)
    heads_dim = _heads_dim(layout)
    if table.dim() < 4:
        cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
        return [_rotated(x.float(), cos, sin, pairing).to(x.dtype) for x in heads]
    # The heads of one table get a dimension of their own, over which its cos/sin broadcast.
    cos, sin = (part.movedim(2, heads_dim).unsqueeze(heads_dim + 1) for part in (cos, sin))
    tables = table.shape[2]
    grouped = [torch.unflatten(x.float(), heads_dim, (tables, x.shape[heads_dim] // tables)) for x in heads]
    factors: list[torch.Tensor | None] = [None] * len(heads)
    if has_query_factors(table):
        factors[0] = _query_factors(table, heads[0].shape[heads_dim], heads_dim)
    rotated = [
        _rotated(x, cos, sin, pairing, factor).flatten(heads_dim, heads_dim + 1)
        for x, factor in zip(grouped, factors, strict=True)
    ]
    return [x.to(like.dtype) for x, like in zip(rotated, heads, strict=True)]


def _query_factors(table: torch.Tensor, query_heads: int, heads_dim: int) -> torch.Tensor:
    """Return the factors of q's heads, float32, in the dimensions of heads grouped by table."""
    tables = table.shape[2]
    factors = factors_in(table, query_heads).abs().view(torch.float64).float()
    shape = [table.shape[0], 1, 1, 1, 1]
    shape[heads_dim : heads_dim + 2] = [tables, query_heads // tables]
    return factors.reshape(shape)


def _heads_dim(layout: str) -> int:
    return 1 if layout == "bhsd" else 2


def _pair_dim(pairing: str) -> int:
    """Return the dimension of a pair's two components once the last dimension is split in two."""
    return -2 if pairing == "halves" else -1


def _cos_sin(
    positions: torch.Tensor, table: torch.Tensor, pairing: str, conjugate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per component, its own factor (cos) and its partner's (signed sin), times the attention factor.

    Both are ``[batch, tokens, rotary_dim]``, or ``[batch, tokens, tables, rotary_dim]`` for head tables.
    """
    # Second rows name the row of positions that rotates each pair, in the low byte.
    words, *rows = [table] if table.dim() == 1 else [table[:, None]] if table.dim() == 2 else table[:, None].unbind(2)
    if positions.dim() == 3:
        positions = positions.permute(1, 2, 0)
        # Clamped as in the op, whose rows that do not exist are the last: an index past it is a device assert.
        row_of_pair = (rows[0][..., :-1].abs() & 0xFF).clamp(max=positions.shape[-1] - 1)
        positions = torch.take_along_dim(positions[:, :, None] if table.dim() == 4 else positions, row_of_pair, dim=-1)
    else:
        positions = positions[..., None, None] if table.dim() == 4 else positions[..., None]
    # Overflow drops whole revolutions and leaves a signed fraction of one.
    phases = (positions.long() * words[..., :-1]).unsqueeze(_pair_dim(pairing))
    # The first component of a pair takes its partner times -sin, which is the sine of the negated angle.
    signs = torch.arange(-1, 2, 2, device=phases.device).view((2, 1) if pairing == "halves" else (2,))
    angles = ((phases * (-signs if conjugate else signs)).flatten(-2).double() * RADIANS_PER_PHASE_UNIT).float()
    # Callers negate a whole table to rotate backwards. abs restores the row numbers and the factor's bits.
    attention_factor = words[..., -1:].abs().view(torch.float64).float()
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str, factor: torch.Tensor | None = None
) -> torch.Tensor:
    rotary_dim = cos.shape[-1]
    head, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = torch.unflatten(head, -1, (2, -1) if pairing == "halves" else (-1, 2))
    rotated = head * cos + pairs.flip(_pair_dim(pairing)).flatten(-2) * sin
    rotated = rotated if factor is None else rotated * factor
    return torch.cat([rotated, tail], -1) if tail.shape[-1] else rotated
