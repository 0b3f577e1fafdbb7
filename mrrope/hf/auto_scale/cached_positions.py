"""At which positions the keys of a cache were rotated: noted on the cache when they are written.

An attention mask tells padding from text, and not at which positions the text was rotated: every forward call brings
its own. What is noted holds whatever mask and positions later calls come with. The note is a tensor on the device, a
row a sequence: of dynamic layers it grows as they do, of static ones it has their slots and is written in place, so
that CUDA graphs find it where it was.
"""

from __future__ import annotations

from typing import Any

import torch

CACHE_ATTRIBUTE = "mrrope_positions"
"""Where a cache keeps positions, ``[batch, slots]``: by kind of layer and ladder, and by the slots of static layers."""

Name = tuple[str | None, int]


def note_positions(cache: Any, name: Name, layers: list[Any], new: torch.Tensor) -> None:
    """Notes the positions of the tokens that these layers are about to cache, ``[batch, tokens]``."""
    notes = _notes_on(cache)
    # All layers fill alike. A dynamic cache may have none before its first token.
    layers = [layer for layer in layers if layer.is_initialized] or layers
    for slots, layer in ({slots_of(layer): layer for layer in layers} or {None: None}).items():
        length = 0 if layer is None else layer.get_seq_length()
        if slots is None:
            before = notes[name, None][:, :length] if length > 0 else new[:, :0]
            notes[name, None] = torch.cat([before, new], dim=1)
            continue
        if (name, slots) not in notes:
            notes[name, slots] = _buffer_like(new, slots)
        noted = notes[name, slots]
        if layer.is_initialized and (isinstance(length, torch.Tensor) or length + new.shape[1] <= slots):
            # By the layer's own tensor: with the length as a number, every step would need a CUDA graph of its own.
            at = torch.arange(new.shape[1], device=noted.device) + layer.cumulative_length.to(noted.device)
            noted.index_copy_(1, at, new)
        else:  # empty, or a window that moves on
            window = torch.cat([noted if length >= slots else noted[:, :length], new], dim=1)[:, -slots:]
            noted[:, : window.shape[1]].copy_(window)


def positions_held(cache: Any, name: Name, layer: Any) -> torch.Tensor:
    """The positions of what a layer holds, ``[batch, slots]``."""
    slots = slots_of(layer)
    noted = _notes_on(cache)[name, slots]
    if slots is not None:
        return noted
    length, held = layer.get_seq_length(), layer.keys.shape[-2]
    return noted[:, length - held : length]


def complete_notes(cache: Any, name: Name, layers: list[Any], new: torch.Tensor, mask: Any) -> None:
    """Makes the notes cover what these layers hold, for the sequences of a call at ``new`` positions.

    Where nobody made a note, those and the attention mask tell: positions count the tokens of the mask where those of
    the call do, as ``generate`` has them, else they are consecutive up to the call's.
    """
    notes = _notes_on(cache)
    for slots, layer in {slots_of(layer): layer for layer in layers}.items():
        noted = notes.get((name, slots))
        length = layer.get_seq_length()
        if noted is None:
            positions = _told_by_call(new, mask, layer)
            if slots is None:
                notes[name, slots] = positions
            else:
                notes[name, slots] = _buffer_like(positions, slots)
                notes[name, slots][:, : min(slots, positions.shape[1])].copy_(positions[:, -slots:])
        elif slots is None and noted.shape[1] < length:
            raise ValueError(
                "past_key_values must be filled by the model as it is patched now, got one of "
                f"{length} tokens, {length - noted.shape[1]} of them cached by others since"
            )
        elif noted.shape[0] != new.shape[0]:
            repeated = noted.repeat_interleave(new.shape[0] // noted.shape[0], dim=0)
            notes[name, slots] = repeated if slots is None else _buffer_like(repeated, slots).copy_(repeated)


def _told_by_call(new: torch.Tensor, mask: Any, layer: Any) -> torch.Tensor:
    length = layer.get_seq_length()
    tokens = length
    if isinstance(length, torch.Tensor):
        tokens, length = layer.max_cache_len, length.to(new.device)
    at = torch.arange(tokens + new.shape[1], device=new.device)
    consecutive: torch.Tensor = (new[:, :1] - length + at)[:, :tokens]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return consecutive
    text = torch.nn.functional.pad(mask.to(new), (0, len(at) - mask.shape[1])) * (at < length + new.shape[1])
    counted = text.cumsum(-1) - 1
    is_counted = counted[:, -1:] == new.amax(-1, keepdim=True)
    return torch.where(is_counted, counted[:, :tokens], consecutive)


def _notes_on(cache: Any) -> dict[tuple[Name, int | None], torch.Tensor]:
    if not hasattr(cache, CACHE_ATTRIBUTE):
        setattr(cache, CACHE_ATTRIBUTE, {})
    notes: dict[tuple[Name, int | None], torch.Tensor] = getattr(cache, CACHE_ATTRIBUTE)
    return notes


def slots_of(layer: Any) -> int | None:
    """How many tokens a static layer has memory for; None of a dynamic one."""
    return getattr(layer, "max_cache_len", None)


def _buffer_like(positions: torch.Tensor, slots: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return positions.new_zeros(positions.shape[0], slots)
    # A tensor made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        buffer = positions.new_zeros(positions.shape[0], slots)
    torch._dynamo.mark_static_address(buffer)
    return buffer
