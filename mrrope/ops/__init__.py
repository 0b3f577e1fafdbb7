"""The ops of ``torch.ops.mrrope``, one module each.

Importing this package loads the library that registers them. The argument checks that all ops share are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mrrope.tables import FrequencyTable, _require_table, packed_stack

torch.ops.load_library(Path(__file__).parents[1] / "libmrrope_torch.so")  # type: ignore[no-untyped-call]


def checked_heads(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return heads, positions and packed table as the ops take them.

    Raises:
        TypeError: naming the argument that is not a tensor or a table.
    """
    for name, value in (("q", q), ("positions", positions)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if k is not None and not isinstance(k, torch.Tensor):
        raise TypeError(f"k must be a tensor or None, got {type(k).__name__}")
    return [q] if k is None else [q, k], positions, packed_table(table, q.device)


def packed_table(table: FrequencyTable | Sequence[FrequencyTable], device: torch.device) -> torch.Tensor:
    """What the ops take for a table, or for several."""
    if isinstance(table, (list, tuple)):
        return packed_stack(table, device)
    return _require_table("table", table).packed(device)


def checked_index(table_index: object) -> torch.Tensor | None:
    """Return ``table_index``; raise TypeError where it is neither a tensor nor None."""
    if table_index is not None and not isinstance(table_index, torch.Tensor):
        raise TypeError(f"table_index must be a tensor or None, got {type(table_index).__name__}")
    return table_index
