"""Reference rotation in float64 on the tensors' own device, and the errors allowed against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from rotary_reference import HEAD_AXIS, TOLERANCES

import mrrope

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class PhaseSteps:
    """Phase steps and attention factors of one table for all, or of one per sequence or packed token."""

    turns: torch.Tensor  # int64 [..., pairs]
    factor: torch.Tensor  # float64 [..., 1]

    @staticmethod
    def of(tables: Sequence[mrrope.FrequencyTable], device: str) -> PhaseSteps:
        return _steps_of(tuple(tables), device)

    @staticmethod
    def of_heads(tables: Sequence[mrrope.FrequencyTable], heads: int, device: str) -> list[PhaseSteps]:
        """Return the steps of every head table, where ``heads`` neighbouring tables are those of one sequence."""
        return [PhaseSteps.of(tables[head::heads], device) for head in range(heads)]

    def select(self, index: torch.Tensor) -> PhaseSteps:
        return PhaseSteps(self.turns[index.long()], self.factor[index.long()])

    def negated(self) -> PhaseSteps:
        """Return the steps of the conjugate rotation, as in the backward pass; the factor stays."""
        return PhaseSteps(-self.turns, self.factor)

    def after(self, first: PhaseSteps) -> PhaseSteps:
        """Return the steps of ``first`` followed by this."""
        return PhaseSteps(self.turns + first.turns, self.factor * first.factor)

    def relative_to(self, other: PhaseSteps) -> PhaseSteps:
        return PhaseSteps(self.turns - other.turns, self.factor / other.factor)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.turns.shape[-1]


# Cached on the device: a copy from the host would synchronize the GPU.
@lru_cache(maxsize=4096)
def _steps_of(tables: tuple[mrrope.FrequencyTable, ...], device: str) -> PhaseSteps:
    turns = torch.stack([table.turns for table in tables]).to(device)
    factors = torch.tensor([[table.attention_factor] for table in tables], dtype=torch.float64, device=device)
    return PhaseSteps(turns, factors)


@lru_cache
def _quarter_turns(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128, device=device)


def rotations(
    positions: torch.Tensor, steps: PhaseSteps, layout: str, row_of_pair: torch.Tensor | None
) -> torch.Tensor:
    """Return the complex factor of every pair, with a dimension for the heads; phases wrap in 64-bit integers."""
    turns, factor = steps.turns, steps.factor
    if layout != "thd":  # one table per sequence: the same for all its tokens
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
    # Quarter revolutions are exact; the remaining angle is at most an eighth of a revolution.
    unit = torch.polar(torch.ones_like(rest), rest)
    return (unit * _quarter_turns(rest.device)[quarter & 3] * factor).unsqueeze(HEAD_AXIS[layout])


def pairs_of(x: torch.Tensor, pairing: str) -> torch.Tensor:
    """Return the pairs of the last dimension as complex numbers."""
    if pairing == "halves":
        return torch.complex(*x.chunk(2, dim=-1))
    return torch.complex(x[..., 0::2], x[..., 1::2])


def components_of(pairs: torch.Tensor, pairing: str) -> torch.Tensor:
    """Return the components of complex pairs: the inverse of :func:`pairs_of`."""
    if pairing == "halves":
        return torch.cat([pairs.real, pairs.imag], dim=-1)
    return torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)


def rotated(x: torch.Tensor, by: torch.Tensor, pairing: str) -> torch.Tensor:
    """Return x rotated, in float64; components past the pairs are copied."""
    dim = 2 * by.shape[-1]
    x = x.double()
    return torch.cat([components_of(pairs_of(x[..., :dim], pairing) * by, pairing), x[..., dim:]], dim=-1)


def of_every_head(of_tables: Sequence[torch.Tensor], x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the factors of every head of x from those of every head table: neighbouring heads share one."""
    axis = HEAD_AXIS[layout]
    return torch.cat(list(of_tables), dim=axis).repeat_interleave(x.shape[axis] // len(of_tables), dim=axis)


def times_query_factors(
    by: torch.Tensor, query_factors: torch.Tensor, index: torch.Tensor | None, layout: str
) -> torch.Tensor:
    """Return the factors of every pair of every head of q times those of the heads, ``[tables, heads]``."""
    of_heads = query_factors.to(by.device)[..., None]
    if index is not None:
        of_heads = of_heads[index.long()]
    if layout != "thd":
        of_heads = of_heads.unsqueeze(2 if layout == "bhsd" else 1)
    return by * of_heads


def pair_norms(x: torch.Tensor, rotary_dim: int, pairing: str) -> torch.Tensor:
    """Return the norm of every component's pair; the magnitude of components without a pair."""
    norms = pairs_of(x[..., :rotary_dim], pairing).abs()
    return torch.cat([components_of(torch.complex(norms, norms), pairing), x[..., rotary_dim:].abs()], dim=-1)


def smallest_subnormal(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a dtype."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def allowed_error(
    expected: torch.Tensor, dtype: torch.dtype, rotary_dim: int, pairing: str, more_arithmetic: float = 0.0
) -> torch.Tensor:
    """Return the error allowed in a rotation: arithmetic and one rounding; zero for copied components."""
    tolerance = TOLERANCES[dtype]
    norms = pair_norms(expected, rotary_dim, pairing)
    if not more_arithmetic:
        norms[..., rotary_dim:] = 0.0
    allowed = (
        (tolerance.arithmetic + more_arithmetic) * norms
        + tolerance.rounding * expected.abs()
        + smallest_subnormal(dtype)
    )
    if not more_arithmetic:
        allowed[..., rotary_dim:] = 0.0
    return allowed


def exceeds(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float) -> torch.Tensor:
    """Return, as a bool on the device, whether any error exceeds the allowed one; NaN does where none is expected.

    An infinity is right where what is expected, with its error, may lie beyond the largest number of the dtype.
    """
    largest = torch.finfo(actual.dtype).max
    actual = actual.double()
    is_near = (actual - expected).abs() <= allowed
    is_near |= actual.isinf() & (expected * actual.sign() + allowed > largest)
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    return ~torch.where(expected.isfinite(), is_near, is_same).all()


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def any_bit_differs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return, as a bool on the device, whether any bit differs."""
    return (as_integers(x) != as_integers(y)).any()


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest)


def half_ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return at least half of the distance between x's neighbours in a dtype."""
    return (x.abs() * torch.finfo(dtype).eps / 2).clamp(min=smallest_subnormal(dtype) / 2)


def nearest_float8(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    return saturated(x.float() / scale, dtype).to(dtype)
