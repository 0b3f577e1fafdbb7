"""Lists of different tables of one size, and their packed stacks."""

import torch
from cases import table_of

import mrrope
from mrrope.tables import packed_stack

METHODS = ["rope", "pi", "ntk", "yarn", "mrrope_pro"]  # with and without a default attention factor


def tables_of(count: int, rotary_dim: int) -> list[mrrope.FrequencyTable]:
    return [table_of(method, rotary_dim) for method in METHODS[:count]]


def stack_of(tables: list[mrrope.FrequencyTable], device: str) -> torch.Tensor:
    return packed_stack(tables, torch.empty(0, device=device).device)
