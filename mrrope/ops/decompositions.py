"""The ops of the rotation in torch's own operations, for the compiler to fuse with what is around them.

A step of decoding turns a few kilobytes, and a kernel for that alone takes longer to come and go than to work. In a
compiled model such a step is written out instead: the compiler makes it part of the kernels that are there anyhow,
which write the cache, say. Phases are as exact as in the ops; all else is float32, so that 16-bit results are rounded
once.
"""

from __future__ import annotations

import math

import torch

ANGLE_OF_A_WORD = 2 * math.pi * 2.0**-64
"""The angle of a turn, which has 2^64 words."""


def is_for_the_compiler(heads: list[torch.Tensor], layout: str) -> bool:
    """Whether these are better written out: where a model is compiled, and each sequence goes on by one token.

    On GPUs: products of integers that overflow, as these do, need not wrap around in the compiler's code for CPUs. And
    not in float64, whose angles would need more bits than it has.
    """
    x = heads[0]
    return torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64 and is_a_step(heads, layout)


def is_a_step(heads: list[torch.Tensor], layout: str) -> bool:
    """Whether these are of one token in each sequence, as far as the compiler knows."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import, and there when compiling

    return bool(guard_or_false(heads[0].shape[2 if layout == "bhsd" else 1] == 1))


def rotary(
    heads: list[torch.Tensor],
    positions: torch.Tensor,
    table: torch.Tensor,
    layout: str,
    pairing: str,
    conjugate: bool,
) -> list[torch.Tensor]:
    """What the op of this name gives, for positions of ``[batch, tokens]`` or ``[rows, batch, tokens]``."""
    cos, sin = _cos_sin(positions, table, layout, pairing, conjugate)
    return [_rotated(x.float(), cos, sin, pairing).to(x.dtype) for x in heads]


def qk_norm_rotary(
    heads: list[torch.Tensor],
    weights: list[torch.Tensor],
    positions: torch.Tensor,
    table: torch.Tensor,
    eps: float,
    weight_offset: float,
    norm_over: str,
    layout: str,
    pairing: str,
    conjugate: bool,
) -> list[torch.Tensor]:
    """What the op of this name gives, for positions of ``[batch, tokens]`` or ``[rows, batch, tokens]``."""
    cos, sin = _cos_sin(positions, table, layout, pairing, conjugate)
    turned = []
    for x, weight in zip(heads, weights, strict=True):
        normed = _normed(x.float(), weight.float() + weight_offset, eps, norm_over, layout)
        turned.append(_rotated(normed, cos, sin, pairing).to(x.dtype))
    return turned


def _heads_dim(layout: str) -> int:
    return 1 if layout == "bhsd" else 2


def _pair_dim(pairing: str) -> int:
    """Which dimension has the two components of a pair, where the last is taken for two."""
    return -2 if pairing == "halves" else -1


def _cos_sin(
    positions: torch.Tensor, table: torch.Tensor, layout: str, pairing: str, conjugate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every component and its partner are multiplied with, scaled by the attention factor."""
    words = table if table.dim() == 1 else table[:, None]
    if table.dim() == 3:
        words, rows = words.unbind(-2)
    if positions.dim() == 3:
        # Of a token's positions, the one that turns each pair.
        positions = torch.take_along_dim(positions.permute(1, 2, 0), rows[..., :-1].abs(), dim=-1)
    else:
        positions = positions[..., None]
    # Whole turns overflow, and what is left is a signed part of one.
    phases = (positions.long() * words[..., :-1]).unsqueeze(_pair_dim(pairing))
    # The first of a pair turns by its partner's negated sine, which is the sine of the negated angle.
    signs = torch.arange(-1, 2, 2, device=phases.device).view((2, 1) if pairing == "halves" else (2,))
    angles = ((phases * (-signs if conjugate else signs)).flatten(-2).double() * ANGLE_OF_A_WORD).float()
    # Negating a table, to rotate backwards, negates row numbers and this word too; they are read as they were.
    attention_factor = words[..., -1:].abs().view(torch.float64).float()
    cos, sin = ((part * attention_factor).unsqueeze(_heads_dim(layout)) for part in (angles.cos(), angles.sin()))
    return cos, sin


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, norm_over: str, layout: str) -> torch.Tensor:
    over = [-1]
    if norm_over == "all_heads":
        over.append(_heads_dim(layout))
        weight = weight.view(-1, x.shape[-1])
        weight = weight[:, None] if layout == "bhsd" else weight
    return x * (x.square().mean(over, keepdim=True) + eps).rsqrt() * weight


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str) -> torch.Tensor:
    rotary_dim = cos.shape[-1]
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = torch.unflatten(turning, -1, (2, -1) if pairing == "halves" else (-1, 2))
    turned = turning * cos + pairs.flip(_pair_dim(pairing)).flatten(-2) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
