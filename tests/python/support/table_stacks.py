"""Lists of different tables of one size, their packed stacks, and indices into them."""

from collections.abc import Sequence

import torch
from rotary_cases import table_of

import mrrope
from mrrope.tables.frequency_table import packed_stack

METHODS = ["rope", "pi", "ntk", "yarn", "mrrope_pro"]  # with and without a default attention factor


def tables_of(methods: int | Sequence[str], rotary_dim: int) -> list[mrrope.FrequencyTable]:
    """Return a table of each method; a number stands for the first of METHODS."""
    names = METHODS[:methods] if isinstance(methods, int) else methods
    return [table_of(name, rotary_dim) for name in names]


def stack_of(tables: Sequence[mrrope.FrequencyTable], device: str | torch.device) -> torch.Tensor:
    return packed_stack(tables, torch.empty(0, device=device).device)


def index_of(values: Sequence[int], device: str | torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
