"""Curves of a frequency table: how alike near and far positions look, and what number its phases spell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from mrrope.tables import FrequencyTable

BLOCK = 8192
FLAT = 1e-9
"""Factors that differ by less, relatively, are equal."""


def middle_pairs(table: FrequencyTable) -> slice:
    """The pairs whose radix factors the methods differ in: from ``d_l`` on, below ``d_h``."""
    if table.bounds is None:
        raise ValueError(f"table must have bounds, and {table.method} has none")
    return slice(*table.bounds)


def similarity(inv_freq: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """B(m), the sum of cos(m theta_i) over the pairs: how much more a query attends to a token like itself than to a
    random one, when both are m tokens away. The papers take a context to be usable as far as it stays positive.
    """
    return torch.cos(distances.double()[:, None] * inv_freq.double()).sum(dim=-1)


def similarities_up_to(inv_freq: torch.Tensor, limit: int) -> torch.Tensor:
    """B(1), B(2) and so on, to the limit."""
    blocks = torch.split(torch.arange(1, limit + 1), BLOCK)
    return torch.cat([similarity(inv_freq, distances) for distances in blocks])


def first_zero(similarities: torch.Tensor) -> int | None:
    """The first distance where B(m) is not positive, of B(1), B(2) and so on; None where all are."""
    below = torch.nonzero(similarities <= 0)
    return int(below[0, 0]) + 1 if len(below) else None


def lowest_between(similarities: torch.Tensor, edges: Sequence[int]) -> list[float]:
    """The lowest of B(1), B(2) and so on from each distance to the next: where B dips to zero, this shows it."""
    return [similarities[start - 1 : end - 1].min().item() for start, end in pairwise(edges)]


def spelled_number(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """m-hat: the phases m theta_j mod 2 pi taken for the digits of a number, each times the weight of its place.

    The weight of a place is 1 / theta_j, which is beta^(j-1) in plain RoPE with beta = base^(2/rotary_dim). A digit
    times its weight is m modulo the pair's wavelength, so that m itself comes out of every pair that has not yet
    turned once.
    """
    frequencies = inv_freq.double()
    phases = torch.remainder(positions.double()[:, None] * frequencies, 2 * torch.pi)
    return (phases / frequencies).sum(dim=-1)


def trend(radix_factors: torch.Tensor) -> str:
    """Whether radix factors grow from pair to pair, shrink, stay as they are, or none of these."""
    ratios = radix_factors[1:] / radix_factors[:-1] - 1
    if bool((ratios.abs() < FLAT).all()):
        return "uniform"
    if bool((ratios > FLAT).all()):
        return "progressive"
    return "regressive" if bool((ratios < -FLAT).all()) else "mixed"
