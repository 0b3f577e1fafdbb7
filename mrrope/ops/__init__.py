"""The ops of ``torch.ops.mrrope``, one module per op.

Importing this package loads the library that registers the ops. The argument checks that several ops share are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mrrope._core as _core
from mrrope.tables.axis_tables import AxisTables
from mrrope.tables.frequency_table import FrequencyTable, OpTable, packed_stack, require_op_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.query_factors import has_query_factors
from mrrope.torch_library import PACKAGE, library_for, minor_of

Tables = FrequencyTable | HeadTables | AxisTables | Sequence[FrequencyTable | HeadTables] | Sequence[AxisTables]
"""One table for all sequences, or several."""

HEADS_DIM = {"bhsd": 1, "bshd": 2, "thd": 1}
"""The dimension of the heads of q and k in every layout."""


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
    q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor, table: Tables, layout: str
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return heads, positions and packed table in the form of the ops' schemas.

    Raises:
        TypeError: An argument is not a tensor or a table.
        ValueError: q has another number of heads than ``table`` has query factors, or tokens have several positions
            with these.
    """
    # The check that names the argument runs only where one is wrong: it would add 1 us to every call.
    if not (isinstance(q, torch.Tensor) and isinstance(positions, torch.Tensor)):
        require_tensors(q=q, positions=positions)
    if k is not None and not isinstance(k, torch.Tensor):
        require_tensors_or_none(k=k)
    packed = packed_table(table, q.device)
    if packed.dim() == 4 and has_query_factors(packed):  # dim first: it is all that one table needs
        dim = HEADS_DIM.get(layout)
        check_factors(None if dim is None or q.dim() <= dim else q.shape[dim], positions, table)
    return [q] if k is None else [q, k], positions, packed


def check_factors(heads: int | None, positions: torch.Tensor, table: Tables) -> None:
    """Raise ValueError where q, or its positions, are not those of a table with query factors.

    The ops see how many factors there are only in memory that the host can read.

    Args:
        heads: the number of heads of q; None where q has no such dimension, which the ops refuse.
        positions: the op's.
        table: with query factors.
    """
    tables: Sequence[OpTable] = [table] if isinstance(table, OpTable) else table
    expected = next(one.query_heads for one in tables if one.query_heads is not None)
    if heads not in (None, expected):
        raise ValueError(f"q must have {expected} heads, one for each of table's query_factors, got {heads}")
    # Packed query factors follow rows of positions, here all 0, which would ignore all positions but the first.
    if positions.dim() > 2:
        raise ValueError(
            f"positions must be one a token with table's query_factors, [batch, tokens] or [tokens], got "
            f"{list(positions.shape)}"
        )


def table_without_factors(table: Tables, device: torch.device) -> torch.Tensor:
    """Return the packed table for an op whose heads share one key; raise ValueError where it has query factors."""
    packed = packed_table(table, device)
    if has_query_factors(packed):
        raise ValueError(f"table must be one for all heads, without query_factors, got {table!r}")
    return packed


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
