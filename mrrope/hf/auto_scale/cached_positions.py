"""The positions that cached keys were rotated at, recorded on the cache when the keys are written.

An attention mask separates padding from text, but does not tell the positions: each forward call brings its own. The
record stays valid for any mask and positions of later calls. It is a tensor on the device, with a row per sequence. For
dynamic layers it grows with them. For static layers it has their slots and is written in place, so that its address is
stable for CUDA graphs. Of tokens with several positions (M-RoPE) all rows are recorded.
"""

from __future__ import annotations

from typing import Any

import torch

POSITIONS_ATTRIBUTE = "mrrope_positions"
"""Attribute of a cache with its recorded positions, ``[batch, slots]`` or ``[rows, batch, slots]``, by ladder and
number of static slots."""

LadderKey = tuple[str | None, int]
"""A layer type and the hash of its ladder's tables: positions recorded for other tables do not apply."""


def record_positions(cache: Any, key: LadderKey, layers: list[Any], new: torch.Tensor) -> None:
    """Record the positions ``[batch, tokens]`` or ``[rows, batch, tokens]`` of tokens that these layers will cache."""
    records = _records_on(cache)
    # All layers hold the same number of tokens. A dynamic cache may have no layers before its first token.
    layers = [layer for layer in layers if layer.is_initialized] or layers
    for slots, layer in ({slots_of(layer): layer for layer in layers} or {None: None}).items():
        length = 0 if layer is None else layer.get_seq_length()
        if slots is None:
            before = records[key, None][..., :length] if length > 0 else new[..., :0]
            records[key, None] = torch.cat([before, new], dim=-1)
            continue
        if (key, slots) not in records:
            records[key, slots] = _buffer_like(new, slots)
        recorded = records[key, slots]
        if layer.is_initialized and (isinstance(length, torch.Tensor) or length + new.shape[-1] <= slots):
            # Index by the layer's own tensor: a Python integer would be a constant of the CUDA graph.
            at = torch.arange(new.shape[-1], device=recorded.device) + layer.cumulative_length.to(recorded.device)
            recorded.index_copy_(-1, at, new)
        else:  # The layer is empty, or its window slides: the buffer keeps the last positions.
            window = torch.cat([recorded if length >= slots else recorded[..., :length], new], dim=-1)[..., -slots:]
            recorded[..., : window.shape[-1]].copy_(window)


def positions_held(cache: Any, key: LadderKey, layer: Any) -> torch.Tensor:
    """Return the positions of the keys that a layer holds, ``[batch, slots]`` or ``[rows, batch, slots]``."""
    slots = slots_of(layer)
    recorded = _records_on(cache)[key, slots]
    if slots is not None:
        return recorded
    length, held = layer.get_seq_length(), layer.keys.shape[-2]
    return recorded[..., length - held : length]


def complete_records(cache: Any, key: LadderKey, layers: list[Any], new: torch.Tensor, mask: Any) -> None:
    """Make the records cover what these layers hold, for a call whose tokens are at ``new`` positions.

    Keys cached without a record get positions inferred from the call. If the call's positions count the tokens of the
    attention mask, as in ``generate``, so do the cached ones. Otherwise they are consecutive up to the call's.
    """
    records = _records_on(cache)
    for slots, layer in {slots_of(layer): layer for layer in layers}.items():
        recorded = records.get((key, slots))
        length = layer.get_seq_length()
        if recorded is None:
            positions = _inferred_positions(new, mask, layer)
            if slots is None:
                records[key, slots] = positions
            else:
                records[key, slots] = _buffer_like(positions, slots)
                records[key, slots][..., : min(slots, positions.shape[-1])].copy_(positions[..., -slots:])
        elif slots is None and recorded.shape[-1] < length:
            raise ValueError(
                "past_key_values must be filled by the model as it is patched now, got one of "
                f"{length} tokens, {length - recorded.shape[-1]} of them cached by others since"
            )
        elif recorded.shape[-2] != new.shape[-2]:
            repeated = recorded.repeat_interleave(new.shape[-2] // recorded.shape[-2], dim=-2)
            records[key, slots] = repeated if slots is None else _buffer_like(repeated, slots).copy_(repeated)


def _inferred_positions(new: torch.Tensor, mask: Any, layer: Any) -> torch.Tensor:
    """Return positions for the keys that a layer holds, inferred from a call's positions and attention mask."""
    length = layer.get_seq_length()
    tokens = length
    if isinstance(length, torch.Tensor):
        tokens, length = layer.max_cache_len, length.to(new.device)
    at = torch.arange(tokens + new.shape[-1], device=new.device)
    consecutive: torch.Tensor = (new[..., :1] - length + at)[..., :tokens]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return consecutive
    text = torch.nn.functional.pad(mask.to(new), (0, len(at) - mask.shape[1])) * (at < length + new.shape[-1])
    counted = text.cumsum(-1) - 1
    is_counted = counted[:, -1:] == new.amax(-1, keepdim=True)
    return torch.where(is_counted, counted[:, :tokens], consecutive)


def _records_on(cache: Any) -> dict[tuple[LadderKey, int | None], torch.Tensor]:
    if not hasattr(cache, POSITIONS_ATTRIBUTE):
        setattr(cache, POSITIONS_ATTRIBUTE, {})
    records: dict[tuple[LadderKey, int | None], torch.Tensor] = getattr(cache, POSITIONS_ATTRIBUTE)
    return records


def slots_of(layer: Any) -> int | None:
    """Return the number of tokens a static layer has memory for; None for a dynamic layer."""
    return getattr(layer, "max_cache_len", None)


def _buffer_like(positions: torch.Tensor, slots: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return positions.new_zeros(*positions.shape[:-1], slots)
    # A tensor made in inference mode cannot be written outside it.
    with torch.inference_mode(False):
        buffer = positions.new_zeros(*positions.shape[:-1], slots)
    torch._dynamo.mark_static_address(buffer)
    return buffer
