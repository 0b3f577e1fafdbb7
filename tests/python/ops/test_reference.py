"""The reference rotation against 60-digit arithmetic."""

import mpmath
import pytest
import torch
from rotary_cases import PAIRINGS, table_of
from rotary_reference import components_of, pairs_of, plain_rotary, rotated, unit_rotations


@pytest.mark.parametrize("position", [0, 1, -1, 4095, 16777215, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_unit_rotations(position):
    turns = table_of("mrrope_pro", 64).turns
    by = unit_rotations(torch.tensor([position]), turns)[0]
    with mpmath.workdps(60):
        for actual, turn in zip(by.tolist(), turns.tolist(), strict=True):
            assert abs(actual - mpmath.expjpi(mpmath.mpf(2 * position * turn) / 2**64)) < 3e-16


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_pairs_and_components_are_inverse(pairing):
    x = torch.arange(12.0).numpy()
    assert (components_of(pairs_of(x, pairing), pairing) == x).all()
    partner = {"halves": 6, "interleaved": 1}[pairing]
    assert pairs_of(x, pairing)[0] == 0 + 1j * partner


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_plain_rotary_is_the_same_rotation(pairing):
    table, positions = table_of("yarn", 8), torch.tensor([3, -7, 2**40])
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = rotated(x, positions, table, "bhsd", pairing)
    torch.testing.assert_close(plain_rotary(x, positions, table, pairing), expected, rtol=0, atol=1e-14)
