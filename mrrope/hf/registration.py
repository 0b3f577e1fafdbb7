"""``register_rope_types``: configurations of transformers that name mrrope's types, and models that hold its tables.

A rope type of transformers gives a model one table. ``rope_type`` ``mrrope`` with head tables or a set therefore starts
as plain RoPE, and wrappers of ``PreTrainedModel.post_init`` and ``from_pretrained`` patch the model.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

from mrrope.hf import kept_cache, rope_config
from mrrope.hf.patch import patch
from mrrope.hf.rope_types import ROPE_TYPES, TABLE_TYPE, register_types, tables_per_layer_or_head
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.table_set import TableSet


def register_rope_types() -> None:
    """Register ``mrrope_pro``, ``mrrope_uni``, ``mrrope_pow``, ``yarn_ratio`` and ``mrrope`` as a ``rope_type``.

    Call it before a configuration that names one of them is loaded or built: ``import mrrope`` changes nothing in
    transformers. This imports transformers and stays for the whole process; calling it again has no effect.

    The ``rope_parameters`` are ``rope_type``, ``rope_theta``, ``factor``, ``original_max_position_embeddings``, and
    ``power`` for ``mrrope_pow``. Optional are ``partial_rotary_factor``, ``beta_slow``, ``beta_fast``, ``bounds`` and
    ``attention_factor``. Names and meanings are those of transformers' ``yarn``.

    ``mrrope`` takes ready tables as ``table``: a dict of ``to_dict``, the path of a JSON, or the name of shipped ones.
    Models with head tables or a set are patched when they are built or loaded: ``PreTrainedModel.post_init`` and
    ``from_pretrained`` are wrapped, and leave models of other configurations alone. Phi-3 and its relatives keep their
    cache with all of these types.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.0.
    """
    register_types()
    patch_models_as_configured(importlib.import_module("transformers.modeling_utils"))


def patch_as_configured(model: nn.Module) -> None:
    """Patch a model with the tables per layer or head that its configuration holds, if any.

    With mrrope's other rope types the model keeps its cache where its class would drop it
    (:mod:`mrrope.hf.kept_cache`): their frequencies do not change with the length.

    A model on the meta device is not patched: ``from_pretrained`` builds such models, and patches them once loaded.
    """
    config: Any = model.config
    if _parameters_of(config, (*ROPE_TYPES, TABLE_TYPE)) and kept_cache.drops_cache(model):
        setattr(model, kept_cache.PREPARE, kept_cache.PrepareInputsKeepingCache(model, is_configured=True))
    # Before anything that may raise: get_text_config does, for a model of several text parts.
    if not any(_parameters_of(part, (TABLE_TYPE,)) for part in (config, *rope_config.sub_configs(config))):
        return
    tables, local_layers = _tables_of_text(config)
    if tables is None or any(buffer.is_meta for buffer in model.buffers()):
        return
    patch(model, tables, local_layers=local_layers)


def _parameters_of(config: Any, rope_types: Sequence[str]) -> dict[str | None, dict[str, Any]]:
    """Return the ``rope_parameters`` of some types in a configuration, by layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return {}
    by_type = {None: parameters} if "rope_type" in parameters else parameters
    return {
        layer_type: own
        for layer_type, own in by_type.items()
        if isinstance(own, dict) and own.get("rope_type") in rope_types
    }


def _tables_of_text(config: Any) -> tuple[HeadTables | TableSet | None, bool]:
    """Return the tables in the configuration of a model's text part, and whether they are for local layers too."""
    by_type = _parameters_of(config.get_text_config(decoder=True), (TABLE_TYPE,))
    found = {layer_type: tables_per_layer_or_head(own) for layer_type, own in by_type.items()}
    several = {layer_type: tables for layer_type, tables in found.items() if tables is not None}
    tables = next(iter(several.values()), None)
    if any(other != tables for other in several.values()):
        raise ValueError(f"rope_parameters must hold the same tables for all layer types, got {several}")
    return tables, any(rope_config.is_local(layer_type) for layer_type in several)


def patch_models_as_configured(modeling: ModuleType) -> None:
    """Wrap ``post_init`` and ``from_pretrained`` of transformers' models, once."""
    base = modeling.PreTrainedModel
    if getattr(base.post_init, "patches_as_configured", False):
        return
    post_init, from_pretrained = base.post_init, base.from_pretrained.__func__

    @functools.wraps(post_init)
    def patching_post_init(self: Any) -> None:
        post_init(self)
        patch_as_configured(self)

    @functools.wraps(from_pretrained)
    def patching_from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = from_pretrained(cls, *args, **kwargs)
        patch_as_configured(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    patching_post_init.patches_as_configured = True  # type: ignore[attr-defined]
    base.post_init = patching_post_init
    base.from_pretrained = classmethod(patching_from_pretrained)
