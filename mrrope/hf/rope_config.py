"""RoPE of a stock transformers model: its rotary embeddings, and the settings of each layer type."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mrrope.hf.pair_sources import PairSources, pair_sources
from mrrope.hf.rope_types import ROPE_TYPES, TABLE_TYPE, tables_per_layer_or_head
from mrrope.tables.frequency_table import FrequencyTable, frequency_table
from mrrope.tables.lookup import NativeRope
from mrrope.tables.position_rows import packed_rows
from mrrope.tables.query_factors import bits_of_factors, factor_rows
from mrrope.tables.table_set import OfOneLayer, without_query_factors

FREQUENCIES = "inv_freq"
UNTRAINED = ("yarn", "dynamic")
"""Values of ``rope_type`` that users add to a configuration without training. ``longrope`` is one, too, where it
:func:`has_equal_factors`: those that models are trained with differ."""

RotaryTable = OfOneLayer | tuple[OfOneLayer, ...]
"""What a patched rotary embedding hands to its layers: the same for all, or a tuple with one per layer of the model."""


@dataclass(frozen=True)
class RopeSettings(NativeRope):
    """RoPE of one layer type in the unpatched model."""

    table: FrequencyTable = field(kw_only=True)
    """The table that the model rotates by."""
    rotated_pairs: torch.Tensor = field(kw_only=True)
    """Bool mask of the nonzero frequencies."""
    sources: PairSources | None = field(kw_only=True)
    """For tokens with several positions (M-RoPE): the row of positions and the frequency that rotate each pair."""
    changes_with_length: bool = field(kw_only=True)
    """Whether the model's own code changes its frequencies with the length of the text, within its native length."""

    def packed(self, table: RotaryTable) -> torch.Tensor:
        """Return the packed table for this layer type. Pairs that the model does not rotate get frequency 0.

        Returns:
            ``[W]``, or ``[1, 2, W]`` with rows of positions; of head tables ``[1, R, H, W]``; of a tuple
            ``[layers, 1, R, H, W]``, where one table for all heads of a layer is repeated. R is 1, with rows of
            positions 2, and with query factors 2 and the rows that hold them.
        """
        if not isinstance(table, FrequencyTable):
            return self.packed_ladder([table])
        packed = self._packed_heads(table, 1)[:, :, 0]
        return packed[0, 0] if self.sources is None else packed

    def packed_ladder(self, tables: Sequence[RotaryTable]) -> torch.Tensor:
        """Return several tables as one tensor, all in the form of the one with the most dimensions.

        Returns:
            ``[tables, W]``, or ``[tables, 2, W]`` with rows of positions; with head tables among them
            ``[tables, R, H, W]``; with tuples ``[layers, tables, R, H, W]``.
        """
        if all(isinstance(table, FrequencyTable) for table in tables):
            packed = [self.packed(table) for table in tables]
            return torch.stack(packed) if self.sources is None else torch.cat(packed)
        layers = next((len(table) for table in tables if isinstance(table, tuple)), None)
        by_scale = [table if isinstance(table, tuple) else (table,) * (layers or 1) for table in tables]
        every = [table for of_scale in by_scale for table in of_scale]
        heads = max(len(_tables_in(table)) for table in every)
        query_heads = max(table.query_heads or 0 for table in every)
        by_layer = [
            torch.cat([self._packed_heads(table, heads, query_heads) for table in of_layer])
            for of_layer in zip(*by_scale, strict=True)
        ]
        return by_layer[0] if layers is None else torch.stack(by_layer)

    def _packed_heads(self, table: OfOneLayer, heads: int, query_heads: int = 0) -> torch.Tensor:
        """Return a table as ``[1, R, H, W]``; with query heads, whose factors are 1 where the table has none."""
        words = torch.stack([each.packed(torch.device("cpu")) for each in _tables_in(table)])
        words[:, :-1] *= self.rotated_pairs
        rows = [words.expand(heads, -1)]
        if self.sources is not None:
            words[:, :-1] = words[:, self.sources.frequency]
            rows.append(packed_rows(self.sources.row).expand(heads, -1))
        elif query_heads:
            rows.append(torch.zeros_like(rows[0]))  # factors begin in the row after those of positions
        if query_heads:
            factors = table.query_factors or (1.0,) * query_heads
            rows.extend(factor_rows(bits_of_factors(factors), heads, words.shape[-1]))
        return torch.stack(rows)[None]


def _tables_in(table: OfOneLayer) -> Sequence[FrequencyTable]:
    return [table] if isinstance(table, FrequencyTable) else tuple(table)


def of_keys(table: RotaryTable) -> RotaryTable:
    """Return what rotates the keys: the tables without query factors."""
    return tuple(map(without_query_factors, table)) if isinstance(table, tuple) else without_query_factors(table)


def has_query_factors(table: RotaryTable) -> bool:
    """Whether query heads have factors, in one layer at least."""
    return any(each.query_heads is not None for each in (table if isinstance(table, tuple) else (table,)))


def rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the rotary embedding modules of a model's text part."""
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
        # Without a text part, all rotary embeddings count.
        yield from [module for module in own if _is_for_text(module, whole)] or own


def _outermost_models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost transformers models in a module, which may be the module itself."""
    if hasattr(getattr(module, "config", None), "get_text_config"):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _is_for_text(rotary: nn.Module, model: Any) -> bool:
    """Whether a rotary embedding is in the text part, not in an audio tower, a codec or a talker."""
    config, whole = rotary.config, model.config
    if whole.is_encoder_decoder:
        reads_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
        return reads_text or rotary in set(model.get_decoder().modules())
    parts = list(sub_configs(whole))
    text = whole.get_text_config(decoder=True)
    if text is whole:  # the text model may be nested two levels deep
        nested = (part.get_text_config(decoder=True) for part in parts)
        text = next((config for config, part in zip(nested, parts, strict=True) if config is not part), whole)
    is_other_part = any(config is part for part in parts)
    # Some models give their layers copies of the text configuration.
    return config is text or (type(config) is type(text) and not is_other_part)


def sub_configs(config: Any) -> Iterator[Any]:
    """Yield the configurations of a model's parts, and of theirs."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "get_text_config"):
            yield part
            yield from sub_configs(part)


def layer_types(module: nn.Module) -> list[str | None]:
    """Return the layer types that a rotary embedding serves; [None] where all layers share one RoPE."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(FREQUENCIES)]
    names = [name for name in names if not name.endswith((f"original_{FREQUENCIES}", f"long_{FREQUENCIES}"))]
    if FREQUENCIES in names:
        return [None]
    return [name.removesuffix(f"_{FREQUENCIES}") for name in names]


def is_local(layer_type: str | None) -> bool:
    """Whether layers of this type attend to a window only, and so need no extension."""
    return layer_type is not None and any(word in layer_type for word in ("sliding", "chunked", "local"))


def window_of_all_layers(config: Any) -> int | None:
    """Return the sliding window of a model in which every attention layer has one; None where a layer has none."""
    # First, since configurations with unlike layers refuse to name one window for all.
    if not all(map(is_local, getattr(config, "layer_types", None) or [])):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return None if getattr(config, "use_sliding_window", None) is False else window


def window_warning(name: str, config: Any, native_length: float | None, reach: float) -> str | None:
    """Return what to warn of where a model is extended past the window that all its layers have; else None.

    Args:
        name: the model's.
        config: its configuration.
        native_length: the native context length.
        reach: the extended context length.
    """
    window = window_of_all_layers(config)
    if window is None or native_length is None or reach <= max(window, native_length):
        return None
    return (
        f"{name} reads {reach:.15g} tokens so, but no layer sees further back than its sliding window of {window}: "
        "sliding_window and layer_types in the configuration say which layers see the whole text"
    )


def attribute(layer_type: str | None, name: str) -> str:
    """Return the name of a rotary embedding's attribute for one layer type."""
    return name if layer_type is None else f"{layer_type}_{name}"


def settings(module: nn.Module, layer_type: str | None, length: int | None = None) -> RopeSettings:
    """Return the settings of one layer type, from the module's own frequencies instead of its configuration.

    Args:
        module: The rotary embedding.
        layer_type: One of ``layer_types(module)``.
        length: Length of the text, for types whose frequencies depend on it; the native length by default.

    Raises:
        ValueError: The module is on the meta device.
    """
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
    # Without its tables per layer or head a model is plain RoPE, which reads less than the configuration states.
    embedded = tables_per_layer_or_head(parameters)
    native_length = length_read(parameters, stated) if embedded is None else embedded.original_max_position
    reached = length or native_length
    sources = pair_sources(module, layer_type, getattr(module, own).numel())
    now = module if reached is None else _at_length(module, layer_type, int(reached), sources)
    frequencies: torch.Tensor = getattr(now, own).double().cpu()
    for_short_texts = getattr(module, attribute(layer_type, f"original_{FREQUENCIES}"), getattr(module, own))
    base = float(parameters["rope_theta"])
    rotary_dim = 2 * frequencies.numel()
    rotated_pairs = frequencies != 0
    plain = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    factors = _cumulative_scales(plain, torch.where(rotated_pairs, frequencies, plain))
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
    is_of_one_table = has_equal_factors(parameters)
    if is_of_one_table and stated is not None and (trained_length or 0) >= stated:
        trained_length = stated / factor  # exports say a length that no text exceeds, so that nothing switches there
    is_added = extension in (*UNTRAINED, *ROPE_TYPES, TABLE_TYPE) or is_of_one_table
    is_untrained = is_added and factor > 1.0 and embedded is None
    return RopeSettings(
        rotary_dim,
        base,
        native_length,
        native=None if is_plain else table,
        trained_length=trained_length or stated,
        table=table,
        rotated_pairs=rotated_pairs,
        sources=sources,
        changes_with_length=not torch.equal(for_short_texts.double().cpu(), frequencies),
        untrained_extension=f"{extension} with factor {factor:g}" if is_untrained else None,
    )


def has_equal_factors(parameters: Mapping[str, Any]) -> bool:
    """Whether ``rope_parameters`` are a ``longrope`` that never switches its factors, as in exports of mrrope."""
    return parameters.get("rope_type") == "longrope" and parameters.get("short_factor") == parameters.get("long_factor")


def length_read(parameters: dict[str, Any], stated: float | None) -> float | None:
    """Return the native context length of a model.

    Args:
        parameters: The ``rope_parameters`` of a layer type.
        stated: The configuration's ``max_position_embeddings``.
    """
    factor = parameters.get("factor") or 1.0
    trained: float | None = parameters.get("original_max_position_embeddings")
    if trained is None and parameters.get("rope_type") == "dynamic":
        trained = stated
    # `linear` has no trained length, and states the extended one. Factors of `longrope` and `llama3` are not a ratio
    # of lengths: Llama 3.2 has 32 for 8192 to 131072 tokens.
    if trained is None or (stated is not None and parameters.get("rope_type") in ("longrope", "llama3")):
        return stated
    return max(stated or trained, float(trained * factor))


def in_full_precision(module: nn.Module, layer_type: str | None) -> nn.Module:
    """Return a rotary embedding with float32 frequencies.

    Where a cast of the model has rounded them, the module is rebuilt from its configuration, if that gives the same
    frequencies to rounding.
    """
    name = attribute(layer_type, FREQUENCIES)
    rounded: torch.Tensor = getattr(module, name)
    eps = torch.finfo(rounded.dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return module
    rebuilt: nn.Module = type(module)(config=module.config).to(rounded.device)
    frequencies: torch.Tensor = getattr(rebuilt, name).to(rounded)
    is_same = frequencies.shape == rounded.shape and torch.allclose(frequencies, rounded, rtol=eps, atol=0.0)
    return rebuilt if is_same else module


def _at_length(module: nn.Module, layer_type: str | None, length: int, sources: PairSources | None) -> nn.Module:
    """Return a rotary embedding with its frequencies for a text of this length."""
    kinds: Any = module.rope_type
    kind = kinds[layer_type] if isinstance(kinds, dict) else kinds
    if "dynamic" not in kind and kind != "longrope":
        return module
    at_length = copy.deepcopy(module)
    device = next(at_length.buffers()).device
    extra = {} if layer_type is None else {"layer_type": layer_type}
    shape = (1, 1) if sources is None else (sources.rows, 1, 1)
    for position in (0, length - 1):  # short first: some types keep the frequencies of the longest text so far
        at_length(torch.zeros(1, 1, 1, device=device), torch.full(shape, position, device=device), **extra)
    return at_length


def _cumulative_scales(plain: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the cumulative scales of frequencies; exactly 1 where those are plain RoPE's to rounding, in any order."""
    order = frequencies.argsort(descending=True, stable=True)
    exact = torch.empty_like(plain)
    exact[order] = plain
    # transformers computes base ** x in float32, which amplifies the rounding of x by log(base).
    slack = (4.0 - plain.min().log()) * torch.finfo(torch.float32).eps
    is_plain = (frequencies / exact - 1.0).abs() <= slack
    return plain / torch.where(is_plain, exact, frequencies)


def global_settings(model: nn.Module) -> RopeSettings:
    """Return the settings of the layers that attend to the whole text."""
    for module in rotary_embeddings(model):
        for layer_type in layer_types(module):
            if not is_local(layer_type):
                return settings(module, layer_type)
    raise ValueError(
        f"model must have rotary embeddings of transformers for layers that see the whole text, and "
        f"{type(model).__name__} has none"
    )


def held_attention_factor(model: nn.Module) -> float:
    """Return the attention factor that the model's attention applies itself; 1 for most models.

    DeepSeek's attention scales its logits by more than 1 / sqrt(head_dim) where the configuration extends RoPE. The
    factor is the square root of that temperature.
    """
    for module in model.modules():
        config, scaling, head_dim = (getattr(module, name, None) for name in ("config", "scaling", "qk_head_dim"))
        parameters = getattr(config, "rope_parameters", None) or {}
        if parameters.get("mscale_all_dim") and isinstance(scaling, float) and isinstance(head_dim, int):
            held = math.sqrt(scaling * math.sqrt(head_dim))
            return 1.0 if math.isclose(held, 1.0) else held
    return 1.0
