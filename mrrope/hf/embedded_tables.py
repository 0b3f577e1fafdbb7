"""Models whose configuration holds tables per layer or head: patched as soon as they are built or loaded.

A rope type of transformers gives a model one table. ``rope_type`` ``mrrope`` with head tables or a set therefore starts
as plain RoPE, and wrappers of ``PreTrainedModel.post_init`` and ``from_pretrained`` patch the model.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from mrrope.head_tables import HeadTables
from mrrope.hf import rope_types
from mrrope.table_set import TableSet

MODELING_MODULE = "transformers.modeling_utils"


def patch_as_configured(model: nn.Module) -> None:
    """Patch a model with the tables per layer or head that its configuration holds, if any."""
    tables, local_layers = _tables_per_layer_or_head(model.config)
    if tables is None:
        return
    from mrrope.hf.patch import patch  # imports torch._dynamo and more, which most programs do not need here

    patch(model, tables, local_layers=local_layers)


def _tables_per_layer_or_head(config: Any) -> tuple[HeadTables | TableSet | None, bool]:
    """Return the tables in the configuration of a model's text part, and whether they are for local layers too."""
    from mrrope.hf.rope_config import is_local

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    parameters = getattr(text, "rope_parameters", None) or {}
    by_type = {None: parameters} if "rope_type" in parameters else parameters
    found = {
        layer_type: rope_types.embedded_table(own)
        for layer_type, own in by_type.items()
        if isinstance(own, dict) and own.get("rope_type") == rope_types.TABLE_TYPE
    }
    several = {layer_type: table for layer_type, table in found.items() if isinstance(table, (HeadTables, TableSet))}
    tables = next(iter(several.values()), None)
    if any(table != tables for table in several.values()):
        raise ValueError(f"rope_parameters must hold the same tables for all layer types, got {several}")
    return tables, any(is_local(layer_type) for layer_type in several)


def install(modeling: ModuleType) -> None:
    """Wrap ``post_init`` and ``from_pretrained`` of transformers' models, once."""
    base = modeling.PreTrainedModel
    if getattr(base.post_init, "patches_as_configured", False):
        return
    post_init, from_pretrained = base.post_init, base.from_pretrained.__func__

    @functools.wraps(post_init)
    def patching_post_init(self: Any) -> None:
        post_init(self)
        # from_pretrained builds models on the meta device, and patches them once they are loaded.
        if not any(buffer.is_meta for buffer in self.buffers()):
            patch_as_configured(self)

    @functools.wraps(from_pretrained)
    def patching_from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = from_pretrained(cls, *args, **kwargs)
        patch_as_configured(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    patching_post_init.patches_as_configured = True  # type: ignore[attr-defined]
    base.post_init = patching_post_init
    base.from_pretrained = classmethod(patching_from_pretrained)
