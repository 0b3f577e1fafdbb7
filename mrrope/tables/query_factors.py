"""Factors of query heads: their checks, and the rows that hold them in packed head tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mrrope.tables.numbers import list_of, real

FACTOR_ROW = 2
"""The row of packed head tables with which the factors begin: row 0 has the words, row 1 the rows of positions."""


def checked_query_factors(argument: str, values: Iterable[float], tables: int) -> tuple[float, ...]:
    """Return the factors of all query heads; errors name ``argument``.

    Raises:
        TypeError: ``values`` are not numbers.
        ValueError: a factor is not positive or outside float32's range, or their number is no multiple of ``tables``.
    """
    items = list_of(lambda _, value: value, argument, values)
    factors = tuple(real(f"{argument}[{i}]", value) for i, value in enumerate(items))
    if not factors or len(factors) % tables:
        raise ValueError(
            f"{argument} must hold a factor per query head, a multiple of the {tables} tables, got {len(factors)}"
        )
    float32 = torch.finfo(torch.float32)
    for i, factor in enumerate(factors):
        # As attention factors: in float32 others are 0, infinity or subnormal. Comparisons with nan are false.
        if not float32.smallest_normal <= factor <= float32.max:
            raise ValueError(f"{argument}[{i}] must be a positive finite number in float32's range, got {factor:.15g}")
    return factors


def require_one_number(argument: str, found: int | None, expected: int | None) -> int | None:
    """Return the number of query heads of tables that are used together; those without factors have none.

    Raises:
        ValueError: the numbers differ; the message names ``argument``.
    """
    if found is not None and expected is not None and found != expected:
        raise ValueError(
            f"{argument} must hold query_factors for {expected} query heads, as those before it do, got {found}"
        )
    return expected if found is None else found


def require_multiple(argument: str, query_heads: int | None, key_heads: int | None) -> None:
    """Raise ValueError where query heads cannot be divided among key heads; the message names ``argument``."""
    if query_heads is not None and key_heads is not None and query_heads % key_heads:
        raise ValueError(
            f"{argument} must hold query_factors for a multiple of {key_heads} key heads, got {query_heads}"
        )


def are_alike(mine: tuple[float, ...] | None, others: tuple[float, ...] | None) -> bool:
    """Whether queries are scaled alike; no factors are like factors of 1."""
    if mine is None or others is None:
        return set(mine or others or ()) <= {1.0}
    return mine == others


def bits_of_factors(factors: Sequence[float]) -> torch.Tensor:
    """Return factors as the bits of float64, int64 on the CPU."""
    return torch.tensor(factors, dtype=torch.float64, device="cpu").view(torch.int64)


def factor_rows(bits: torch.Tensor, tables: int, words: int) -> torch.Tensor:
    """Return int64 ``[rows, tables, words]`` that hold the bits of factors one after another, and zeros after them."""
    rows = -(-bits.shape[0] // (tables * words))
    padded = torch.nn.functional.pad(bits, (0, rows * tables * words - bits.shape[0]))
    return padded.view(rows, tables, words)


def factors_in(packed: torch.Tensor, query_heads: int) -> torch.Tensor:
    """Return the bits of the factors in packed head tables ``[count, rows, tables, words]``: ``[count, query heads]``.

    Those of a negated table are negative; ``abs`` restores them.
    """
    return packed[:, FACTOR_ROW:].flatten(1)[:, :query_heads]


def has_query_factors(packed: torch.Tensor) -> bool:
    """Whether a packed table, of any form that the ops take, holds factors of query heads."""
    return packed.dim() == 4 and packed.size(1) > FACTOR_ROW
