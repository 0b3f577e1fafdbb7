"""Random tables for learnable_rotary, and the tolerance of what it rotates."""

import torch
from learnable_rotary_reference import pair_norms
from rotary_cases import Case
from rotary_reference import TOLERANCES


def table_of(case: Case, tables: int, dtype=torch.float64, factors: int | None = None) -> list[torch.Tensor]:
    """Return random frequencies [tables, pairs] and attention factors on the CPU."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    exponents = torch.rand(tables, case.rotary_dim // 2, generator=generator, dtype=torch.float64)
    factor = 0.5 + torch.rand(factors or tables, generator=generator, dtype=torch.float64)
    return [(1e-5**exponents).to(dtype), factor.to(dtype)]


def with_tables(case: Case, tables: int) -> Case:
    """Return the case with ``tables`` times the heads."""
    q, k = case.heads
    return case.with_changes(heads=(q * tables, None if k is None else k * tables))


def leaves_of(case: Case, tables: int, device: str, table_dtype=torch.float64) -> list[torch.Tensor]:
    """Return q, k, frequencies and attention factors that require grad."""
    tensors = [*case.heads_on(device), *(x.to(device) for x in table_of(case, tables, table_dtype))]
    return [x.detach().requires_grad_() for x in tensors]


def options_of(case: Case) -> dict:
    return {"layout": case.layout, "pairing": case.pairing}


def assert_close_to_rotation(actual, expected, pairs: int, case: Case) -> None:
    """Assert one rounding of the float64 result, plus an arithmetic error relative to the pair's norm."""
    assert (actual.shape, actual.dtype) == (expected.shape, case.dtype)
    tolerance = TOLERANCES[case.dtype]
    expected, actual = expected.detach(), actual.detach().cpu().double()
    assert torch.equal(actual[..., 2 * pairs :], expected[..., 2 * pairs :]), "the tail is not a copy"
    norms = pair_norms(expected, pairs, case.layout, case.pairing)
    norms = norms.transpose(1, 2) if case.layout == "bhsd" else norms
    norms = torch.cat([norms, norms], -1) if case.pairing == "halves" else norms.repeat_interleave(2, -1)
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    rotating = expected[..., : 2 * pairs]
    allowed = tolerance.arithmetic * norms + tolerance.rounding * rotating.abs() + smallest
    excess = (actual[..., : 2 * pairs] - rotating).abs() - allowed
    assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"
