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

from mrrope.hf.auto_scale.cached_positions import Name, positions_held, slots_of
from mrrope.hf.conventions import Convention
from mrrope.hf.rope_config import RopeSettings, attribute

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

    def __init__(self, parts: list[RotatedPart], layer_count: int) -> None:
        self.parts = parts
        self.layer_count = layer_count
        self.layers = sorted({part.layer for part in parts})

    def layers_of(self, cache: Any) -> list[Any]:
        """The layers of a cache that hold rotated keys, or will."""
        return [cache.layers[i] for i in self.layers if i < len(cache.layers)]

    def held_by(self, cache: Any) -> list[tuple[RotatedPart, Any]]:
        """The parts that a cache holds already, each with its layer."""
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
            whole = isinstance(tokens, torch.Tensor) or layer.is_sliding or layer.keys.shape[-2:-1] == (tokens,)
            if not whole:
                raise ValueError(
                    "past_key_values must hold its keys as they are where the scale follows the text, and "
                    f"{type(layer).__name__} does not: patch with a fixed scale"
                )
            held[i] = layer
        return [(part, held[part.layer]) for part in self.parts if part.layer in held]


def turn(
    cache: Any,
    name: Name,
    parts: list[tuple[RotatedPart, Any]],
    tables: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
) -> None:
    """Turns keys of a cache from one table to another, sequence by sequence, by the positions that it notes."""
    if old.is_cuda and any(layer.keys.device.type == "cpu" for _, layer in parts):
        torch.cuda.synchronize(old.device)  # layers of an offloaded cache may still be on their way
    alike = defaultdict(list)
    for part, layer in parts:
        keys = part.of(layer, 2 * (tables.shape[-1] - 1))
        # Not by the number of tokens: as a key it would be a constant of the graph, and every step another graph.
        room = (slots_of(layer), getattr(layer, "sliding_window", None))
        kind = (part.convention, part.has_attention_factor, keys.device, keys.dtype, room)
        alike[kind].append((part, keys, layer))
    for (convention, _, device, _, _), group in alike.items():
        part, _, layer = group[0]
        layers = [keys for _, keys, _ in group]
        with _writing(layers):
            torch.ops.mrrope.rescale_cache_.default(
                layers,
                positions_held(cache, name, layer).to(device),
                part.tables(tables.to(device)),
                old.to(device),
                new.to(device),
                "bhsd",
                convention.pairing,
            )


def _tokens_in(layer: Any) -> int | torch.Tensor:
    tokens: int | torch.Tensor = layer.get_seq_length() if layer.is_initialized else 0
    return tokens


def _is_empty(tokens: int | torch.Tensor) -> bool:
    """Of a static layer only the device knows."""
    return not isinstance(tokens, torch.Tensor) and tokens == 0


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
    rotated = {part.attribute for parts in found.values() for part in parts}
    for i, layer in enumerate(second.layers):
        for name in rotated & vars(layer).keys():
            value = vars(layer)[name]
            if isinstance(value, torch.Tensor) and value.numel() and not value.any():
                raise UnfollowableError(f"the {name} of layer {i} are all zero, so that no rotation shows in them")
    return {layer_type: CachedKeys(parts, len(second.layers)) for layer_type, parts in found.items()}


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
    device = _execution_device(owner)
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


def _execution_device(owner: nn.Module) -> torch.device:
    """Where a model computes: accelerate's hooks know, where its parameters wait elsewhere."""
    for module in owner.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return next(owner.parameters()).device


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
