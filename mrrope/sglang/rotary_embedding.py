"""Where SGLang builds the rope layers of a model: those of mrrope's rope types are ours."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mrrope.serving.mark import KEY
from mrrope.serving.rope_layer import ServedRotaryEmbedding, rope_layer

FUSED_KERNELS = ("use_fused_qk_norm_rope", "use_fused_qk_norm_rope_cpu", "use_fused_qk_norm_mrope")
"""Attributes of SGLang's attention modules that call a kernel for norm and rope instead of the rope layer."""

LOADED_MODEL: contextvars.ContextVar[Any] = contextvars.ContextVar("loaded_model", default=None)
"""The configuration of the model that is being loaded, whose layers of equal settings are one."""

OTHER_POSITIONS = ("video_rope", "mrope_interleaved_glm")
"""Keys of ``rope_parameters`` by which SGLang assigns pairs to rows of positions as no table of ours does."""

OWN_ROTATION = ("cos_sin_cache", "try_bf16_rope_store", "create_fused_set_kv_buffer_arg")
"""Names in the code of attention modules that rotate by their own kernels."""


def get_rope(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    dual_chunk_attention_config: dict[str, Any] | None = None,
    **unknown: Any,
) -> Any:
    """Return our layer where ``rope_scaling`` is ours, else SGLang's."""
    if rope_scaling is None or KEY not in rope_scaling:
        return original(
            head_size,
            rotary_dim,
            max_position,
            base,
            is_neox_style,
            rope_scaling,
            dtype,
            partial_rotary_factor,
            dual_chunk_attention_config,
            **unknown,
        )
    for name, value in {"dual_chunk_attention_config": dual_chunk_attention_config, **unknown}.items():
        if value is not None:
            raise ValueError(f"get_rope's {name} must be None with a rope type of mrrope, got {value!r}")
    for name in OTHER_POSITIONS:
        if rope_scaling.get(name):
            raise ValueError(
                f"rope_parameters' {name} must be off with a rope type of mrrope, got {rope_scaling[name]!r}: its "
                "order of positions is not served"
            )
    stated = rope_scaling.get("rope_theta", base)
    if base != stated:
        raise ValueError(
            f"base must be the rope_theta of rope_parameters, {stated!r}, got {base!r}: the model's implementation in "
            "SGLang rotates these layers by another base"
        )
    # The model knows how much of a head rotates; its configuration may not.
    parameters = {
        **rope_scaling,
        "rope_theta": base,
        "rope_dim": int(rotary_dim * partial_rotary_factor) if partial_rotary_factor < 1.0 else rotary_dim,
    }
    return rope_layer(
        LOADED_MODEL.get(),
        parameters,
        head_size=head_size,
        max_position=max_position,
        is_neox_style=is_neox_style,
        dtype=dtype or torch.get_default_dtype(),
    )


def write_cache_apart(forward_batch: Any) -> bool:
    """Return False: no kernel that rotates q and k writes the cache, too. Replaces ``enable_fused_set_kv_buffer``."""
    return False


def require_served(model: nn.Module) -> None:
    """Let attention layers call our rope layer, and raise ValueError where one rotates by anything else.

    Layers with a sliding window may keep a RoPE of their own.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    of_attention: list[bool] = []
    for name, module in model.named_modules():
        children = list(module.children())
        windows = [child.sliding_window_size for child in children if isinstance(child, RadixAttention)]
        if not windows:
            continue
        of_attention.append(any(isinstance(child, ServedRotaryEmbedding) for child in children))
        if of_attention[-1]:
            _require_unfused(name, module)
        elif min(windows) < 0:
            raise ValueError(_unserved(model, f"{name} of "))
    if of_attention and not any(of_attention):
        raise ValueError(_unserved(model, ""))


def _unserved(model: nn.Module, part: str) -> str:
    return (
        f"rope_parameters must be honoured by the model's implementation in SGLang, but {part}{type(model).__name__} "
        "holds no rotary embedding of mrrope: it cannot be served with mrrope"
    )


def _require_unfused(name: str, module: nn.Module) -> None:
    """Turn off kernels that replace the rope layer; raise ValueError where there is no way to."""
    if found := [flag for flag in FUSED_KERNELS if hasattr(module, flag)]:
        for flag in found:
            setattr(module, flag, False)
        return
    source = _source(type(module))
    if "enable_fused_set_kv_buffer" in source:  # which is write_cache_apart now
        source = source.replace("create_fused_set_kv_buffer_arg", "")
    if read := [word for word in OWN_ROTATION if word in source]:
        raise ValueError(
            f"attention layers must rotate by their rope layer alone, but {name}, a {type(module).__name__}, calls a "
            f"kernel of its own ({', '.join(read)}): it cannot be served with mrrope"
        )


def _source(kind: type[nn.Module]) -> str:
    """Return the code of a class and of those it inherits from, up to PyTorch's."""
    others = ("torch", "builtins", "abc", "typing")
    return "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.partition(".")[0] not in others)
