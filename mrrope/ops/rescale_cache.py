"""The op ``rescale_cache``: re-rotates cached keys from one frequency table to another, without recomputing them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrrope.ops import require_tensors
from mrrope.tables.axis_tables import AxisTables
from mrrope.tables.frequency_table import FrequencyTable, packed_stack
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.table_set import TableSet, every_table

CacheTables = FrequencyTable | HeadTables | AxisTables | TableSet
"""What rotated the keys of a sequence: one table, one per key head or position axis, or the tables of each layer."""

SHAPES = {
    "bhsd": "[batch, heads, tokens, head_dim]",
    "bshd": "[batch, tokens, heads, head_dim]",
    "thd": "[tokens, heads, head_dim]",
}


def rescale_cache_(
    keys: torch.Tensor | Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: CacheTables | Sequence[CacheTables],
    new: CacheTables | Sequence[CacheTables],
    layout: str = "bhsd",
    pairing: str = "halves",
    blocks: torch.Tensor | None = None,
) -> None:
    """Re-rotate cached keys in place, from the rotation by ``old`` to the rotation by ``new``.

    Every key is read and written once, and rounded once to its dtype. All layers of a static or dynamic cache take one
    launch. Sequences whose table does not change are not touched.

    Args:
        keys: The keys of one layer, or of several layers of one dtype and device.
        positions: Positions of the cached tokens, int32 or int64: ``[tokens]``, ``[1, tokens]`` or
            ``[batch, tokens]``. With ``AxisTables`` also ``[axes, batch, tokens]`` or ``[axes, 1, tokens]``.
        old: The table the keys are rotated by: a ``FrequencyTable``, ``HeadTables``, ``AxisTables`` or a ``TableSet``
            with the tables of every layer of ``keys``. One for all sequences, or a list with one per sequence. Query
            factors do not matter: keys have none.
        new: The table to re-rotate to, in the same forms. ``AxisTables`` of a call divide the pairs among the axes
            alike, and no other tables come with them.
        layout: Layout of the keys: ``bhsd``, ``bshd`` or ``thd``.
        pairing: ``halves`` or ``interleaved``, as in ``rotary``.
        blocks: Int64 indices of the blocks of a paged cache to re-rotate. The first dimension of such a cache counts
            blocks: ``[blocks, heads, slots, head_dim]`` is layout ``bhsd``, ``[blocks, slots, heads, head_dim]`` is
            ``bshd``. ``positions`` and lists of tables then have one row per block named here.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument, and no key has changed.
        ValueError: A shape, a table or an option is invalid.
        IndexError: ``blocks`` is out of range.
        RuntimeError: The tensors are on different devices or share memory, or were made in inference mode.
    """
    layers = _checked_layers(keys, layout)
    require_tensors(positions=positions)
    rescaled = layers if blocks is None else _copied_blocks(layers, layout, blocks)
    sequences = 1 if layout == "thd" else rescaled[0].shape[0]
    olds, news = _table_per_sequence("old", old, sequences), _table_per_sequence("new", new, sequences)
    distinct: list[CacheTables] = []  # no dict: torch.compile cannot hash tables
    for name, side in (("old", olds), ("new", news)):
        for i, table in enumerate(side):
            if table.rotary_dim != olds[0].rotary_dim:
                expected = f"old[0]'s rotary_dim {olds[0].rotary_dim}"
                raise ValueError(f"{name}[{i}] must have {expected}, got {table.rotary_dim}")
            if isinstance(table, TableSet) and len(table) != len(layers):
                raise ValueError(f"{name}[{i}] must have tables for the {len(layers)} layers of keys, got {len(table)}")
            _check_key_heads(f"{name}[{i}]", table, distinct)
            _check_axes(f"{name}[{i}]", table, olds[0])
            if table not in distinct:
                distinct.append(table)
    if not distinct:
        return  # no sequences
    factors = [factor for tables in distinct for factor in _attention_factors(tables)]
    if min(factors) < max(factors) * torch.finfo(torch.float32).smallest_normal:
        raise ValueError(
            f"old and new must have attention factors whose quotients are in float32's range, got {min(factors):g} and "
            f"{max(factors):g}"
        )
    device = rescaled[0].device
    indices = [
        torch.tensor([distinct.index(table) for table in side], dtype=torch.int32, device=device)
        for side in (olds, news)
    ]
    stack = _packed(distinct, device)
    torch.ops.mrrope.rescale_cache_.default(rescaled, positions, stack, *indices, layout, pairing)
    if blocks is not None:
        for layer, part in zip(layers, rescaled, strict=True):
            layer.index_copy_(0, blocks, part)


def _checked_layers(keys: object, layout: str) -> list[torch.Tensor]:
    """Return the keys of every layer as a list."""
    if isinstance(keys, torch.Tensor):
        return _checked_layers([keys], layout)
    if not isinstance(keys, (list, tuple)):
        raise TypeError(f"keys must be a tensor or a list of them, got {type(keys).__name__}")
    if not keys:
        raise ValueError("keys must hold a tensor for every layer, got none")
    for i, layer in enumerate(keys):
        if not isinstance(layer, torch.Tensor):
            raise TypeError(f"keys[{i}] must be a tensor, got {type(layer).__name__}")
        if layout in SHAPES and layer.dim() != len(SHAPES[layout].split()):
            raise ValueError(
                f"keys[{i}] must be {SHAPES[layout]} for layout {layout}, got a tensor of {layer.dim()} dimensions"
            )
        outside = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if outside and layer.is_inference():
            raise RuntimeError(f"keys[{i}] was made in inference mode and cannot be turned outside it: clone it first")
    return list(keys)


def _table_per_sequence(name: str, tables: CacheTables | Sequence[CacheTables], sequences: int) -> list[CacheTables]:
    if isinstance(tables, CacheTables):
        return [_of_keys(tables)] * sequences
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, CacheTables) for table in tables):
        raise TypeError(
            f"{name} must be a FrequencyTable or a list of them, of HeadTables, AxisTables or TableSets, got {tables!r}"
        )
    if len(tables) != sequences:
        raise ValueError(f"{name} must be one table, or one for each of {sequences} sequences, got {len(tables)}")
    return [_of_keys(table) for table in tables]


def _of_keys(tables: CacheTables) -> CacheTables:
    """Return tables without query factors, so that tables that differ in these alone are equal."""
    return tables if isinstance(tables, AxisTables) else tables.without_query_factors()


def _check_key_heads(name: str, table: CacheTables, others: list[CacheTables]) -> None:
    """Raise ValueError where two tables of a call are for different numbers of key heads."""
    for other in others:
        if table.key_heads is not None and other.key_heads not in (None, table.key_heads):
            raise ValueError(
                f"{name} must hold tables for {other.key_heads} key heads, as those before it do, got {table.key_heads}"
            )


def _check_axes(name: str, table: CacheTables, first: CacheTables) -> None:
    """Raise ValueError where a pair has one axis in ``old[0]`` and another one, or none, in a table."""
    expected, got = (each.axis_of_pair if isinstance(each, AxisTables) else None for each in (first, table))
    if got == expected:
        return
    if expected is None or got is None:
        raise ValueError(f"{name} must be {type(first).__name__} like old[0], got {type(table).__name__}")
    raise ValueError(f"{name} must have old[0]'s axis_of_pair {expected}, got {got}")


def _attention_factors(tables: CacheTables) -> list[float]:
    if isinstance(tables, AxisTables):
        return [tables.attention_factor]
    return [table.attention_factor for table in every_table(tables)]


def _packed(tables: list[CacheTables], device: torch.device) -> torch.Tensor:
    """Return tables as the op takes them: as one for all layers, or ``[tables, layers, key heads or 1, words]``."""
    if not any(isinstance(table, TableSet) for table in tables):
        return packed_stack([table for table in tables if not isinstance(table, TableSet)], device)
    packed = [table.packed(device) for table in tables]
    words = [one if one.dim() == 4 else one.view(1, 1, 1, -1) for one in packed]
    layers, heads = (max(one.shape[dim] for one in words) for dim in (1, 2))
    return torch.cat([one.expand(1, layers, heads, -1) for one in words])


def _copied_blocks(layers: list[torch.Tensor], layout: str, blocks: object) -> list[torch.Tensor]:
    """Return copies of the named blocks of every layer."""
    if not isinstance(blocks, torch.Tensor) or blocks.dtype != torch.int64 or blocks.dim() != 1:
        raise TypeError(f"blocks must be an int64 tensor of one dimension, got {blocks!r}")
    if layout == "thd":
        raise ValueError("blocks must come with layout bhsd or bshd, got 'thd'")
    for i, layer in enumerate(layers):
        if blocks.device != layer.device:
            raise RuntimeError(f"blocks must be on the device of keys[{i}], {layer.device}, got {blocks.device}")
    if not torch.compiler.is_compiling():
        _check_overlap(layers)
    try:
        return [layer.index_select(0, blocks) for layer in layers]
    except IndexError:
        held = min(layer.shape[0] for layer in layers)
        raise IndexError(f"blocks must name blocks of keys, 0 to {held - 1}, got {blocks.tolist()}") from None


def _check_overlap(layers: list[torch.Tensor]) -> None:
    """Raise where layers overlap in memory. The op's own check sees only the copied blocks, which never overlap."""
    for i, layer in enumerate(layers):
        if torch._debug_has_internal_overlap(layer) == 1:
            raise RuntimeError(
                f"keys[{i}] must not overlap itself in memory to be written, got strides {layer.stride()} for shape "
                f"{tuple(layer.shape)} (an expanded tensor? clone it first)"
            )
        for j, other in enumerate(layers[:i]):
            if layer.numel() and layer.data_ptr() == other.data_ptr():
                raise RuntimeError(f"keys[{j}] and keys[{i}] must not share memory to be turned in place")
