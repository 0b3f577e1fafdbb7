"""``patch``, ``unpatch`` and ``patched``: another frequency table, and fused ops, in a model of transformers.

A patch reads the rotary embeddings of a model once, builds their tables, and applies a list of
:class:`~mrrope.hf.module_patch.ModulePatch`. ``unpatch`` undoes the same list backwards.

In a patched forward the rotary embedding (:class:`~mrrope.hf.rotary_embedding.TableRotaryEmbedding`) returns positions
and a packed table. The model's attention passes them to its ``apply_rotary_pos_emb``, which is
:func:`mrrope.hf.conventions.fused` now. :meth:`mrrope.hf.conventions.Convention.rotate` calls the op there.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.cache_probe import UnfollowableError
from mrrope.hf.auto_scale.ladder import Entry, Ladder, ladder_for
from mrrope.hf.auto_scale.module_patch import AnnouncedLengths, AutoScale
from mrrope.hf.cache_guard import CacheGuards
from mrrope.hf.fusion.rms_norm import FusedNorms
from mrrope.hf.kept_cache import KeptCache, whole_that_drops_cache
from mrrope.hf.layer_tables import LayerTables
from mrrope.hf.model_layers import ServedLayers
from mrrope.hf.module_patch import ModulePatch, apply_all, changes_in, restore, undo_all
from mrrope.hf.patch_record import PatchRecord, SavesWarn, record_in
from mrrope.hf.rope_types import expect_rope_parameters
from mrrope.hf.rotary_embedding import (
    FusedRotary,
    RotaryTables,
    Rotation,
    UnfactorableError,
    UnfusableError,
    plan_rotation,
)
from mrrope.hf.swapped_table import SwappedTable
from mrrope.tables.frequency_table import METHODS, FrequencyTable
from mrrope.tables.lookup import PLAIN_ROPE_OPTIONS, ModelTables, resolve_tables

Model = TypeVar("Model", bound=nn.Module)

PATCHING = threading.Lock()
"""Held while a model is patched: probes replace functions of modeling modules, which models in other threads share."""

Settings = dict[str | None, rope_config.RopeSettings]
"""The settings of a stock rotary embedding, by layer type."""
Ladders = dict[str | None, Ladder[rope_config.RotaryTable]]
"""The tables of a rotary embedding, by layer type."""


def module_patches(
    rotations: Sequence[Rotation] = (), ladders: dict[nn.Module, Ladders] | None = None
) -> tuple[ModulePatch[Any], ...]:
    """Return every kind of change that :func:`patch` makes, in the order in which it makes them."""
    tables = FusedRotary(rotations), SwappedTable(rotations), LayerTables()
    return *tables, CacheGuards(), AutoScale(ladders), AnnouncedLengths(), KeptCache(), SavesWarn(), FusedNorms()


PATCHES = module_patches()
"""The patches that find and undo the changes of a model."""


def patch(
    model: Model,
    method: Entry | Sequence[Entry],
    *,
    scale: float | Literal["auto"] | None = None,
    max_scale: float | None = None,
    reserve: int | None = None,
    local_layers: bool = False,
    fuse_norms: bool = False,
    **options: Any,
) -> Model:
    """Replace the RoPE frequencies of a model of transformers and its rotary kernel, and return the model.

    Args:
        model: any model of transformers with rotary position embeddings. A patched model is patched anew. In a model
            of several parts the text model is extended; pass another part, such as an audio tower or a talker, to
            extend that.
        method: a method's name, for a table that extends the model's own frequencies; or a ready
            :class:`FrequencyTable`, :class:`HeadTables` for all layers, a :class:`TableSet`, the path of their JSON, or
            the name of those that come with the package; with ``scale="auto"`` a list of those, one per step, or the
            name that shipped ones of several scales share: ``"smollm2-135m"`` means ``"smollm2-135m-2x"``,
            ``"smollm2-135m-4x"`` and so on.
            A set has an entry for every layer of the model. Entries of layers without RoPE or without keys of their
            own, and of local layers without ``local_layers=True``, are ignored.
        scale: by how much to extend the unpatched model's context length. A method's name needs it, but for ``"rope"``,
            which extends nothing; a ready table has its own, which may be stated. Scale 1 changes logits by rounding
            only. With ``"auto"`` every sequence gets the smallest scale that covers its length: 1 (the model's own
            table), 2, 4, and so on. The cached keys of a sequence that outgrows its scale are re-rotated to the next.
        max_scale: the largest scale of ``scale="auto"``; by default the one that covers 16 times the unpatched model's
            context length. Of a shipped ladder, the tables up to this scale are used.
        reserve: with ``scale="auto"``, the number of new tokens for which ``generate`` chooses a scale in advance; by
            default all that it may write. A text that gets longer than that moves to the next scale as it grows.
        local_layers: whether to extend layers with a sliding window and a RoPE of their own, too.
        fuse_norms: whether to replace the RMSNorms by fused kernels in eager mode, too: torch's, or for norms by
            1 + weight that of ``qk_norm_rotary``. They round once, so that the logits differ in their last bits. Norms
            of other forms keep their code. By default the patch changes RoPE only.
        options: more arguments of :func:`frequency_table`: ``alpha``, ``beta``, ``bounds``, ``power``, ``factors``,
            ``attention_factor``. ``base`` or ``original_max_position`` start from plain RoPE instead of the model's
            own extension; with a ready table they state that it is meant for a model with these values.

    Warns:
        UserWarning: where the op cannot be fused: the model's own code then rotates by the new table; where the
            configuration names an extension that may be meant to be replaced instead of extended; where no layer sees
            past its sliding window; where the whole that a base model is a part of drops its cache (Phi-3).

    Raises:
        ValueError, TypeError: naming the argument; the model is then unchanged.
    """
    _check_arguments(model, scale, max_scale, reserve)
    settings = _stock_settings(model)
    if not local_layers and all(rope_config.is_local(kind) for by_layer in settings.values() for kind in by_layer):
        warnings.warn(
            f"{type(model).__name__} keeps its own tables: all its layers with RoPE see only a window; "
            "local_layers=True extends those",
            UserWarning,
            stacklevel=2,
        )
    resolved = {
        rotary: _resolved(own, method, scale, max_scale, reserve, local_layers, options)
        for rotary, own in settings.items()
    }
    ladders = {
        rotary: _fitted(by_layer, settings[rotary], ServedLayers.of(model, rotary))
        for rotary, by_layer in resolved.items()
    }
    given = {"scale": scale, "max_scale": max_scale, "reserve": reserve, "local_layers": local_layers}
    record = _record(method, given | {"fuse_norms": fuse_norms} | options, resolved.values())
    is_extended_by_scale = scale == "auto" or (scale not in (None, 1.0) and method in METHODS)
    if options.keys().isdisjoint(PLAIN_ROPE_OPTIONS) and is_extended_by_scale:
        _warn_of_extensions(type(model).__name__, settings.values(), scale, local_layers)
    _warn_of_windows(type(model).__name__, settings, ladders)
    if (whole := whole_that_drops_cache(model)) is not None:
        warnings.warn(
            f"{type(model).__name__} is patched without {whole}, which drops its cache where it generates past its "
            f"native length, and then reads one token alone: patch the {whole} if the model is a part of one",
            UserWarning,
            stacklevel=2,
        )

    before = changes_in(model, PATCHES)
    try:
        undo_all(before)
        rotations = _apply(model, settings, ladders, fuse_norms, record)
        for attention, error in {name: e for rotation in rotations for name, e in rotation.unprobed.items()}.items():
            message = (
                f"{type(model).__name__} gets the fused op, and {attention} could not be probed "
                f"({type(error).__name__}: {error}): if it computes with cosines and sines itself, its forward raises"
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        for why in (rotation.unfusable for rotation in rotations if rotation.unfusable is not None):
            message = f"{type(model).__name__} gets the table but not the fused op: {why}"
            warnings.warn(message, UserWarning, stacklevel=2)  # raises under the filter "error"
    except BaseException as error:
        restore(model, PATCHES, before)
        if isinstance(error, UnfactorableError):
            expected = f"method must hold no query_factors for {type(model).__name__}"
            raise ValueError(f"{expected}: {error}, got {method!r}") from None
        if isinstance(error, (UnfusableError, UnfollowableError)):
            needed = (
                "scale must be a number" if scale == "auto" else "method must be one table for all heads and layers"
            )
            got = scale if scale == "auto" else method
            raise ValueError(f"{needed} for {type(model).__name__}: {error}, got {got!r}") from None
        raise
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch` changed this model."""
    return bool(changes_in(_checked(model), PATCHES))


def patch_of(model: nn.Module) -> PatchRecord | None:
    """Return the method, the scale and the tables that :func:`patch` gave to a model; None where it is not patched.

    Where parts of a model were patched one by one, the record is that of the first.
    """
    return record_in(_checked(model))


def unpatch(model: Model) -> Model:
    """Give a patched model its own modules and functions back, and return it.

    Raises:
        ValueError: the model is not patched.
    """
    changes = changes_in(_checked(model), PATCHES)
    if not changes:
        raise ValueError(f"model must be a patched one, and this {type(model).__name__} is not")
    undo_all(changes)
    return model


@contextlib.contextmanager
def patched(model: Model, method: Entry | Sequence[Entry], **options: Any) -> Iterator[Model]:
    """:func:`patch` a model for a ``with`` block, and restore its former patch, or none, afterwards."""
    before = changes_in(_checked(model), PATCHES)
    patch(model, method, **options)
    try:
        yield model
    finally:
        restore(model, PATCHES, before)


def _checked(model: Model) -> Model:
    if not isinstance(model, nn.Module):
        hint = ": pass its .model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    return model


def _check_arguments(model: nn.Module, scale: float | Literal["auto"] | None, max_scale: Any, reserve: Any) -> None:
    _checked(model)
    expect_rope_parameters()
    if isinstance(scale, bool) or (isinstance(scale, str) and scale != "auto"):
        raise TypeError(f"scale must be a number or 'auto', got {scale!r}")
    if scale != "auto" and max_scale is not None:
        raise ValueError(f"max_scale must come with scale='auto', got {max_scale!r} with scale {scale!r}")
    if scale != "auto" and reserve is not None:
        raise ValueError(f"reserve must come with scale='auto', got {reserve!r} with scale {scale!r}")
    if reserve is not None and (not isinstance(reserve, int) or isinstance(reserve, bool) or reserve < 0):
        raise ValueError(f"reserve must be a non-negative integer, got {reserve!r}")


def _stock_settings(model: nn.Module) -> dict[nn.Module, Settings]:
    """Return the settings that the rotary embeddings of a model have without a patch."""
    rotaries = list(rope_config.rotary_embeddings(model))
    if not rotaries:
        raise ValueError(
            f"model must have rotary position embeddings, and {type(model).__name__} has none that mrrope knows"
        )
    if rotaries[0] is model:
        raise ValueError(f"model must be the one that {type(model).__name__} is a part of: it is what gets replaced")
    held = rope_config.held_attention_factor(model)
    found: dict[nn.Module, Settings] = {}
    for rotary in rotaries:
        swap = SwappedTable().state_of(rotary)
        found[rotary] = swap.tables.settings if swap is not None else {
            layer_type: replace(rope_config.settings(rotary, layer_type), held_attention_factor=held)
            for layer_type in rope_config.layer_types(rotary)
        }  # fmt: skip
    return found


def _resolved(
    settings: Settings,
    method: Entry | Sequence[Entry],
    scale: float | Literal["auto"] | None,
    max_scale: float | None,
    reserve: int | None,
    local_layers: bool,
    options: dict[str, Any],
) -> dict[str | None, Ladder[ModelTables]]:
    """Return the tables that the arguments of a patch mean, by layer type."""
    ladders: dict[str | None, Ladder[ModelTables]] = {}
    for layer_type, own in settings.items():
        native: ModelTables = own.table
        if rope_config.is_local(layer_type) and not local_layers:
            ladders[layer_type] = Ladder.of_one(native)
        elif scale == "auto":
            ladder = ladder_for(own, native, method, max_scale, options, resolve_tables)
            ladders[layer_type] = replace(ladder, reserve=reserve)
        elif isinstance(method, Sequence) and not isinstance(method, str):
            raise ValueError(f"scale must be 'auto' with a list of tables, got {scale!r}")
        else:
            ladders[layer_type] = Ladder.of_one(resolve_tables(own, method, scale, options))
    return ladders


def _fitted(resolved: dict[str | None, Ladder[ModelTables]], settings: Settings, layers: ServedLayers) -> Ladders:
    """Return tables as a rotary embedding hands them to its layers, without those of types that keep their own code."""
    ladders: Ladders = {}
    for layer_type, ladder in resolved.items():
        own = settings[layer_type]
        fitted = tuple(layers.fitted(table, layer_type, own.table) for table in ladder.tables)
        keeps_table = isinstance(fitted[0], FrequencyTable) and fitted[0].is_like(own.table)
        if own.changes_with_length and ladder.is_fixed and keeps_table:
            continue  # the model's own code stays: no single table reproduces it at every length
        ladders[layer_type] = Ladder(fitted, ladder.reaches, ladder.reserve)
    return ladders


def _record(
    method: Entry | Sequence[Entry],
    given: dict[str, Any],
    resolved: Iterable[dict[str | None, Ladder[ModelTables]]],
) -> PatchRecord:
    """Return the record of a patch with these arguments."""
    by_layer = [(rope_config.is_local(kind), ladder.tables) for each in resolved for kind, ladder in each.items()]
    tables = next((tables for is_local, tables in by_layer if not is_local), by_layer[0][1])
    scale: float | Literal["auto"] = "auto" if given["scale"] == "auto" else tables[0].scale
    name = method if isinstance(method, str) and method in METHODS else None
    what = repr(str(method)) if isinstance(method, (str, Path)) else "tables"
    defaults = {key: parameter.default for key, parameter in inspect.signature(patch).parameters.items()}
    changed = [f"{key}={value!r}" for key, value in given.items() if value != defaults.get(key)]
    return PatchRecord(name, scale, tables, f"mrrope.patch({', '.join(['model', what, *changed])})")


def _warn_of_extensions(
    name: str, settings: Iterable[Settings], scale: float | Literal["auto"] | None, local_layers: bool
) -> None:
    """Name both meanings of a scale where a configuration extends RoPE by a method that needs no training."""
    for layer_type, own in (item for by_layer in settings for item in by_layer.items()):
        warning = own.extension_warning(name, scale)
        if warning is not None and (local_layers or not rope_config.is_local(layer_type)):
            warnings.warn(warning, UserWarning, stacklevel=3)
            return


def _warn_of_windows(name: str, settings: dict[nn.Module, Settings], ladders: dict[nn.Module, Ladders]) -> None:
    """Say where a model is extended past the window that all its layers have, under one RoPE."""
    for rotary, by_layer in ladders.items():
        ladder, own = by_layer.get(None), settings[rotary].get(None)
        if ladder is None or own is None:
            continue
        tables = [table for step in ladder.tables for table in (step if isinstance(step, tuple) else (step,))]
        reach = max(table.original_max_position * table.scale for table in tables)
        warning = rope_config.window_warning(name, rotary.config, own.original_max_position, reach)
        if warning is not None:
            warnings.warn(warning, UserWarning, stacklevel=3)
            return


@torch.inference_mode(mode=False)  # inference tensors could not take part in training later
@torch.no_grad()
def _apply(
    model: nn.Module,
    settings: dict[nn.Module, Settings],
    ladders: dict[nn.Module, Ladders],
    fuse_norms: bool,
    record: PatchRecord,
) -> list[Rotation]:
    """Apply the list of patches to an unpatched model."""
    with PATCHING:
        rotations = []
        for rotary, by_layer in ladders.items():
            tables = {layer_type: ladder.tables for layer_type, ladder in by_layer.items()}
            rotations.append(plan_rotation(model, rotary, RotaryTables(settings[rotary], tables, record)))
        patches = module_patches(rotations, ladders)
        apply_all(model, [patch for patch in patches if fuse_norms or not isinstance(patch, FusedNorms)])
        return rotations
