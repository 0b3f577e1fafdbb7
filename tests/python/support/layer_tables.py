"""Random tables per head and per layer, and heads taken one by one."""

from collections.abc import Iterator

import torch
from rotary_reference import HEAD_AXIS

import mrrope

MODEL = {"rotary_dim": 16, "base": 1e4, "original_max_position": 2048, "scale": 8.0}


def random_table(seed: int, **settings) -> mrrope.FrequencyTable:
    """Return a table like a search's: 17-digit cumulative scales and an attention factor of its own."""
    settings = {**MODEL, **settings}
    generator = torch.Generator().manual_seed(seed)
    scales = 1 + 7 * torch.rand(settings["rotary_dim"] // 2, generator=generator, dtype=torch.float64)
    factor = 0.5 + torch.rand((), generator=generator, dtype=torch.float64).item()
    return mrrope.frequency_table("longrope", **settings, factors=scales, attention_factor=factor)


def random_factors(query_heads: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed + 500)
    return (0.5 + torch.rand(query_heads, generator=generator, dtype=torch.float64)).tolist()


def random_heads(count: int, seed: int = 0, query_heads: int | None = None, **settings) -> mrrope.HeadTables:
    """Return head tables, with a factor for each of ``query_heads`` where these are given."""
    factors = None if query_heads is None else random_factors(query_heads, seed)
    return mrrope.HeadTables([random_table(1000 * seed + i, **settings) for i in range(count)], factors)


def random_set(layers: int, key_heads: int, seed: int = 0, **settings) -> mrrope.TableSet:
    return mrrope.TableSet([random_heads(key_heads, 100 * seed + i, **settings) for i in range(layers)])


def head_by_head(
    x: torch.Tensor, tables: mrrope.FrequencyTable | mrrope.HeadTables, layout: str
) -> Iterator[tuple[slice, mrrope.FrequencyTable]]:
    """Yield an index of every head of a tensor, and its table by the rule that neighbouring heads share one."""
    axis = HEAD_AXIS[layout]
    heads = x.shape[axis]
    for head in range(heads):
        index = [slice(None)] * x.dim()
        index[axis] = slice(head, head + 1)
        table = tables[head * len(tables) // heads] if isinstance(tables, mrrope.HeadTables) else tables
        yield tuple(index), table
