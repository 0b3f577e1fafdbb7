"""Swapping a frequency table into a model of transformers, and out again."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from mrrope import model_rope
from mrrope.deferred_norms import defer_norms, norms_wait_in, restore_norms
from mrrope.embeddings import (
    Ladders,
    SwappedTable,
    TableRotaryEmbedding,
    UnfusableError,
    functions_for,
    installed_functions,
)
from mrrope.following import Follower, GenerateKnowingLengths
from mrrope.fused_norms import fuse_all_norms, fuse_norm, norm_fused_in, restore_norm
from mrrope.fused_projections import (
    FusedProjection,
    UnfusableProjectionError,
    fuse_again,
    fuse_projections,
    projections_fused_in,
    restore_projections,
)
from mrrope.ladder import Ladder, Step, ladder_for
from mrrope.model_cache import UnfollowableError, find_cached_keys
from mrrope.norm_forms import NormForm
from mrrope.trained import table_for

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    method: Step | Sequence[Step],
    *,
    scale: float | Literal["auto"] = 1.0,
    max_scale: float | None = None,
    local_layers: bool = False,
    fuse_projection: bool = False,
    fuse_norms: bool = True,
    **options: Any,
) -> Model:
    """Makes a model of transformers read by another frequency table, with the fused op; returns the model.

    Args:
        model: any model of transformers with rotary position embeddings; patched already, it is patched anew.
        method: a method's name, for a table from the model's own base, rotary dimension and trained length; or a ready
            :class:`FrequencyTable`, the path of its JSON, or the name of one that comes with the package; with
            ``scale="auto"`` also a list of those, one a step.
        scale: by how much to extend the context, with a method's name; or ``"auto"``: every sequence is read with the
            smallest scale of a ladder that covers its length, 1 (the model as it is), 2, 4, and so on. A sequence that
            outgrows its scale has its cached keys turned to the next, and goes on.
        max_scale: where the ladder of ``scale="auto"`` ends; if not given, at 16 times what the model reads as it is.
        local_layers: whether layers that see only a window, and have a RoPE of their own, are extended too.
        fuse_projection: whether q, k and v are projected and rotated by one op, :func:`qkv_rotary`, in models whose
            attention has ``q_proj``, ``k_proj`` and ``v_proj``, or ``qkv_proj``, and nothing between them and the
            rotation. For inference: where the weights want gradients, three projections are done as before.
        fuse_norms: whether the model's RMSNorms, which transformers writes out, are done by torch's own kernel where a
            model is run eagerly; norms of other forms stay as they are. Those of q and k just before the rotation are
            part of its op with or without.
        options: more arguments of :func:`frequency_table`: ``alpha``, ``beta``, ``bounds``, ``power``, ``factors``,
            ``attention_factor``; or ``base`` and ``original_max_position``, in place of what the model's configuration
            says.

    Warns:
        UserWarning: where the model's own code rotates in a way the op does not: then it runs on, by the new table.

    Raises:
        ValueError, TypeError: naming the argument; the model is untouched then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    rotaries = list(model_rope.rotary_embeddings(model))
    if not rotaries:
        raise ValueError(
            f"model must have rotary position embeddings, and {type(model).__name__} has none that mrrope knows"
        )
    if rotaries[0] is model:
        raise ValueError(f"model must be the one that {type(model).__name__} is a part of: it is what gets replaced")
    if scale != "auto" and max_scale is not None:
        raise ValueError(f"max_scale must come with scale='auto', got {max_scale!r} with scale {scale!r}")
    kinds = [layer_type for rotary in rotaries for layer_type in model_rope.layer_types(rotary)]
    if not local_layers and all(model_rope.is_local(layer_type) for layer_type in kinds):
        warnings.warn(
            f"{type(model).__name__} keeps its own tables: all its layers with RoPE see only a window; "
            "local_layers=True extends those",
            UserWarning,
            stacklevel=2,
        )
    ladders = [_ladders_for(rotary, method, scale, max_scale, local_layers, options) for rotary in rotaries]

    before = _state_of(model)
    if before.ladders:
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
    return any(
        isinstance(module, TableRotaryEmbedding) or hasattr(module, SwappedTable.ATTRIBUTE)
        for module in model.modules()
    )


def unpatch(model: Model) -> Model:
    """Makes a patched model exactly what it was; returns it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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


def _ladders_for(
    rotary: nn.Module,
    method: Step | Sequence[Step],
    scale: float | Literal["auto"],
    max_scale: float | None,
    local_layers: bool,
    options: dict[str, Any],
) -> Ladders:
    ladders: Ladders = {}
    for layer_type in model_rope.layer_types(rotary):
        own = model_rope.settings(rotary, layer_type)
        if model_rope.is_local(layer_type) and not local_layers:
            ladders[layer_type] = Ladder.of_one(own.table)
        elif scale == "auto":
            ladders[layer_type] = ladder_for(own, own.table, own.native_length, method, max_scale, options)
        elif isinstance(method, Sequence) and not isinstance(method, str):
            raise ValueError(f"scale must be 'auto' with a list of tables, got {scale!r}")
        else:
            ladders[layer_type] = Ladder.of_one(table_for(own, method, scale, options))
    return ladders


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
        own = {layer_type: model_rope.settings(rotary, layer_type).table for layer_type in ladders}
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
    settings = {layer_type: model_rope.settings(native.original, layer_type) for layer_type in ladders}
    if any(own.position_row is not None for own in settings.values()):
        raise UnfollowableError("its tokens have several positions each")
    if model_rope.changes_with_length(native.original):
        raise UnfollowableError("its own table changes with the length of a text already")
    follower = Follower(owner, ladders, find_cached_keys(owner, native, settings))
    follower.to(next(native.original.buffers()).device)
    if hasattr(type(model), "generate"):
        model.generate = GenerateKnowingLengths(model)  # type: ignore[assignment]
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
