"""Cached keys, turned from one frequency table to another: rotations compose, so that nothing is computed anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrrope.tables import FrequencyTable, packed_stack

Tables = FrequencyTable | Sequence[FrequencyTable]
SHAPES = {"bhsd": "[batch, heads, tokens, head_dim]", "bshd": "[batch, tokens, heads, head_dim]"}
SHAPES |= {"thd": "[tokens, heads, head_dim]"}


def rescale_cache_(
    keys: torch.Tensor | Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: Tables,
    new: Tables,
    layout: str = "bhsd",
    pairing: str = "halves",
    blocks: torch.Tensor | None = None,
) -> None:
    """Turns cached keys that ``old`` rotated into what ``new`` would have made of them, in place.

    Every key is read, turned and written once, with one rounding to its dtype; of a static or dynamic cache all layers
    in one launch, and sequences that keep their table are not touched.

    Args:
        keys: the keys of a layer, or of several layers of one dtype and device.
        positions: of the cached tokens, int32 or int64: ``[tokens]``, ``[1, tokens]`` or ``[batch, tokens]``.
        old, new: one table for all sequences, or one for each.
        layout: of the keys, ``bhsd``, ``bshd`` or ``thd``.
        pairing: which components turn together, ``halves`` or ``interleaved``.
        blocks: of a paged cache, whose first dimension counts blocks (``[blocks, heads, slots, head_dim]`` is layout
            ``bhsd``, ``[blocks, slots, heads, head_dim]`` is ``bshd``): the blocks to turn, int64. ``positions`` and
            lists of tables are of those blocks, in their order.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: naming the argument; no key has changed then.
    """
    layers = _layers_of(keys, layout)
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"positions must be a tensor, got {type(positions).__name__}")
    taken = layers if blocks is None else _blocks_of(layers, layout, blocks)
    sequences = 1 if layout == "thd" else taken[0].shape[0]
    olds, news = _each("old", old, sequences), _each("new", new, sequences)
    distinct: list[FrequencyTable] = []  # no dict: torch.compile cannot hash tables
    for name, side in (("old", olds), ("new", news)):
        for i, table in enumerate(side):
            if table.rotary_dim != olds[0].rotary_dim:
                expected = f"old[0]'s rotary_dim {olds[0].rotary_dim}"
                raise ValueError(f"{name}[{i}] must have {expected}, got {table.rotary_dim}")
            if table not in distinct:
                distinct.append(table)
    if not distinct:
        return  # of no sequences there is nothing to turn
    factors = [table.attention_factor for table in distinct]
    if min(factors) < max(factors) * torch.finfo(torch.float32).smallest_normal:
        raise ValueError(
            f"old and new must have attention factors whose quotients are in float32's range, got {min(factors):g} and "
            f"{max(factors):g}"
        )
    device = taken[0].device
    indices = [
        torch.tensor([distinct.index(table) for table in side], dtype=torch.int32, device=device)
        for side in (olds, news)
    ]
    stack = packed_stack(distinct, device)
    torch.ops.mrrope.rescale_cache_.default(taken, positions, stack, *indices, layout, pairing)
    if blocks is not None:
        for layer, part in zip(layers, taken, strict=True):
            layer.index_copy_(0, blocks, part)


def _layers_of(keys: object, layout: str) -> list[torch.Tensor]:
    if isinstance(keys, torch.Tensor):
        return _layers_of([keys], layout)
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


def _each(name: str, tables: Tables, sequences: int) -> list[FrequencyTable]:
    """One table a sequence."""
    if isinstance(tables, FrequencyTable):
        return [tables] * sequences
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, FrequencyTable) for table in tables):
        raise TypeError(f"{name} must be a FrequencyTable or a list of them, got {tables!r}")
    if len(tables) != sequences:
        raise ValueError(f"{name} must be one table, or one for each of {sequences} sequences, got {len(tables)}")
    return list(tables)


def _blocks_of(layers: list[torch.Tensor], layout: str, blocks: object) -> list[torch.Tensor]:
    if not isinstance(blocks, torch.Tensor) or blocks.dtype != torch.int64 or blocks.dim() != 1:
        raise TypeError(f"blocks must be an int64 tensor of one dimension, got {blocks!r}")
    if layout == "thd":
        raise ValueError("blocks must come with layout bhsd or bshd, got 'thd'")
    for i, layer in enumerate(layers):
        if blocks.device != layer.device:
            raise RuntimeError(f"blocks must be on the device of keys[{i}], {layer.device}, got {blocks.device}")
    if not torch.compiler.is_compiling():
        _check_written_once(layers)
    try:
        return [layer.index_select(0, blocks) for layer in layers]
    except IndexError:
        held = min(layer.shape[0] for layer in layers)
        raise IndexError(f"blocks must name blocks of keys, 0 to {held - 1}, got {blocks.tolist()}") from None


def _check_written_once(layers: list[torch.Tensor]) -> None:
    """The op sees copies of the blocks: what the layers themselves share is looked for here."""
    for i, layer in enumerate(layers):
        if torch._debug_has_internal_overlap(layer) == 1:
            raise RuntimeError(
                f"keys[{i}] must not overlap itself in memory to be written, got strides {layer.stride()} for shape "
                f"{tuple(layer.shape)} (an expanded tensor? clone it first)"
            )
        for j, other in enumerate(layers[:i]):
            if layer.numel() and layer.data_ptr() == other.data_ptr():
                raise RuntimeError(f"keys[{j}] and keys[{i}] must not share memory to be turned in place")
