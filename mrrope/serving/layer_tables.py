"""Tables per layer and key head, handed to the rope layer of each layer.

Engines build one rope layer for all layers of a model. Where it has tables per layer or head, every attention module
gets a copy with those of its own layer, and of the key heads of its tensor-parallel rank.
"""

from __future__ import annotations

from torch import nn

from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables
from mrrope.tables.table_set import OfOneLayer, TableSet


def with_tables_of_layer(
    rope: ServedRotaryEmbedding, layer: int, heads: int, *, rank: int, ranks: int
) -> ServedRotaryEmbedding:
    """Return a copy of a rope layer with the tables of one layer of the model.

    Args:
        rope: The rope layer of all layers, whose ``tables`` is None.
        layer: The number of the layer in the whole model, also under pipeline parallelism. Of a layer without keys of
            its own, the number of that whose keys it attends to.
        heads: Number of key heads of the layer on this tensor-parallel rank.
        rank: The tensor-parallel rank of attention.
        ranks: Number of tensor-parallel ranks of attention.

    Raises:
        ValueError: There are no tables for the layer, or for another number of key heads.
    """
    tables = [_of_layer(table, layer) for table in rope.ladder.tables]
    counts = {table.key_heads for table in rope.ladder.tables if table.key_heads is not None}
    if not counts:
        return rope.with_tables(tables, key_heads=1)
    own = heads_of_rank(max(counts), rank, ranks)
    if len(counts) > 1 or len(own) != heads:
        held = " and ".join(map(str, sorted(counts)))
        raise ValueError(
            f"table must hold tables for the key heads of layer {layer}, of which rank {rank} of {ranks} has {heads}, "
            f"got tables for {held} in all"
        )
    sliced = [HeadTables(table[head] for head in own) if isinstance(table, HeadTables) else table for table in tables]
    return rope.with_tables(sliced, key_heads=len(own))


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
