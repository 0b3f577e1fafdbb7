"""Numbers that users give: conversions whose errors name the argument."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat, SupportsIndex

import torch


def integer(argument: str, value: SupportsIndex, bits: int = 31) -> int:
    """Return an integer of so many bits and a sign; raise TypeError or ValueError that names ``argument``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an integer, got {value!r}") from None
    if not -(2**bits) <= number < 2**bits:
        raise ValueError(f"{argument} must be below 2^{bits}, got {number}")
    return number


def real(argument: str, value: SupportsFloat) -> float:
    """Return a float; raise TypeError or ValueError that names ``argument``."""
    if isinstance(value, str | bool):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{argument} must be a number, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{argument} must be within the range of a float, got an integer far beyond") from None


def list_of(convert: Callable[[str, Any], Any], argument: str, values: Iterable[Any]) -> list[Any]:
    """Return the converted items of a sequence or a tensor; raise TypeError that names ``argument``."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{argument} must be a sequence of numbers, got {values!r}") from None
    return [convert(argument, value) for value in items]


def integers(argument: str, values: Iterable[SupportsIndex]) -> list[int]:
    """Return a list of integers; raise TypeError or ValueError that names ``argument``."""
    return list_of(integer, argument, values)
