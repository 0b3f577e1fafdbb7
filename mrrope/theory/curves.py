"""Curves of a frequency table: the similarity B(m) over distance, and m-hat, the number that its phases spell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from mrrope.tables.frequency_table import FrequencyTable

BLOCK = 8192
FLAT = 1e-9
"""Relative tolerance for equal radix factors."""


def middle_pairs(table: FrequencyTable) -> slice:
    """The pairs from ``d_l`` up to, not including, ``d_h``, whose radix factors differ between methods."""
    if table.bounds is None:
        raise ValueError(f"table must have bounds, and {table.method} has none")
    return slice(*table.bounds)


def similarity(inv_freq: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """B(m), the sum of cos(m theta_i) over the pairs.

    It measures how much more a query attends to a similar token than to a random one, both m tokens away. The papers
    take a context to be usable while B(m) stays positive.
    """
    return torch.cos(distances.double()[:, None] * inv_freq.double()).sum(dim=-1)


def similarities_up_to(inv_freq: torch.Tensor, limit: int) -> torch.Tensor:
    """B(1), ..., B(limit)."""
    blocks = torch.split(torch.arange(1, limit + 1), BLOCK)
    return torch.cat([similarity(inv_freq, distances) for distances in blocks])


def first_zero(similarities: torch.Tensor) -> int | None:
    """The first distance m with B(m) <= 0, given B(1), B(2), ...; None if there is none."""
    below = torch.nonzero(similarities <= 0)
    return int(below[0, 0]) + 1 if len(below) else None


def lowest_between(similarities: torch.Tensor, edges: Sequence[int]) -> list[float]:
    """The minimum of B over each bin of distances, which shows where B dips to zero."""
    return [similarities[start - 1 : end - 1].min().item() for start, end in pairwise(edges)]


def spelled_number(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """m-hat: the phases m theta_j mod 2 pi as the digits of a number, weighted by place value.

    The place value is 1 / theta_j, which is beta^(j-1) in plain RoPE with beta = base^(2/rotary_dim). A digit times
    its place value is m modulo the pair's wavelength: m itself for every pair within its first period.
    """
    frequencies = inv_freq.double()
    phases = torch.remainder(positions.double()[:, None] * frequencies, 2 * torch.pi)
    return (phases / frequencies).sum(dim=-1)


def trend(radix_factors: torch.Tensor) -> str:
    """Whether radix factors increase from pair to pair, decrease, are equal, or none of these."""
    ratios = radix_factors[1:] / radix_factors[:-1] - 1
    if bool((ratios.abs() < FLAT).all()):
        return "uniform"
    if bool((ratios > FLAT).all()):
        return "progressive"
    return "regressive" if bool((ratios < -FLAT).all()) else "mixed"
