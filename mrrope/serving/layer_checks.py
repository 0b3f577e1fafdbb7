"""Tables per layer and head beside the configuration of a model, before any process builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrrope.hf.model_layers import ServedLayers
from mrrope.serving.mark import KEY
from mrrope.serving.rope_settings import ServedRope

NORMS_OF_QUERIES = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "nanochat")
"""Model types whose attention norms rotated queries, which cancels their factors. Llama 4's may, too."""


def require_fitting(rope_parameters: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError where tables are for another number of layers or heads than a model has.

    The layers are counted as :func:`mrrope.patch` counts them. What a configuration does not state is not checked.
    Query factors are refused where they would have no effect.

    Args:
        rope_parameters: As :func:`mrrope.serving.rope_settings.merged` returns them; or those of each layer type.
        config: The configuration of the text model.
    """
    if None in (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")):
        return
    layers = ServedLayers(config.model_type, config, holders=())
    for layer_type, own in {None: rope_parameters}.items() if KEY in rope_parameters else rope_parameters.items():
        served = ServedRope.of(own) if isinstance(own, Mapping) else None
        for table in served.ready_tables if served is not None else ():
            try:
                layers.require_fitting(table, layer_type)
            except ValueError as error:
                raise ValueError(f"rope_parameters do not fit the model: {error}") from None
            if table.query_heads is not None and _norms_queries(config):
                raise ValueError(
                    f"rope_parameters do not fit the model: table must hold no query_factors for {config.model_type}, "
                    f"which norms rotated queries, got {table!r}"
                )


def _norms_queries(config: Any) -> bool:
    norms_by_choice = config.model_type == "llama4_text" and config.use_qk_norm
    return norms_by_choice or config.model_type in NORMS_OF_QUERIES
