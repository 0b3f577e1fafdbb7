"""Reference rotation in float64 numpy, independent of the package's arithmetic, and the tolerances of each dtype."""

from dataclasses import dataclass

import numpy as np
import torch

QUARTER_TURNS = np.array([1, 1j, -1, -1j])
HEAD_AXIS = {"bhsd": -3, "bshd": -2, "thd": -2}


@dataclass(frozen=True)
class Tolerance:
    """Allowed errors: arithmetic, relative to the pair's norm; rounding of the result; relative Frobenius norm."""

    arithmetic: float
    rounding: float
    frobenius: float


# A 16-bit result is rounded once, by at most eps / 2. The Frobenius bound averages over the mantissas of many
# components, so it holds for large random tensors only. GPUs take cos/sin of 16-bit heads from their special function
# units, whose absolute error is below 1e-6.
TOLERANCES = {
    torch.float64: Tolerance(1e-15, 0.0, 1e-15),
    torch.float32: Tolerance(5e-7, 0.0, 5e-7),
    torch.float16: Tolerance(1e-6, 2.0**-11, 2.2e-4),
    torch.bfloat16: Tolerance(1e-6, 2.0**-8, 1.75e-3),
}


def unit_rotations(positions: torch.Tensor, turns: torch.Tensor) -> np.ndarray:
    """Return exp(i * position * theta) of every position and pair; phases wrap exactly in 64-bit integers."""
    phase = positions.cpu().long().numpy().view(np.uint64)[..., None] * turns.numpy().view(np.uint64)
    quarter = (phase + np.uint64(2**61)) >> np.uint64(62)
    rest = (phase - (quarter << np.uint64(62))).view(np.int64)
    return np.exp(1j * (rest * (np.pi / 2**63))) * QUARTER_TURNS[quarter & np.uint64(3)]


def pairs_of(x: np.ndarray, pairing: str) -> np.ndarray:
    """Return the pairs of the last dimension as complex numbers."""
    half = x.shape[-1] // 2
    if pairing == "halves":
        return x[..., :half] + 1j * x[..., half:]
    return x[..., 0::2] + 1j * x[..., 1::2]


def components_of(pairs: np.ndarray, pairing: str) -> np.ndarray:
    """Return the components of complex pairs: the inverse of :func:`pairs_of`."""
    if pairing == "halves":
        return np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def pair_norms(x: torch.Tensor, rotary_dim: int, pairing: str) -> torch.Tensor:
    """Return for every component the norm of its pair; in the tail, its magnitude."""
    norms = np.abs(pairs_of(x[..., :rotary_dim].numpy(), pairing))
    norms = torch.from_numpy(components_of(norms + 1j * norms, pairing))
    return torch.cat([norms, x[..., rotary_dim:].abs()], dim=-1)


def rotated_by(x, by: np.ndarray, layout="bhsd", pairing="halves") -> torch.Tensor:
    """Return q or k with its pairs multiplied by complex numbers, [..., tokens, pairs], in float64."""
    whole, dim = x.detach().cpu().double().numpy(), 2 * by.shape[-1]
    pairs = pairs_of(whole[..., :dim], pairing) * np.expand_dims(by, HEAD_AXIS[layout])
    return torch.from_numpy(np.concatenate([components_of(pairs, pairing), whole[..., dim:]], axis=-1))


def rotations(positions, table, conjugate=False) -> np.ndarray:
    """Return what a table multiplies every pair by, as complex numbers."""
    by = unit_rotations(positions, table.turns) * table.attention_factor
    return by.conj() if conjugate else by


def rotated(x, positions, table, layout="bhsd", pairing="halves", conjugate=False) -> torch.Tensor:
    """Return q or k rotated, in float64."""
    return rotated_by(x, rotations(positions, table, conjugate), layout, pairing)


def plain_rotary(x, positions, table, pairing="halves"):
    """Rotate [..., tokens, rotary_dim] in differentiable PyTorch."""
    by = torch.from_numpy(unit_rotations(positions, table.turns) * table.attention_factor)
    cos, sin = by.real.to(x), by.imag.to(x)
    if pairing == "halves":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def assert_rotated(actual, x, positions, table, layout="bhsd", pairing="halves", conjugate=False) -> None:
    """Assert that ``actual`` is x rotated: pairs within the dtype's tolerance, the tail bit for bit."""
    assert_rotated_by(actual, x, rotations(positions, table, conjugate), layout, pairing)


def assert_rotated_by(actual, x, by: np.ndarray, layout="bhsd", pairing="halves") -> None:
    """Assert that ``actual`` is x with its pairs multiplied by complex numbers, and the tail bit for bit."""
    assert (actual.shape, actual.dtype, actual.device) == (x.shape, x.dtype, x.device)
    tolerance = TOLERANCES[x.dtype]
    expected, dim = rotated_by(x, by, layout, pairing), 2 * by.shape[-1]
    actual = actual.detach().cpu().double()
    assert torch.equal(actual[..., dim:], expected[..., dim:]), "the tail is not a copy"

    actual, expected = actual[..., :dim], expected[..., :dim]
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    allowed = tolerance.arithmetic * pair_norms(expected, dim, pairing) + tolerance.rounding * expected.abs() + smallest
    excess = (actual - expected).abs() - allowed
    assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"
