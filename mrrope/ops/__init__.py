"""The ops of ``torch.ops.mrrope``, one module per op.

Importing this package loads the library that registers the ops. The argument checks that several ops share are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mrrope._core as _core
from mrrope.tables.axis_tables import AxisTables
from mrrope.tables.frequency_table import FrequencyTable, packed_stack, require_op_table
from mrrope.tables.head_tables import HeadTables
from mrrope.torch_library import PACKAGE, library_for, minor_of

Tables = FrequencyTable | HeadTables | AxisTables | Sequence[FrequencyTable | HeadTables] | Sequence[AxisTables]
"""One table for all sequences, or several."""


def _load() -> None:
    """Load the library that registers the ops with the running torch; the error names the versions that there are."""
    built = _core.build_info()["torch"]
    report = f"`python {PACKAGE / 'environment'}` reports what to fix"
    if minor_of(torch.__version__) not in built:
        raise ImportError(
            f"mrrope's ops are built for torch {', '.join(built)}, and torch {torch.__version__} runs: install one of "
            f"these versions, or build mrrope from source against the one that runs. {report}"
        )
    try:
        torch.ops.load_library(library_for(torch.__version__))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"mrrope's ops for torch {minor_of(torch.__version__)} do not load with torch {torch.__version__}. "
            f"{report} ({error.__cause__ or error})"
        ) from error


_load()


def require_tensors(**arguments: object) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def require_tensors_or_none(**arguments: object) -> None:
    """Raise TypeError for the first argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(value).__name__}")


def checked_heads(
    q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor, table: Tables
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return heads, positions and packed table in the form of the ops' schemas.

    Raises:
        TypeError: An argument is not a tensor or a table.
    """
    # The check that names the argument runs only where one is wrong: it would add 1 us to every call.
    if not (isinstance(q, torch.Tensor) and isinstance(positions, torch.Tensor)):
        require_tensors(q=q, positions=positions)
    if k is not None and not isinstance(k, torch.Tensor):
        require_tensors_or_none(k=k)
    return [q] if k is None else [q, k], positions, packed_table(table, q.device)


def packed_table(table: Tables, device: torch.device) -> torch.Tensor:
    """Return the int64 tensor on ``device`` that the ops take for one table or several."""
    if isinstance(table, (list, tuple)):
        return packed_stack(table, device)
    return require_op_table("table", table).packed(device)


def checked_index(table_index: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``table_index``; raise TypeError where it is neither a tensor nor None."""
    if table_index is not None:
        require_tensors_or_none(table_index=table_index)
    return table_index
