"""Tables per layer and key head beside the configuration of a model, before any process builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrrope.hf.model_layers import ServedLayers
from mrrope.serving.mark import KEY
from mrrope.serving.rope_settings import ServedRope


def require_fitting(rope_parameters: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError where tables are for another number of layers or key heads than a model has.

    The layers are counted as :func:`mrrope.patch` counts them. What a configuration does not state is not checked.

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
