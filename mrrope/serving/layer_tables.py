"""Tables per layer and key head, handed to the rope layer of each layer.

Engines build one rope layer for all layers of a model. Where it has tables per layer or head, every attention module
gets a copy with those of its own layer, and of the heads of its tensor-parallel rank.
"""

from __future__ import annotations

from torch import nn

from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables
from mrrope.tables.table_set import OfOneLayer, TableSet


def with_tables_of_layer(
    rope: ServedRotaryEmbedding, layer: int, heads: int, *, query_heads: int, rank: int, ranks: int
) -> ServedRotaryEmbedding:
    """Return a copy of a rope layer with the tables of one layer of the model.

    Args:
        rope: The rope layer of all layers, whose ``tables`` is None.
        layer: The number of the layer in the whole model, also under pipeline parallelism. Of a layer without keys of
            its own, the number of that whose keys it attends to.
        heads: Number of key heads of the layer on this tensor-parallel rank.
        query_heads: Number of query heads of the layer on this rank.
        rank: The tensor-parallel rank of attention.
        ranks: Number of tensor-parallel ranks of attention.

    Raises:
        ValueError: There are no tables for the layer, or for another number of heads.
    """
    tables = [_of_layer(table, layer) for table in rope.ladder.tables]
    counts = {table.key_heads for table in rope.ladder.tables if table.key_heads is not None}
    own = heads_of_rank(max(counts), rank, ranks) if counts else range(1)
    if len(counts) > 1 or (counts and len(own) != heads):
        raise ValueError(
            f"table must hold tables for the key heads of layer {layer}, of which rank {rank} of {ranks} has {heads}, "
            f"got tables for {_listed(counts)} in all"
        )
    factors = {table.query_heads for table in rope.ladder.tables if table.query_heads is not None}
    if factors - {query_heads * ranks}:
        raise ValueError(
            f"table must hold query_factors for the query heads of layer {layer}, of which rank {rank} of {ranks} has "
            f"{query_heads}, got factors for {_listed(factors)} in all"
        )
    own_queries = slice(rank * query_heads, (rank + 1) * query_heads)
    sliced = [_of_rank(table, own, own_queries) for table in tables]
    return rope.with_tables(sliced, key_heads=len(own), query_heads=query_heads if factors else None)


def _listed(counts: set[int]) -> str:
    return " and ".join(map(str, sorted(counts)))


def _of_rank(table: OfOneLayer, key_heads: range, query_heads: slice) -> OfOneLayer:
    """Return the tables of some key heads, with the factors of some query heads."""
    if isinstance(table, FrequencyTable):
        return table
    tables = table if table.key_heads is None else (table[head] for head in key_heads)
    return HeadTables(tables, None if table.query_factors is None else table.query_factors[query_heads])


def _of_layer(table: ModelTables, layer: int) -> OfOneLayer:
    if not isinstance(table, TableSet):
        return table
    if layer >= len(table):
        raise ValueError(f"table must hold tables for layer {layer}, got {table!r}")
    return table[layer]


def heads_of_rank(key_heads: int, rank: int, ranks: int) -> range:
    """Return the key heads of a tensor-parallel rank. Several ranks share a head where there are more ranks than heads.

    Args:
        key_heads: Number of key heads of the whole model.
        rank: The rank.
        ranks: Number of ranks.
    """
    if key_heads < ranks:
        shared = rank // (ranks // key_heads)
        return range(shared, shared + 1)
    per_rank = key_heads // ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


def require_tables(model: nn.Module) -> None:
    """Raise ValueError where a rope layer with tables per layer or head did not get those of its layer."""
    for name, module in model.named_modules():
        if isinstance(module, ServedRotaryEmbedding) and module.tables is None:
            raise ValueError(
                f"table must be one for all layers and heads of {type(model).__name__}, whose {name} belongs to no "
                f"attention of one layer, got {module.ladder.tables[-1]!r}"
            )
