"""Swapping a frequency table into a model of transformers, and out again."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.cache_probe import UnfollowableError, find_cached_keys
from mrrope.hf.auto_scale.follower import Follower, GenerateKnowingLengths
from mrrope.hf.auto_scale.ladder import Ladder, Step, ladder_for
from mrrope.hf.fusion.norm_probe import NormForm
from mrrope.hf.fusion.qk_norm import defer_norms, norms_wait_in, restore_norms
from mrrope.hf.fusion.qkv_projection import (
    FusedProjection,
    UnfusableProjectionError,
    fuse_again,
    fuse_projections,
    projections_fused_in,
    restore_projections,
)
from mrrope.hf.fusion.rms_norm import fuse_all_norms, fuse_norm, norm_fused_in, restore_norm
from mrrope.hf.rope_types import expect_rope_parameters
from mrrope.hf.rotary_embedding import (
    Ladders,
    SwappedTable,
    TableRotaryEmbedding,
    UnfusableError,
    functions_for,
    installed_functions,
)
from mrrope.table_lookup import PLAIN_ROPE_OPTIONS, resolve_table

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    method: Step | Sequence[Step],
    *,
    scale: float | Literal["auto"] = 1.0,
    max_scale: float | None = None,
    reserve: int | None = None,
    local_layers: bool = False,
    fuse_projection: bool = False,
    fuse_norms: bool = True,
    **options: Any,
) -> Model:
    """Makes a model of transformers read by another frequency table, with the fused op; returns the model.

    Args:
        model: any model of transformers with rotary position embeddings; patched already, it is patched anew. Its text
            model is extended; another part, as an audio tower or a talker, where it is passed itself.
        method: a method's name, for a table that extends the model's own frequencies; or a ready
            :class:`FrequencyTable`, the path of its JSON, or the name of one that comes with the package; with
            ``scale="auto"`` also a list of those, one a step.
        scale: how many times as far as it reads as it is the model is to read, with a method's name; 1 or a method that
            extends nothing leave its logits as they are. Or ``"auto"``: every sequence is read with the
            smallest scale of a ladder that covers its length, 1 (the model as it is), 2, 4, and so on. A sequence that
            outgrows its scale has its cached keys turned to the next, and goes on.
        max_scale: where the ladder of ``scale="auto"`` ends; if not given, at 16 times what the model reads as it is.
        reserve: with ``scale="auto"``, for how many new tokens at most ``generate`` picks a scale ahead; if not given,
            for all that it may write. One that writes more crosses to the next scale then.
        local_layers: whether layers that see only a window, and have a RoPE of their own, are extended too.
        fuse_projection: whether q, k and v are projected and rotated by one op, :func:`qkv_rotary`, in models whose
            attention has ``q_proj``, ``k_proj`` and ``v_proj``, or ``qkv_proj``, and nothing between them and the
            rotation. For inference: where the weights want gradients, three projections are done as before.
        fuse_norms: whether the model's RMSNorms, which transformers writes out, are done by torch's own kernel where a
            model is run eagerly; norms of other forms stay as they are. Those of q and k just before the rotation are
            part of its op with or without.
        options: more arguments of :func:`frequency_table`: ``alpha``, ``beta``, ``bounds``, ``power``, ``factors``,
            ``attention_factor``. ``base`` or ``original_max_position`` start over from plain RoPE, whatever extension
            the model has; with a ready table they say that it is meant for a model of theirs.

    Warns:
        UserWarning: where the model's own code rotates in a way the op does not: then it runs on, by the new table;
            where its configuration names an extension that may be meant to be replaced, not extended.

    Raises:
        ValueError, TypeError: naming the argument; the model is untouched then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    expect_rope_parameters()
    rotaries = list(rope_config.rotary_embeddings(model))
    if not rotaries:
        raise ValueError(
            f"model must have rotary position embeddings, and {type(model).__name__} has none that mrrope knows"
        )
    if rotaries[0] is model:
        raise ValueError(f"model must be the one that {type(model).__name__} is a part of: it is what gets replaced")
    if scale != "auto" and max_scale is not None:
        raise ValueError(f"max_scale must come with scale='auto', got {max_scale!r} with scale {scale!r}")
    if scale != "auto" and reserve is not None:
        raise ValueError(f"reserve must come with scale='auto', got {reserve!r} with scale {scale!r}")
    if reserve is not None and (not isinstance(reserve, int) or isinstance(reserve, bool) or reserve < 0):
        raise ValueError(f"reserve must be a non-negative integer, got {reserve!r}")
    kinds = [layer_type for rotary in rotaries for layer_type in rope_config.layer_types(rotary)]
    if not local_layers and all(rope_config.is_local(layer_type) for layer_type in kinds):
        warnings.warn(
            f"{type(model).__name__} keeps its own tables: all its layers with RoPE see only a window; "
            "local_layers=True extends those",
            UserWarning,
            stacklevel=2,
        )
    settings = [_settings_of(model, rotary) for rotary in rotaries]
    ladders = [_ladders_for(own, method, scale, max_scale, reserve, local_layers, options) for own in settings]
    if options.keys().isdisjoint(PLAIN_ROPE_OPTIONS) and scale != 1.0:
        _warn_of_extensions(model, settings, scale, local_layers)

    before = _state_of(model)
    if is_patched(model):
        unpatch(model)
    try:
        reasons = [_put_in(model, rotary, by_layer) for rotary, by_layer in zip(rotaries, ladders, strict=True)]
        if fuse_projection:
            if why := next(filter(None, reasons), None):
                raise UnfusableProjectionError(why)
            fuse_projections(model)
        if fuse_norms:
            fuse_all_norms(model)
    except BaseException as error:
        _restore(model, before)
        if isinstance(error, UnfusableProjectionError):
            raise ValueError(f"fuse_projection must be False for {type(model).__name__}: {error}") from None
        if isinstance(error, UnfollowableError):
            raise ValueError(f"scale must be a number for {type(model).__name__}: {error}, got 'auto'") from None
        raise
    for why in filter(None, reasons):
        warnings.warn(f"{type(model).__name__} gets the table but not the fused op: {why}", UserWarning, stacklevel=2)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch` changed this model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return any(
        isinstance(module, TableRotaryEmbedding) or hasattr(module, SwappedTable.ATTRIBUTE)
        for module in model.modules()
    )


def unpatch(model: Model) -> Model:
    """Makes a patched model exactly what it was; returns it."""
    if not is_patched(model):
        raise ValueError(f"model must be a patched one, and this {type(model).__name__} is not")
    for module in list(model.modules()):
        if isinstance(module, TableRotaryEmbedding):
            if module.follower is not None:
                _stop_following(model, module)
            _replace(model, module, module.original)
            installed_functions.release(module)
        elif hasattr(module, SwappedTable.ATTRIBUTE):
            getattr(module, SwappedTable.ATTRIBUTE).undo(module)
        elif norms_wait_in(module):
            restore_norms(module)
        elif projections_fused_in(module):
            restore_projections(module)
        elif norm_fused_in(module):
            restore_norm(module)
    return model


@contextlib.contextmanager
def patched(model: Model, method: Step | Sequence[Step], **options: Any) -> Iterator[Model]:
    """:func:`patch` for the length of a ``with`` block; a model that comes patched leaves as it came."""
    before = _state_of(model) if isinstance(model, nn.Module) else Patches([], [], [])
    patch(model, method, **options)
    try:
        yield model
    finally:
        _restore(model, before)


Settings = dict[str | None, rope_config.RopeSettings]
"""What a rotary embedding does as it is, by kind of layer."""


def _settings_of(model: nn.Module, rotary: nn.Module) -> Settings:
    """What a rotary embedding does without its patch."""
    swapped: SwappedTable | None = getattr(rotary, SwappedTable.ATTRIBUTE, None)
    if swapped is not None:
        rotary = copy.deepcopy(rotary)
        swapped.undo(rotary)
    held = rope_config.held_attention_factor(model)
    return {
        layer_type: replace(rope_config.settings(rotary, layer_type), held_attention_factor=held)
        for layer_type in rope_config.layer_types(rotary)
    }


def _ladders_for(
    settings: Settings,
    method: Step | Sequence[Step],
    scale: float | Literal["auto"],
    max_scale: float | None,
    reserve: int | None,
    local_layers: bool,
    options: dict[str, Any],
) -> Ladders:
    ladders: Ladders = {}
    for layer_type, own in settings.items():
        if rope_config.is_local(layer_type) and not local_layers:
            ladder = Ladder.of_one(own.table)
        elif scale == "auto":
            ladder = replace(ladder_for(own, own.table, method, max_scale, options), reserve=reserve)
        elif isinstance(method, Sequence) and not isinstance(method, str):
            raise ValueError(f"scale must be 'auto' with a list of tables, got {scale!r}")
        else:
            ladder = Ladder.of_one(resolve_table(own, method, scale, options))
        if own.changes_with_length and ladder.is_fixed and ladder.tables[0].is_like(own.table):
            continue  # no one table is what the model does as it is
        ladders[layer_type] = ladder
    return ladders


def _warn_of_extensions(
    model: nn.Module, settings: list[Settings], scale: float | Literal["auto"], local_layers: bool
) -> None:
    """Names both readings of a scale where a configuration extends RoPE by a method that needs no training."""
    for layer_type, own in (item for by_layer in settings for item in by_layer.items()):
        if own.untrained_extension is None or (rope_config.is_local(layer_type) and not local_layers):
            continue
        if scale == "auto":
            reading, other = "goes on from", "builds the longer steps from plain RoPE"
        else:
            reading, other = f"reads {scale:g} times", f"starts over from plain RoPE and reads {scale:g} times as many"
        warnings.warn(
            f"{type(model).__name__} is extended by its configuration already ({own.untrained_extension}): scale="
            f"{scale!r} {reading} the {own.original_max_position:.15g} tokens that it reads so; "
            f"original_max_position={own.trained_length:.15g} {other}",
            UserWarning,
            stacklevel=3,
        )
        return


def _ladders_in(model: nn.Module) -> Iterator[tuple[nn.Module, Ladders]]:
    """The rotary embeddings that a patched model had, and what it has in their place."""
    for module in model.modules():
        if isinstance(module, TableRotaryEmbedding):
            yield module.original, module.ladders
        elif hasattr(module, SwappedTable.ATTRIBUTE):
            yield module, getattr(module, SwappedTable.ATTRIBUTE).ladders


@dataclass(frozen=True)
class Patches:
    """What :func:`patch` did to a model, to be done again."""

    ladders: list[tuple[nn.Module, Ladders]]
    projections: list[tuple[nn.Module, FusedProjection]]
    norms: list[tuple[nn.Module, NormForm]]


def _state_of(model: nn.Module) -> Patches:
    projections = ((module, projections_fused_in(module)) for module in model.modules())
    norms = ((module, norm_fused_in(module)) for module in model.modules())
    return Patches(
        list(_ladders_in(model)),
        [(module, projection) for module, projection in projections if projection is not None],
        [(module, form) for module, form in norms if form is not None],
    )


def _restore(model: nn.Module, before: Patches) -> None:
    if is_patched(model):
        unpatch(model)
    for rotary, ladders in before.ladders:
        _put_in(model, rotary, ladders)
    for module, projection in before.projections:
        fuse_again(module, projection)
    for norm, form in before.norms:
        fuse_norm(norm, form)


@torch.inference_mode(mode=False)  # tables made in it could not take part in training later
@torch.no_grad()
def _put_in(model: nn.Module, rotary: nn.Module, ladders: Ladders) -> str | None:
    """Makes a model turn by these tables; where the op cannot do it, tells why."""
    try:
        if ladders.keys() != {*rope_config.layer_types(rotary)}:
            raise UnfusableError("no one table is its own, which changes with the length of a text")
        _fuse(model, rotary, ladders)
    except UnfusableError as reason:
        if not all(ladder.is_fixed for ladder in ladders.values()):
            raise UnfollowableError(str(reason)) from None
        SwappedTable(rotary, ladders)
        return str(reason)
    return None


def _fuse(model: nn.Module, rotary: nn.Module, ladders: Ladders) -> None:
    functions = functions_for(model, rotary)
    replacement = TableRotaryEmbedding(rotary, ladders, functions)
    native = None
    if not all(ladder.is_fixed for ladder in ladders.values()):
        own = {layer_type: rope_config.settings(rotary, layer_type).table for layer_type in ladders}
        by_own_tables = {layer_type: Ladder.of_one(table) for layer_type, table in own.items()}
        native = TableRotaryEmbedding(rotary, by_own_tables, functions)
    for new in filter(None, (native, replacement)):
        new.train(rotary.training)
        installed_functions.install_for(new)
    if native is not None:
        _replace(model, rotary, native)
        replacement.follower = _follow(model, native, ladders)
        installed_functions.release(native)
    _replace(model, native or rotary, replacement)
    defer_norms(model, replacement)


def _follow(model: nn.Module, native: TableRotaryEmbedding, ladders: Ladders) -> Follower:
    """Makes the scale follow the text in the part of the model that calls this rotary embedding."""
    owner = _owner_of(model, native)
    settings = {layer_type: rope_config.settings(native.original, layer_type) for layer_type in ladders}
    if any(own.position_row is not None for own in settings.values()):
        raise UnfollowableError("its tokens have several positions each")
    if any(own.changes_with_length for own in settings.values()):
        raise UnfollowableError("its own table changes with the length of a text already")
    follower = Follower(owner, ladders, find_cached_keys(owner, native, settings))
    follower.to(next(native.original.buffers()).device)
    # A wrapper, such as torch.compile's, leaves generate to the model within.
    for module in model.modules():
        if hasattr(type(module), "generate") and hasattr(module, "generation_config") and owner in module.modules():
            module.generate = GenerateKnowingLengths(module)  # type: ignore[assignment]
    return follower


def _stop_following(model: nn.Module, rotary: TableRotaryEmbedding) -> None:
    assert rotary.follower is not None
    rotary.follower.leave()
    for module in model.modules():
        if isinstance(vars(module).get("generate"), GenerateKnowingLengths):
            del module.generate


def _owner_of(model: nn.Module, rotary: nn.Module) -> nn.Module:
    """The module that calls a rotary embedding, once for all layers."""
    owners = [module for module in model.modules() if any(child is rotary for child in module.children())]
    owners = [module for module in owners if "past_key_values" in inspect.signature(module.forward).parameters]
    if len(owners) != 1:
        raise UnfollowableError("its rotary embedding is not called once for all layers")
    return owners[0]


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old and parent is not new:
                setattr(parent, name, new)
