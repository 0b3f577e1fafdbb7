"""Probe which position and which frequency rotate each pair, in models with several positions per token (M-RoPE).

A rotary embedding with rows of positions computes the angles of every row, and its ``recomposition_frequencies``
selects one for each component. The probe runs it on row numbers, and on the numbers of the frequencies, in place of
angles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROW_COUNTS = (2, 3, 4)


@dataclass(frozen=True)
class PairSources:
    """The row of positions and the frequency of each pair, ``[pairs]``."""

    row: torch.Tensor
    row_of_second_component: torch.Tensor
    frequency: torch.Tensor

    @property
    def rows(self) -> int:
        """The number of rows of positions."""
        return int(torch.maximum(self.row, self.row_of_second_component).max()) + 1

    @property
    def are_rotations(self) -> bool:
        """Whether both components of every pair rotate by the same angle. HunYuan-VL's do not."""
        return torch.equal(self.row, self.row_of_second_component)


def pair_sources(module: nn.Module, layer_type: str | None, pairs: int) -> PairSources | None:
    """Return what rotates each pair, or None where tokens have one position.

    Raises:
        ValueError: The rotary embedding does not run.
    """
    compose: Callable[..., torch.Tensor] | None = getattr(module, "recomposition_frequencies", None)
    if compose is None:
        return None
    extra = [layer_type] if "layer_type" in inspect.signature(compose).parameters else []
    device = next(module.buffers()).device

    def composed(numbers: torch.Tensor, rows: int) -> torch.Tensor:
        angles = numbers.float().expand(rows, 1, 1, pairs).contiguous().to(device)
        return compose(angles, *extra).flatten().long().cpu()

    failures: list[Exception] = []
    for rows in ROW_COUNTS:
        try:
            row = composed(torch.arange(rows, device="cpu").view(rows, 1, 1, 1), rows)
            frequency = composed(torch.arange(pairs, device="cpu"), rows)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            failures.append(error)
            continue
        if len(set(row.tolist())) == rows:
            first, second = _components(frequency, pairs)
            return PairSources(row[first], row[second], frequency[first])
    if len(failures) == len(ROW_COUNTS):
        config: Any = module.config
        raise ValueError(
            f"model must have a rotary embedding that runs, and {type(module).__name__} with rope_parameters "
            f"{config.rope_parameters} does not: {failures[-1]}"
        )
    return None


def _components(frequency: torch.Tensor, pairs: int) -> tuple[slice, slice]:
    """Return where the first and the second component of all pairs are, given the frequency of each component."""
    if frequency.numel() == pairs:
        return slice(None), slice(None)
    is_halves = torch.equal(frequency[:pairs], frequency[pairs:])
    return (slice(pairs), slice(pairs, None)) if is_halves else (slice(0, None, 2), slice(1, None, 2))
