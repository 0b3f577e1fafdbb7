"""The rotated keys in a KV cache, and their re-rotation to other tables."""

from __future__ import annotations

import contextlib
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mrrope.hf.auto_scale.cached_positions import LadderKey, positions_held, slots_of
from mrrope.hf.conventions import Convention

FACTOR_OF_ONE = struct.unpack("<q", struct.pack("<d", 1.0))[0]
"""An attention factor of 1 as the last word of a packed table."""


@dataclass(frozen=True)
class RotatedPart:
    """A rotated tensor in a layer of a cache: its keys, or what the model caches in place of them or beside them."""

    layer: int
    attribute: str
    convention: Convention
    has_attention_factor: bool
    """Whether the tensor is scaled by the table's attention factor, which a norm after the rotation cancels."""

    def tables(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the tables that rotate this part, given those that rotate the model's heads."""
        if not self.has_attention_factor:
            tables = torch.cat([tables[..., :-1], torch.full_like(tables[..., -1:], FACTOR_OF_ONE)], dim=-1)
        return -tables if self.convention.backwards else tables

    def of(self, layer: Any, rotary_dim: int) -> torch.Tensor:
        """Return the part as ``[batch, heads, tokens, ...]``, starting at the first rotated component."""
        part: torch.Tensor = with_heads(getattr(layer, self.attribute))
        return part[..., -rotary_dim:] if self.convention.rotates_last else part


def with_heads(part: torch.Tensor) -> torch.Tensor:
    """Return a cached tensor with a heads dimension, which tensors shared by all heads lack."""
    return part[:, None] if part.dim() == 3 else part


class CachedKeys:
    """The rotated keys of one layer type in a cache."""

    def __init__(self, parts: list[RotatedPart], layer_count: int) -> None:
        self.parts = parts
        self.layer_count = layer_count
        self.layers = sorted({part.layer for part in parts})

    def layers_of(self, cache: Any) -> list[Any]:
        """Return the layers of a cache that hold rotated keys or will hold them."""
        return [cache.layers[i] for i in self.layers if i < len(cache.layers)]

    def held_by(self, cache: Any) -> list[tuple[RotatedPart, Any]]:
        """Return the parts that a cache holds already, each with its layer.

        Raises:
            ValueError: The cache has more layers than the patched model had, carries gradients, or stores its keys in
                another form, such as quantized.
        """
        for i, layer in enumerate(cache.layers[self.layer_count :], self.layer_count):
            if not _is_empty(_tokens_in(layer)):
                raise ValueError(
                    f"model must be patched anew: it had {self.layer_count} layers that cache when it was patched, got "
                    f"past_key_values with keys of layer {i}"
                )
        held = {}
        for i, layer in zip(self.layers, self.layers_of(cache), strict=False):
            tokens = _tokens_in(layer)
            if _is_empty(tokens):
                continue
            if torch.is_grad_enabled() and layer.keys.requires_grad:
                raise ValueError(
                    "past_key_values must not carry gradients where the scale follows the text: patch with a fixed "
                    "scale"
                )
            is_whole = isinstance(tokens, torch.Tensor) or layer.is_sliding or layer.keys.shape[-2:-1] == (tokens,)
            if not is_whole:
                raise ValueError(
                    "past_key_values must hold its keys as they are where the scale follows the text, and "
                    f"{type(layer).__name__} does not: patch with a fixed scale"
                )
            held[i] = layer
        return [(part, held[part.layer]) for part in self.parts if part.layer in held]


def rescale_parts(
    cache: Any,
    key: LadderKey,
    parts: list[tuple[RotatedPart, Any]],
    tables: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
) -> None:
    """Re-rotate cached keys in place, by the positions recorded on the cache.

    Args:
        cache: The cache that holds the parts.
        key: Selects the recorded positions.
        parts: Parts and their layers, from ``CachedKeys.held_by``.
        tables: Packed tables of the ladder: ``[scales, W]``, or ``[scales, layers of the model or 1, heads, W]``; with
            M-RoPE's rows of positions ``[scales, 2, W]`` or ``[scales, layers of the model or 1, 2, heads, W]``.
        old: Index of the table that each sequence's keys are rotated by, ``[batch]``.
        new: Index of the table to re-rotate to.
    """
    if old.is_cuda and any(layer.keys.device.type == "cpu" for _, layer in parts):
        torch.cuda.synchronize(old.device)  # copies of an offloaded cache may still be in flight
    groups = defaultdict(list)
    for part, layer in parts:
        keys = part.of(layer, 2 * (tables.shape[-1] - 1))
        # Not grouped by the number of tokens, which would be a graph constant and recompile at every step.
        room = (slots_of(layer), getattr(layer, "sliding_window", None))
        kind = (part.convention, part.has_attention_factor, keys.device, keys.dtype, room)
        groups[kind].append((part, keys, layer))
    for (convention, _, device, _, _), group in groups.items():
        part, _, layer = group[0]
        layers = [keys for _, keys, _ in group]
        with _inference_mode_of(layers):
            torch.ops.mrrope.rescale_cache_.default(
                layers,
                positions_held(cache, key, layer).to(device),
                part.tables(_of_layers(tables, [part.layer for part, _, _ in group]).to(device)),
                old.to(device),
                new.to(device),
                "bhsd",
                convention.pairing,
            )


def _of_layers(tables: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """Return the tables of some layers; tables that all layers share are returned unchanged."""
    if tables.dim() < 4 or tables.shape[1] == 1 or layers == list(range(tables.shape[1])):
        return tables
    # No index tensor: its copy to the device would synchronize.
    return torch.stack([tables[:, layer] for layer in layers], dim=1)


def _tokens_in(layer: Any) -> int | torch.Tensor:
    tokens: int | torch.Tensor = layer.get_seq_length() if layer.is_initialized else 0
    return tokens


def _is_empty(tokens: int | torch.Tensor) -> bool:
    """Whether a layer is known to be empty. A static layer counts its tokens on the device."""
    return not isinstance(tokens, torch.Tensor) and tokens == 0


@contextlib.contextmanager
def _inference_mode_of(keys: list[torch.Tensor]) -> Iterator[None]:
    """Enter inference mode for keys made in it, which can be written in inference mode only."""
    if torch.compiler.is_compiling() or not keys[0].is_inference():
        yield
    else:
        with torch.inference_mode():
            yield
