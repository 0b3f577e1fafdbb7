"""What a model of transformers says of its RoPE: its rotary embeddings, and the settings of each kind of layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope.tables import FrequencyTable, frequency_table

FREQUENCIES = "inv_freq"
LOCAL_ATTENTION = ("sliding_attention", "chunked_attention")
"""Kinds of layers that never look past a window, and so need no extension."""


@dataclass(frozen=True)
class RopeSettings:
    """RoPE of one kind of layer, before any extension."""

    base: float
    rotary_dim: int
    original_max_position: float
    table: FrequencyTable
    """What the model turns by now."""


def rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that give positions their cosines and sines; those of vision towers are left out."""
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not parameters or not layer_types(module) or parameters.get("rope_type") == "axial":
            continue
        if "position_ids" in inspect.signature(module.forward).parameters:
            yield module


def layer_types(module: nn.Module) -> list[str | None]:
    """The kinds of layers that a rotary embedding serves; [None] where it makes no difference."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(FREQUENCIES)]
    names = [name for name in names if not name.endswith((f"original_{FREQUENCIES}", f"long_{FREQUENCIES}"))]
    if FREQUENCIES in names:
        return [None]
    return [name.removesuffix(f"_{FREQUENCIES}") for name in names]


def attribute(layer_type: str | None, name: str) -> str:
    """The name under which a rotary embedding keeps a thing for one kind of layer."""
    return name if layer_type is None else f"{layer_type}_{name}"


def settings(module: nn.Module, layer_type: str | None) -> RopeSettings:
    """The settings of one kind of layer, from the model's own configuration."""
    config: Any = module.config
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    frequencies: torch.Tensor = getattr(module, attribute(layer_type, FREQUENCIES)).double().cpu()
    base = float(parameters["rope_theta"])
    rotary_dim = 2 * frequencies.numel()
    length = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    plain = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    table = frequency_table(
        "longrope",
        rotary_dim=rotary_dim,
        base=base,
        original_max_position=length,
        factors=plain / frequencies,
        attention_factor=getattr(module, attribute(layer_type, "attention_scaling"), 1.0),
    )
    return RopeSettings(base, rotary_dim, float(length), table)
