"""Probe which cached tensors of a transformers model are rotated, and how.

One token read at two positions has the same hidden states. Its cached tensors therefore differ only where a layer
rotates them, and only by that rotation. The probe needs no list of models, and it detects caches whose dependence on
positions is not a rotation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from mrrope.hf.auto_scale.cached_keys import FACTOR_OF_ONE, CachedKeys, RotatedPart, with_heads
from mrrope.hf.conventions import Convention
from mrrope.hf.rope_config import RopeSettings, attribute

PROBED_POSITIONS = (3, 40)
PROBED_TOKENS = 8
SAME = 0.1
"""Upper bound of relative changes by rounding, bfloat16 included. A rotation or a factor of two changes more."""
PAIRINGS: tuple[Literal["halves", "interleaved"], ...] = ("halves", "interleaved")


class UnfollowableError(Exception):
    """The cached keys of a model cannot be re-rotated, for the reason in the message."""


def find_cached_keys(
    owner: nn.Module, native: nn.Module, settings: dict[str | None, RopeSettings]
) -> dict[str | None, CachedKeys]:
    """Return the rotated keys of every layer type.

    Args:
        owner: The module that calls the rotary embedding and takes a cache.
        native: The patched rotary embedding in ``owner``, with the model's own tables.
        settings: The model's own RoPE by layer type.

    Raises:
        UnfollowableError: The model caches something by position that is not a rotation, or cannot be probed.
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
            if _largest_change(value, vars(after)[name]) < SAME:
                continue
            layer_type: str | None = None if None in settings else config.layer_types[i]
            convention = _convention_of(value, vars(after)[name], settings[layer_type])
            if convention is None:
                raise UnfollowableError(f"layer {i} caches {name} by position in a way that is not understood")
            has_attention_factor = _largest_change(vars(doubled.layers[i])[name], vars(after)[name]) > SAME
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
        doubled = table.clone()
        # Other rows of head tables hold rows of positions and query factors.
        factors = (doubled[..., 0, :, -1:] if table.dim() >= 4 else doubled[..., -1:]).view(torch.float64)
        factors *= 2.0
        setattr(native, name, doubled)
    try:
        yield
    finally:
        for name, table in tables.items():
            setattr(native, name, table)


def _read_one_token(owner: nn.Module, position: int) -> Any:
    """Return the cache after one token at ``position``. Several sequences, because a padding token may be all zero."""
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
    """Return the device a model computes on; from accelerate's hooks where its parameters are offloaded."""
    for module in owner.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return next(owner.parameters()).device


def _convention_of(before: torch.Tensor, after: torch.Tensor, settings: RopeSettings) -> Convention | None:
    """Return the convention that rotates the keys at one position to those at the other, or None."""
    table = settings.packed(settings.table)
    # Both keys are already scaled by the attention factor.
    table[..., -1] = FACTOR_OF_ONE
    positions = torch.tensor([PROBED_POSITIONS[1] - PROBED_POSITIONS[0]], device="cpu")
    before, after = with_heads(before.cpu()), with_heads(after.cpu())
    for pairing, rotates_last, backwards in itertools.product(PAIRINGS, (False, True), (False, True)):
        convention = Convention(pairing, rotates_last=rotates_last, backwards=backwards)
        if _largest_change(convention.rotate([before], positions, table, "bhsd")[0], after) < SAME:
            return convention
    return None


def _largest_change(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest relative change of a component, with norms over all tokens and heads.

    A rotation changes its fastest components by about their own size; rounding changes every component by little. The
    norm over all components would miss this: a few large, slow components can dominate it.
    """
    if a.shape != b.shape:
        return math.inf
    outer = tuple(range(b.dim() - 1))
    a, b = a.double(), b.double()
    norms = torch.linalg.vector_norm(b, dim=outer)
    differences = torch.linalg.vector_norm(a - b, dim=outer)
    return float((differences / norms.clamp(min=torch.finfo(torch.float32).tiny)).max())
