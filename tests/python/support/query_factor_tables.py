"""Head tables with query factors: one for every key head, or one for all."""

import pytest
import torch
from layer_tables import random_factors, random_heads, random_table

from mrrope import HeadTables

CPU = torch.device("cpu")
FACTORS = random_factors(6)


def of_three(factors=FACTORS, seed: int = 0) -> HeadTables:
    return HeadTables(random_heads(3, seed), factors)


def for_all(factors=FACTORS, seed: int = 0) -> HeadTables:
    """One table for all key heads."""
    return HeadTables([random_table(seed)], factors)


KINDS = {"a table per head": of_three(), "a table for all": for_all()}
EACH_KIND = pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS.keys())
MIXED = [random_table(7), random_heads(3, seed=1), of_three(seed=2), for_all(FACTORS[::-1], seed=3)]
