"""Where vLLM builds the rope layers of a model: those of mrrope's rope types are ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mrrope.serving.mark import KEY
from mrrope.serving.rope_layer import ServedRotaryEmbedding, rope_layer
from mrrope.vllm import hooks

FUSED_KERNEL = "use_fused_qk_norm_rope_gate"
"""Attribute of vLLM's attention modules that call a kernel with ``cos_sin_cache`` instead of the rope layer."""


def _served_rope_layer(
    get_rope: Callable[..., Any],
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: dict[str, Any] | None = None,
    **unknown: Any,
) -> Any:
    """Return our layer where ``rope_parameters`` are ours, else vLLM's."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if rope_parameters is None or KEY not in rope_parameters:
        rows = _rows_of_stock_cache(config, max_position)
        return get_rope(head_size, rows, is_neox_style, rope_parameters, dtype, dual_chunk_attention_config, **unknown)
    if given := {name: value for name, value in unknown.items() if value is not None}:
        raise ValueError(f"get_rope must be called without {', '.join(given)} with a rope type of mrrope, got {given}")
    if dual_chunk_attention_config is not None:
        raise ValueError(
            "dual_chunk_attention_config must be None with a rope type of mrrope, got "
            f"{dual_chunk_attention_config}: dual chunk attention has positions of its own"
        )
    return rope_layer(
        config,
        rope_parameters,
        head_size=head_size,
        max_position=max_position,
        is_neox_style=is_neox_style,
        dtype=dtype or torch.get_default_dtype(),
    )


def _rows_of_stock_cache(config: Any, max_position: int) -> int:
    """Return the number of rows of vLLM's own cos/sin cache, which is indexed by position.

    Layers of a served model that see a window only (Gemma 3) keep the model's RoPE, and get positions of the whole
    text.
    """
    if config is None or not hooks.is_served(config):
        return max_position
    model = config.model_config
    is_of_text_model = max_position == getattr(model.hf_text_config, "max_position_embeddings", None)
    return max(max_position, model.max_model_len) if is_of_text_model else max_position


def _without_kernels_of_one_table(initialize_model: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Let models with a fused kernel for norm and rope call the norm and our layer instead.

    The kernel of Qwen3-Next reads ``cos_sin_cache``, which has rounded cosines of one table.
    """
    model = initialize_model(*args, **kwargs)
    for module in model.modules():
        is_fused: Any = getattr(module, FUSED_KERNEL, False)
        if is_fused and isinstance(getattr(module, "rotary_emb", None), ServedRotaryEmbedding):
            setattr(module, FUSED_KERNEL, False)
    return model


def install() -> None:
    """Hook vLLM's factory of rope layers."""
    import vllm.model_executor.layers.rotary_embedding as factory
    import vllm.model_executor.model_loader.utils as loading

    hooks.wrap_everywhere(factory, "get_rope", _served_rope_layer)
    hooks.wrap_everywhere(loading, "initialize_model", _without_kernels_of_one_table)
