"""How a model of transformers caches its keys, found by trying it, and those keys turned to other tables.

One token read at two positions gives the same hidden states, so that its cached keys differ where a layer rotates them
and nowhere else, and by nothing but that rotation. No list of models is kept, and a cache that holds more than keys in
dependence of positions is known to be one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mrrope.conventions import Convention
from mrrope.model_rope import RopeSettings, attribute

PROBED_POSITIONS = (3, 40)
PROBED_TOKENS = 8
SAME = 0.1
"""What rounding may change, in bfloat16 too; a rotation or a factor of two change more."""
FACTOR_OF_ONE = struct.unpack("<q", struct.pack("<d", 1.0))[0]
"""As the last word of a packed table has it."""
PAIRINGS: tuple[Literal["halves", "interleaved"], ...] = ("halves", "interleaved")


class UnfollowableError(Exception):
    """Why the cached keys of a model cannot be turned."""


@dataclass(frozen=True)
class RotatedPart:
    """Something that a layer of a cache keeps rotated: its keys, or what a model keeps in place of them or beside."""

    layer: int
    attribute: str
    convention: Convention
    has_attention_factor: bool
    """Whether it is multiplied by the table's attention factor; a norm after the rotation takes that out again."""

    def tables(self, tables: torch.Tensor) -> torch.Tensor:
        """What turns this part, where ``tables`` turn the model's heads."""
        if not self.has_attention_factor:
            tables = torch.cat([tables[:, :-1], torch.full_like(tables[:, -1:], FACTOR_OF_ONE)], dim=1)
        return -tables if self.convention.backwards else tables

    def of(self, layer: Any, rotary_dim: int) -> torch.Tensor:
        """``[batch, heads, tokens, ...]`` of that layer, from the first component that turns on."""
        part: torch.Tensor = _with_heads(getattr(layer, self.attribute))
        return part[..., -rotary_dim:] if self.convention.turns_last else part


class CachedKeys:
    """Where the rotated keys of one kind of layer lie in a cache."""

    def __init__(self, parts: list[RotatedPart]) -> None:
        self.parts = parts

    def held_by(self, cache: Any) -> list[tuple[RotatedPart, Any]]:
        """The parts that a cache holds already, each with its layer."""
        parts = [(part, cache.layers[part.layer]) for part in self.parts if part.layer < len(cache.layers)]
        parts = [(part, layer) for part, layer in parts if layer.is_initialized and not _is_empty(layer)]
        for _, layer in parts:
            if torch.is_grad_enabled() and layer.keys.requires_grad:
                raise ValueError(
                    "past_key_values must not carry gradients where the scale follows the text: patch with a fixed "
                    "scale"
                )
            length = layer.get_seq_length()
            whole = isinstance(length, torch.Tensor) or layer.is_sliding or layer.keys.shape[-2:-1] == (length,)
            if not whole:
                raise ValueError(
                    "past_key_values must hold its keys as they are where the scale follows the text, and "
                    f"{type(layer).__name__} does not: patch with a fixed scale"
                )
        return parts


def turn(
    parts: list[tuple[RotatedPart, Any]],
    first_new: torch.Tensor,
    tables: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
) -> None:
    """Turns cached keys from one table to another, sequence by sequence.

    ``first_new`` is the position of the first token that is not cached yet; those before it end there.
    """
    if first_new.is_cuda and any(layer.keys.device.type == "cpu" for _, layer in parts):
        torch.cuda.synchronize(first_new.device)  # layers of an offloaded cache may still be on their way
    alike = defaultdict(list)
    for part, layer in parts:
        keys = part.of(layer, 2 * (tables.shape[-1] - 1))
        kind = (part.convention, part.has_attention_factor, keys.device, keys.dtype, keys.shape[-2])
        alike[kind].append((part, keys, layer))
    for (convention, _, device, _, slots), group in alike.items():
        part, _, layer = group[0]
        length = layer.get_seq_length()
        filled = length.to(device).clamp(max=slots) if isinstance(length, torch.Tensor) else min(length, slots)
        positions = (first_new.to(device)[:, None] - filled) + torch.arange(slots, device=device)
        layers = [keys for _, keys, _ in group]
        with _writing(layers):
            torch.ops.mrrope.rescale_cache_.default(
                layers,
                positions,
                part.tables(tables.to(device)),
                old.to(device),
                new.to(device),
                "bhsd",
                convention.pairing,
            )


def _is_empty(layer: Any) -> bool:
    """Of a static layer only the device knows."""
    length = layer.get_seq_length()
    return not isinstance(length, torch.Tensor) and length == 0


@contextlib.contextmanager
def _writing(keys: list[torch.Tensor]) -> Iterator[None]:
    """Keys that were made in inference mode can be written in inference mode alone."""
    if torch.compiler.is_compiling() or not keys[0].is_inference():
        yield
    else:
        with torch.inference_mode():
            yield


def find_cached_keys(
    owner: nn.Module, native: nn.Module, settings: dict[str | None, RopeSettings]
) -> dict[str | None, CachedKeys]:
    """Where a model caches the keys of every kind of layer; raises :class:`UnfollowableError`.

    Args:
        owner: the part of the model that calls the rotary embedding and takes a cache.
        native: what stands for that rotary embedding in it, with the tables that the model had before.
        settings: by kind of layer.
    """
    first, second = (_read_one_token(owner, position) for position in PROBED_POSITIONS)
    with _attention_factors_doubled(native, settings):
        doubled = _read_one_token(owner, PROBED_POSITIONS[1])
    found: dict[str | None, list[RotatedPart]] = {layer_type: [] for layer_type in settings}
    config: Any = owner.config
    for i, (before, after) in enumerate(zip(first.layers, second.layers, strict=True)):
        for name, value in vars(before).items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if change(value, vars(after)[name]) < SAME:
                continue
            layer_type: str | None = None if None in settings else config.layer_types[i]
            convention = _convention_of(value, vars(after)[name], settings[layer_type])
            if convention is None:
                raise UnfollowableError(f"layer {i} caches {name} by position in a way that is not understood")
            has_attention_factor = change(vars(doubled.layers[i])[name], vars(after)[name]) > SAME
            found[layer_type].append(RotatedPart(i, name, convention, has_attention_factor))
    if not any(found.values()):
        raise UnfollowableError("its cache holds nothing that depends on positions")
    return {layer_type: CachedKeys(parts) for layer_type, parts in found.items()}


@contextlib.contextmanager
def _attention_factors_doubled(native: nn.Module, settings: dict[str | None, RopeSettings]) -> Iterator[None]:
    tables = {
        name: getattr(native, name) for name in (attribute(layer_type, "packed_table") for layer_type in settings)
    }
    for name, table in tables.items():
        doubled = (2.0 * table[-1:].view(torch.float64)).view(torch.int64)
        setattr(native, name, torch.cat([table[:-1], doubled]))
    try:
        yield
    finally:
        for name, table in tables.items():
            setattr(native, name, table)


def _read_one_token(owner: nn.Module, position: int) -> Any:
    """The cache after one token at that position, of each of several sequences: a token may be padding, all zero."""
    device = next(owner.parameters()).device
    tokens = torch.arange(PROBED_TOKENS, device=device)[:, None]
    positions = torch.full_like(tokens, position)
    was_training = [module for module in owner.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        with torch.no_grad():
            output = owner(input_ids=tokens, position_ids=positions, use_cache=True)
    except Exception as error:
        raise UnfollowableError(f"it does not read one token by itself: {error}") from error
    finally:
        for module in was_training:
            module.training = True
    cache = getattr(output, "past_key_values", None)
    if not hasattr(cache, "layers"):
        raise UnfollowableError("it gives no cache of layers")
    return cache


def _convention_of(before: torch.Tensor, after: torch.Tensor, settings: RopeSettings) -> Convention | None:
    """How the keys at the one position turn into those at the other."""
    table = settings.packed(settings.table)
    # Cached keys have the attention factor in them.
    table[-1] = FACTOR_OF_ONE
    positions = torch.tensor([PROBED_POSITIONS[1] - PROBED_POSITIONS[0]], device="cpu")
    before, after = _with_heads(before.cpu()), _with_heads(after.cpu())
    for pairing, turns_last, backwards in itertools.product(PAIRINGS, (False, True), (False, True)):
        convention = Convention(pairing, turns_last=turns_last, backwards=backwards)
        if change(convention.rotate([before], positions, table, "bhsd")[0], after) < SAME:
            return convention
    return None


def _with_heads(part: torch.Tensor) -> torch.Tensor:
    """What all heads share is kept without a dimension for them."""
    return part[:, None] if part.dim() == 3 else part


def change(a: torch.Tensor, b: torch.Tensor) -> float:
    """By how much the component that changed most did, over all tokens and heads, relative to what it was.

    A rotation changes its fastest components by about as much as they are, in any dtype; rounding changes none by much.
    The norm of the whole would not do: a few large, slow components may make up all of it.
    """
    if a.shape != b.shape:
        return math.inf
    outer = tuple(range(b.dim() - 1))
    a, b = a.double(), b.double()
    norms = torch.linalg.vector_norm(b, dim=outer)
    differences = torch.linalg.vector_norm(a - b, dim=outer)
    return float((differences / norms.clamp(min=torch.finfo(torch.float32).tiny)).max())
