"""Rotations in float64 on the tensors' own device, and by how much a result may differ from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from reference import HEAD_AXIS, TOLERANCES

import mrrope

FLOAT8 = torch.float8_e4m3fn
SMALLEST_FLOAT8 = 2.0**-9


@dataclass(frozen=True)
class Steps:
    """Phase steps and factors of one table, or of several: of each sequence, or of each packed token."""

    turns: torch.Tensor  # int64 [..., pairs]
    factor: torch.Tensor  # float64 [..., 1]

    @staticmethod
    def of(tables: Sequence[mrrope.FrequencyTable], device: str) -> Steps:
        return _steps_of(tuple(tables), device)

    def picked(self, index: torch.Tensor) -> Steps:
        return Steps(self.turns[index.long()], self.factor[index.long()])

    def backwards(self) -> Steps:
        """By the negated angle, as a gradient turns: the factor stays."""
        return Steps(-self.turns, self.factor)

    def after(self, first: Steps) -> Steps:
        """First the one, then this."""
        return Steps(self.turns + first.turns, self.factor * first.factor)

    def relative_to(self, other: Steps) -> Steps:
        return Steps(self.turns - other.turns, self.factor / other.factor)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.turns.shape[-1]


# Kept on the device: copies from the host would make a GPU wait.
@lru_cache(maxsize=4096)
def _steps_of(tables: tuple[mrrope.FrequencyTable, ...], device: str) -> Steps:
    turns = torch.stack([table.turns for table in tables]).to(device)
    factors = torch.tensor([[table.attention_factor] for table in tables], dtype=torch.float64, device=device)
    return Steps(turns, factors)


@lru_cache
def _quarter_turns(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128, device=device)


def rotations(positions: torch.Tensor, steps: Steps, layout: str, row_of_pair: torch.Tensor | None) -> torch.Tensor:
    """What every pair is multiplied by, complex, with a dimension for the heads. Phases wrap in 64-bit integers."""
    turns, factor = steps.turns, steps.factor
    if layout != "thd":  # a table of each sequence is one of all its tokens
        turns, factor = turns[:, None], factor[:, None]
    positions = positions.long()
    if row_of_pair is not None and positions.dim() == 3:
        rows, at = row_of_pair[:, None], positions.permute(1, 2, 0)
        batch = len(rows) if len(at) == 1 else len(at)
        at = at.expand(batch, -1, -1).gather(-1, rows.expand(batch, at.shape[1], -1))
    else:
        at = (positions[None] if positions.dim() == 1 and layout != "thd" else positions)[..., None]
    phase = at * turns
    quarter = (phase + 2**61) >> 62
    rest = (phase - (quarter << 62)).double() * (math.pi / 2**63)
    # Quarter turns are exact; what is left has an angle of at most an eighth.
    unit = torch.polar(torch.ones_like(rest), rest)
    return (unit * _quarter_turns(rest.device)[quarter & 3] * factor).unsqueeze(HEAD_AXIS[layout])


def pairs_of(x: torch.Tensor, pairing: str) -> torch.Tensor:
    """The pairs of the last dimension as complex numbers."""
    if pairing == "halves":
        return torch.complex(*x.chunk(2, dim=-1))
    return torch.complex(x[..., 0::2], x[..., 1::2])


def components_of(pairs: torch.Tensor, pairing: str) -> torch.Tensor:
    """The inverse of pairs_of."""
    if pairing == "halves":
        return torch.cat([pairs.real, pairs.imag], dim=-1)
    return torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)


def rotated(x: torch.Tensor, by: torch.Tensor, pairing: str) -> torch.Tensor:
    """x, of any dtype, rotated in float64; components past the pairs are copied."""
    dim = 2 * by.shape[-1]
    x = x.double()
    return torch.cat([components_of(pairs_of(x[..., :dim], pairing) * by, pairing), x[..., dim:]], dim=-1)


def pair_norms(x: torch.Tensor, rotary_dim: int, pairing: str) -> torch.Tensor:
    """The norm of every component's pair; of those that have none, their size."""
    norms = pairs_of(x[..., :rotary_dim], pairing).abs()
    return torch.cat([components_of(torch.complex(norms, norms), pairing), x[..., rotary_dim:].abs()], dim=-1)


def smallest(dtype: torch.dtype) -> float:
    """The least that a dtype can differ by."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def allowed_error(
    expected: torch.Tensor, dtype: torch.dtype, rotary_dim: int, pairing: str, more_arithmetic: float = 0.0
) -> torch.Tensor:
    """What a rotation to this dtype may be off by: its arithmetic and one rounding; nothing, of what is copied."""
    tolerance = TOLERANCES[dtype]
    norms = pair_norms(expected, rotary_dim, pairing)
    if not more_arithmetic:
        norms[..., rotary_dim:] = 0.0
    allowed = (tolerance.arithmetic + more_arithmetic) * norms + tolerance.rounding * expected.abs() + smallest(dtype)
    if not more_arithmetic:
        allowed[..., rotary_dim:] = 0.0
    return allowed


def is_off(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float) -> torch.Tensor:
    """Whether any component differs by more than is allowed, one bool on the device; NaNs do."""
    return ~((actual.double() - expected).abs() <= allowed).all()


def bits(x: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, one bool on the device."""
    return (bits(x) != bits(y)).any()


def nearest_float8(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FLOAT8)
