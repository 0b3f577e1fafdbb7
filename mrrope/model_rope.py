"""What a model of transformers says of its RoPE: its rotary embeddings, and the settings of each kind of layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope.tables import FrequencyTable, frequency_table
from mrrope.trained import Trained

FREQUENCIES = "inv_freq"


@dataclass(frozen=True)
class RopeSettings(Trained):
    """RoPE of one kind of layer, before any extension."""

    table: FrequencyTable
    """What the model turns by now."""
    turning: torch.Tensor
    """Which pairs turn at all, bool."""
    position_row: torch.Tensor | None
    """Where a token has several positions: which of them turns each pair."""
    native_length: float | None
    """How far the model reads as it is, with the extension that its configuration may name already."""

    def packed(self, table: FrequencyTable) -> torch.Tensor:
        """A table as the op takes it, for this kind of layer: pairs that stand still go on standing still."""
        packed = table.packed(torch.device("cpu")).clone()
        packed[:-1] *= self.turning
        if self.position_row is None:
            return packed
        return torch.stack([packed, torch.nn.functional.pad(self.position_row, (0, 1))])[None]


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


def is_local(layer_type: str | None) -> bool:
    """Whether layers of this kind never look past a window, and so need no extension."""
    return layer_type is not None and any(word in layer_type for word in ("sliding", "chunked", "local"))


def changes_with_length(module: nn.Module) -> bool:
    """Whether a rotary embedding computes its frequencies anew as texts get longer."""
    kinds: Any = module.rope_type
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in name or name == "longrope" for name in names)


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
    length = parameters.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    turning = frequencies != 0
    plain = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    table = frequency_table(
        "longrope",
        rotary_dim=rotary_dim,
        base=base,
        original_max_position=length or 1.0,
        factors=torch.where(turning, plain / frequencies, 1.0),
        attention_factor=getattr(module, attribute(layer_type, "attention_scaling"), 1.0),
    )
    rows = position_row(module, layer_type, rotary_dim // 2)
    stated = getattr(config, "max_position_embeddings", None)
    native_length = max(stated or length, length * (parameters.get("factor") or 1.0)) if length else None
    return RopeSettings(rotary_dim, base, length, table, turning, rows, native_length)


def global_settings(model: nn.Module) -> RopeSettings:
    """The settings of the layers that see the whole text."""
    for module in rotary_embeddings(model):
        for layer_type in layer_types(module):
            if not is_local(layer_type):
                return settings(module, layer_type)
    raise ValueError(
        f"model must have rotary embeddings of transformers for layers that see the whole text, and "
        f"{type(model).__name__} has none"
    )


def position_row(module: nn.Module, layer_type: str | None, pairs: int) -> torch.Tensor | None:
    """Which of a token's several positions turns each pair, asked of the module's own code; None where it has one."""
    compose: Callable[..., torch.Tensor] | None = getattr(module, "recomposition_frequencies", None)
    if compose is None:
        return None
    extra = [] if layer_type is None else [layer_type]
    for rows in (2, 3, 4):
        named = (
            torch.arange(rows, device=next(module.buffers()).device)
            .float()
            .view(rows, 1, 1, 1)
            .expand(rows, 1, 1, pairs)
            .contiguous()
        )
        try:
            composed = compose(named, *extra).flatten().long().cpu()
        except (RuntimeError, IndexError, ValueError):
            continue
        if len(set(composed.tolist())) == rows:
            # One number a component: twice over for halves, each twice for interleaved pairs.
            is_halves = composed.numel() == pairs or bool((composed[:pairs] == composed[pairs:]).all())
            return composed[:pairs] if is_halves else composed[::2]
    return None
