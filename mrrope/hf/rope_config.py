"""What a model of transformers says of its RoPE: its rotary embeddings, and the settings of each kind of layer."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mrrope.hf.rope_types import ROPE_TYPES
from mrrope.table_lookup import NativeRope
from mrrope.tables import FrequencyTable, frequency_table

FREQUENCIES = "inv_freq"
UNTRAINED = ("yarn", "dynamic")
"""Extensions that transformers names and users put into configurations, without training."""


@dataclass(frozen=True)
class RopeSettings(NativeRope):
    """RoPE of one kind of layer, as the model comes."""

    table: FrequencyTable = field(kw_only=True)
    """What the model rotates by now."""
    turning: torch.Tensor = field(kw_only=True)
    """Which pairs turn at all, bool."""
    position_row: torch.Tensor | None = field(kw_only=True)
    """Where a token has several positions: which of them turns each pair."""
    changes_with_length: bool = field(kw_only=True)
    """Whether the model's own code takes other frequencies for longer texts, within the length that it reads."""
    untrained_extension: str | None = field(kw_only=True)
    """The extension that the configuration names, where that is of a kind that needs no training."""

    def packed(self, table: FrequencyTable) -> torch.Tensor:
        """A table as the op takes it, for this kind of layer: pairs that stand still go on standing still."""
        packed = table.packed(torch.device("cpu")).clone()
        packed[:-1] *= self.turning
        if self.position_row is None:
            return packed
        return torch.stack([packed, torch.nn.functional.pad(self.position_row, (0, 1))])[None]


def rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model's text part that give positions their cosines and sines."""
    found = []
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not parameters or not layer_types(module) or parameters.get("rope_type") == "axial":
            continue
        if "position_ids" in inspect.signature(module.forward).parameters:
            found.append(module)
    for whole in _outermost_models(model):
        inside = set(whole.modules())
        own = [module for module in found if module in inside]
        # Where no part is the text's, all of them are.
        yield from [module for module in own if _is_for_text(module, whole)] or own


def _outermost_models(module: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers in a module, itself or parts of it, each whole."""
    if hasattr(getattr(module, "config", None), "get_text_config"):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _is_for_text(rotary: nn.Module, model: Any) -> bool:
    """Whether a rotary embedding is the text's in a model: not an audio tower's, a codec's, a talker's."""
    config, whole = rotary.config, model.config
    if whole.is_encoder_decoder:
        reads_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
        return reads_text or rotary in set(model.get_decoder().modules())
    parts = list(_parts_of(whole))
    text = whole.get_text_config(decoder=True)
    if text is whole:  # the text may be in a part of a part
        nested = (part.get_text_config(decoder=True) for part in parts)
        text = next((config for config, part in zip(nested, parts, strict=True) if config is not part), whole)
    is_other_part = any(config is part for part in parts)
    # Some models give their layers copies of the text's configuration.
    return config is text or (type(config) is type(text) and not is_other_part)


def _parts_of(config: Any) -> Iterator[Any]:
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "get_text_config"):
            yield part
            yield from _parts_of(part)


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


def attribute(layer_type: str | None, name: str) -> str:
    """The name under which a rotary embedding keeps a thing for one kind of layer."""
    return name if layer_type is None else f"{layer_type}_{name}"


def settings(module: nn.Module, layer_type: str | None, length: int | None = None) -> RopeSettings:
    """What a rotary embedding does for one kind of layer: by its own frequencies, not by those that its configuration
    would give elsewhere; at a length, if not given the one that the model reads."""
    config: Any = module.config
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    own = attribute(layer_type, FREQUENCIES)
    if getattr(module, own).is_meta:
        raise ValueError(f"model must have its weights: {type(module).__name__}.{own} is on the meta device")
    module = in_full_precision(module, layer_type)
    trained_length = parameters.get("original_max_position_embeddings")
    stated = getattr(config, "max_position_embeddings", None)
    native_length = _native_length(parameters, stated)
    reached = length or native_length
    rows = position_row(module, layer_type, getattr(module, own).numel())
    now = module if reached is None else _at_length(module, layer_type, int(reached), rows)
    frequencies: torch.Tensor = getattr(now, own).double().cpu()
    for_short_texts = getattr(module, attribute(layer_type, f"original_{FREQUENCIES}"), getattr(module, own))
    base = float(parameters["rope_theta"])
    rotary_dim = 2 * frequencies.numel()
    turning = frequencies != 0
    plain = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    factors = _slowdown(plain, torch.where(turning, frequencies, plain))
    table = frequency_table(
        "longrope",
        rotary_dim=rotary_dim,
        base=base,
        original_max_position=native_length or 1.0,
        factors=factors,
        attention_factor=getattr(now, attribute(layer_type, "attention_scaling"), 1.0),
    )
    is_plain = bool((factors == 1.0).all()) and table.attention_factor == 1.0
    extension, factor = parameters.get("rope_type"), parameters.get("factor") or 1.0
    is_untrained = extension in (*UNTRAINED, *ROPE_TYPES) and factor > 1.0
    return RopeSettings(
        rotary_dim,
        base,
        native_length,
        native=None if is_plain else table,
        trained_length=trained_length or stated,
        table=table,
        turning=turning,
        position_row=rows,
        changes_with_length=not torch.equal(for_short_texts.double().cpu(), frequencies),
        untrained_extension=f"{extension} with factor {factor:g}" if is_untrained else None,
    )


def _native_length(parameters: dict[str, Any], stated: float | None) -> float | None:
    """How far a model reads as it is."""
    factor = parameters.get("factor") or 1.0
    trained: float | None = parameters.get("original_max_position_embeddings")
    if trained is None and parameters.get("rope_type") == "dynamic":
        trained = stated
    # Of `linear`, which has no trained length, the stated length is the extended one; factors of `longrope` and
    # `llama3` are no ratio of lengths: Llama 3.2 has 32 for 8192 to 131072 tokens.
    if trained is None or (stated is not None and parameters.get("rope_type") in ("longrope", "llama3")):
        return stated
    return max(stated or trained, float(trained * factor))


def in_full_precision(module: nn.Module, layer_type: str | None) -> nn.Module:
    """A rotary embedding whose frequencies no cast of the model has rounded: made anew, if that gives the same ones."""
    name = attribute(layer_type, FREQUENCIES)
    rounded: torch.Tensor = getattr(module, name)
    eps = torch.finfo(rounded.dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return module
    anew: nn.Module = type(module)(config=module.config).to(rounded.device)
    frequencies: torch.Tensor = getattr(anew, name).to(rounded)
    is_same = frequencies.shape == rounded.shape and torch.allclose(frequencies, rounded, rtol=eps, atol=0.0)
    return anew if is_same else module


def _at_length(module: nn.Module, layer_type: str | None, length: int, rows: torch.Tensor | None) -> nn.Module:
    """A rotary embedding with the frequencies that it takes for a text of this length."""
    kinds: Any = module.rope_type
    kind = kinds[layer_type] if isinstance(kinds, dict) else kinds
    if "dynamic" not in kind and kind != "longrope":
        return module
    at_length = copy.deepcopy(module)
    device = next(at_length.buffers()).device
    extra = {} if layer_type is None else {"layer_type": layer_type}
    shape = (1, 1) if rows is None else (int(rows.max()) + 1, 1, 1)
    for position in (0, length - 1):  # a short text first, for types that keep the frequencies of the longest so far
        at_length(torch.zeros(1, 1, 1, device=device), torch.full(shape, position, device=device), **extra)
    return at_length


def _slowdown(plain: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The cumulative scales of a model's frequencies: exact where those are plain RoPE's to rounding, in any order."""
    order = frequencies.argsort(descending=True, stable=True)
    exact = torch.empty_like(plain)
    exact[order] = plain
    # transformers computes base ** x in float32: the rounding of x counts log(base) times.
    slack = (4.0 - plain.min().log()) * torch.finfo(torch.float32).eps
    is_plain = (frequencies / exact - 1.0).abs() <= slack
    return plain / torch.where(is_plain, exact, frequencies)


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


def held_attention_factor(model: nn.Module) -> float:
    """The root of the temperature that the attention of DeepSeek and its like applies to its logits, beside
    1 / sqrt(head_dim), where their configuration extends RoPE."""
    for module in model.modules():
        config, scaling, head_dim = (getattr(module, name, None) for name in ("config", "scaling", "qk_head_dim"))
        parameters = getattr(config, "rope_parameters", None) or {}
        if parameters.get("mscale_all_dim") and isinstance(scaling, float) and isinstance(head_dim, int):
            held = math.sqrt(scaling * math.sqrt(head_dim))
            return 1.0 if math.isclose(held, 1.0) else held
    return 1.0


def position_row(module: nn.Module, layer_type: str | None, pairs: int) -> torch.Tensor | None:
    """Which of a token's several positions turns each pair, asked of the module's own code; None where it has one."""
    compose: Callable[..., torch.Tensor] | None = getattr(module, "recomposition_frequencies", None)
    if compose is None:
        return None
    extra = [layer_type] if "layer_type" in inspect.signature(compose).parameters else []
    failures: list[Exception] = []
    possible = (2, 3, 4)
    for rows in possible:
        named = (
            torch.arange(rows, device=next(module.buffers()).device)
            .float()
            .view(rows, 1, 1, 1)
            .expand(rows, 1, 1, pairs)
            .contiguous()
        )
        try:
            composed = compose(named, *extra).flatten().long().cpu()
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            failures.append(error)
            continue
        if len(set(composed.tolist())) == rows:
            # One number a component: twice over for halves, each twice for interleaved pairs.
            is_halves = composed.numel() == pairs or bool((composed[:pairs] == composed[pairs:]).all())
            return composed[:pairs] if is_halves else composed[::2]
    if len(failures) == len(possible):
        raise ValueError(
            f"model must have a rotary embedding that runs, and {type(module).__name__} with rope_parameters "
            f"{module.config.rope_parameters} does not: {failures[-1]}"  # type: ignore[union-attr]
        )
    return None
