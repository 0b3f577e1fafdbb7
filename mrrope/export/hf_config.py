"""Export of a frequency table as a configuration of transformers, vLLM and SGLang.

Engines without mrrope support ``longrope``, which divides each frequency by a factor: the table's cumulative scales.
The attention factor is exported beside them. There is no list of models: transformers builds the model from the
configuration, which shows how it rotates, and builds it again from the exported one to check the frequencies.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mrrope.hf import rope_config, rotary_embedding
from mrrope.hf.model_layers import ServedLayers
from mrrope.hf.pair_sources import pair_sources
from mrrope.hf.rope_types import OPTIONS, ROPE_TYPES, TABLE_TYPE, types_registered
from mrrope.tables.frequency_table import SCALE_ONLY_METHODS, FrequencyTable
from mrrope.tables.lookup import PLAIN_ROPE_OPTIONS, ModelTables, NativeRope, resolve_tables
from mrrope.tables.table_set import every_table

ENGINES = ("transformers", "transformers-longrope", "vllm", "sglang")

REPLACED = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", *OPTIONS}
REPLACED |= {"truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}
REPLACED |= {"short_factor", "long_factor", "short_mscale", "long_mscale"}
"""Keys of ``rope_parameters`` that describe an extension and are replaced; others, such as ``mrope_section``, stay."""

FLOAT_TAG = "__float__"
"""transformers' encoding of numbers that JSON lacks: ``{"__float__": "Infinity"}``."""

MSCALES_READ = {"phimoe"}
"""Model types that take the attention factor from ``short_mscale`` and ``long_mscale`` in transformers as well."""

PAST_ALL_TEXTS = 2**31 - 1

LONGROPE_UNREAD = {
    "vllm": {"gpt_oss": "always builds YaRN", "dbrx": "always builds plain RoPE"},
    "sglang": {"grok": "builds its own scaling"},
}
"""Model types whose code in an engine ignores the configuration's ``rope_type``, and what it does instead."""


def export_config(
    config: Any,
    method: str | ModelTables | Path,
    *,
    scale: float | None = None,
    engine: str = "vllm",
    local_layers: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return the ``config.json`` of a model that behaves as if patched by ``mrrope.patch`` with the same arguments.

    Args:
        config: A configuration of transformers, its dict, the path of a ``config.json`` or its folder, or a model.
        method: A method's name, a ``FrequencyTable``, ``HeadTables``, a ``TableSet``, or the path of the JSON of one
            of those.
        scale: Factor by which a method extends the context; required with one that extends. Ready tables have their
            own.
        engine: The program that reads the configuration. ``transformers`` exports one of mrrope's own rope types,
            short and readable, for programs that call :func:`mrrope.register_rope_types`. Ready tables, and methods
            that are no rope type, are exported whole, under ``rope_type`` ``mrrope``. Phi-3, whose configuration
            accepts no other type, gets ``longrope``. ``transformers-longrope``, ``vllm`` and ``sglang`` export
            ``longrope``, which needs no mrrope and holds one table for all layers and heads.
        local_layers: Whether to extend layers that attend to a window only and have their own RoPE.
        **options: More arguments of ``frequency_table``.

    Returns:
        The configuration as a dict for ``config.json``.

    Warns:
        UserWarning: The configuration names an extension that may be meant to be replaced instead of extended; or no
            layer sees past its sliding window.

    Raises:
        ValueError: An argument is invalid, or the engine cannot express the result; the message says why.
        TypeError: An argument has the wrong type.
        FileNotFoundError: There is no configuration at the path ``config``.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    # For this call only: afterwards transformers knows mrrope's types no more than before.
    with types_registered():
        return _exported(config, method, scale, engine, local_layers, options)


def _exported(
    config: Any,
    method: str | ModelTables | Path,
    scale: float | None,
    engine: str,
    local_layers: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    data, parsed = read_config(config)
    text = parsed.get_text_config()
    model, rotary = _empty_model(text)
    if engine in LONGROPE_UNREAD:
        _check_engine(engine, text, model, rotary)

    served = ServedLayers.of(model, next(rope_config.rotary_embeddings(model)))
    starts_over = not options.keys().isdisjoint(PLAIN_ROPE_OPTIONS)
    extension_warnings: list[str] = []
    window_warnings: list[str] = []
    from_plain: dict[str | None, bool] = {}
    extended: dict[str | None, ModelTables] = {}
    for layer_type in rope_config.layer_types(rotary):
        if rope_config.is_local(layer_type) and not local_layers:
            continue
        own = rope_config.settings(rotary, layer_type)
        if not own.rotated_pairs.all():
            raise ValueError(
                f"some pairs of {text.model_type} do not rotate, which no rope_type for other frequencies can say; "
                "use mrrope.patch"
            )
        table = exportable_tables(own, method, scale, options)
        served.fitted(table, layer_type, own.table)  # refuses what mrrope.patch refuses
        if engine != "transformers":
            require_one_table(engine, table)
        if own.changes_with_length and table.is_like(own.table):
            raise ValueError(f"method must extend {text.model_type}, whose own table changes with the length of a text")
        extended[layer_type] = table
        warning = own.extension_warning(text.model_type, scale)
        if warning is not None and not starts_over:
            extension_warnings.append(warning)
        reach = table.original_max_position * table.scale
        if layer_type is None and (
            warning := rope_config.window_warning(text.model_type, text, own.original_max_position, reach)
        ):
            window_warnings.append(warning)
        from_plain[layer_type] = starts_over or own.native is None

    for warning in [*extension_warnings[:1], *window_warnings]:
        warnings.warn(warning, UserWarning, stacklevel=3)
    if not extended:
        raise ValueError(f"all layers of {text.model_type} see a window only; local_layers=True extends them too")
    longest = max(table.original_max_position * table.scale for table in extended.values())
    length = max(int(longest), getattr(text, "max_position_embeddings", None) or 0)
    as_longrope = engine != "transformers"
    if not as_longrope:
        rope_types = {
            layer_type: _registered_type(table, method if from_plain[layer_type] else None, options)
            for layer_type, table in extended.items()
        }
        parameters = _with_rope_types(text, extended, rope_types, length, as_longrope=False)
        exported = _with_rope(data, parsed, parameters, length, legacy=False)
        has_one_table = all(isinstance(table, FrequencyTable) for table in extended.values())
        # Configurations such as Phi-3's accept longrope only.
        as_longrope = has_one_table and not _is_accepted(type(parsed), exported)
    if as_longrope:
        rope_types = {layer_type: _longrope(require_one_table(engine, table)) for layer_type, table in extended.items()}
        parameters = _with_rope_types(text, extended, rope_types, length, as_longrope=True)
        exported = _with_rope(data, parsed, parameters, length, legacy=True)
    rebuilt = _parse(type(parsed), exported).get_text_config()
    _check_exported(rebuilt, model, extended)
    if as_longrope and engine not in LONGROPE_UNREAD and hasattr(rebuilt, "original_max_position_embeddings"):
        # Phi-3 and its relatives drop their cache at this length, to switch to the long factors, which are equal here.
        parameters["original_max_position_embeddings"] = PAST_ALL_TEXTS
    if engine in LONGROPE_UNREAD:
        # vLLM and SGLang read the attention factor from these two keys, which transformers does not have.
        parameters |= _mscales(parameters["attention_factor"])
    if engine == "sglang":
        # SGLang switches to the long factors where a position exceeds the original length, and to the short ones below
        # it, so that exactly at that length it would rotate by position 0. Both factors are equal here, so the short
        # ones serve all positions.
        parameters["original_max_position_embeddings"] = length
    return _with_rope(data, parsed, parameters, length, legacy=as_longrope)


def _with_rope_types(
    text: Any,
    tables: dict[str | None, ModelTables],
    rope_types: dict[str | None, dict[str, Any]],
    length: int,
    *,
    as_longrope: bool,
) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a configuration with other rope types for the extended layer types."""
    parameters: dict[str, Any] = copy.deepcopy(text.rope_parameters)
    for layer_type, table in tables.items():
        old = parameters if layer_type is None else parameters[layer_type]
        new = {key: value for key, value in old.items() if key not in REPLACED} | rope_types[layer_type]
        if as_longrope and "original_max_position_embeddings" in old:
            # Attention may depend on it too, as in Ministral 3. Short and long factors are equal, so both lengths work.
            new["original_max_position_embeddings"] = old["original_max_position_embeddings"]
        if text.model_type in MSCALES_READ:
            # Without its tables per layer or head a model is plain RoPE.
            new |= _mscales(table.attention_factor if isinstance(table, FrequencyTable) else 1.0)
        if layer_type is None:
            return new
        parameters[layer_type] = new
        if as_longrope:
            # Past the original length transformers 5.17 switches to the long factors, and with one RoPE per layer type
            # the second switch raises. Both factors are equal here, so the original length is set past all texts.
            new |= {"original_max_position_embeddings": length, "factor": 1.0}
    return parameters


def exportable_tables(
    trained: NativeRope, method: str | ModelTables | Path, scale: float | None, options: dict[str, Any]
) -> ModelTables:
    """Return the tables of a method, which must have cumulative scales: engines take tables in that form only."""
    tables = resolve_tables(trained, method, scale, options)
    if not all(table.cumulative_scale.numel() for table in every_table(tables)):
        raise ValueError(f"method must be a table with cumulative scales, and {tables!r} has none")
    return tables


def require_one_table(engine: str, tables: ModelTables) -> FrequencyTable:
    """Return a single table.

    Raises:
        ValueError: ``tables`` are per layer or head, which the engine cannot express.
    """
    if not isinstance(tables, FrequencyTable):
        raise ValueError(
            f"{engine} has one table for all layers and heads and cannot express {tables!r}; it takes a FrequencyTable "
            f"or a method ({', '.join(SCALE_ONLY_METHODS)}), and engine='transformers' takes these tables"
        )
    return tables


def read_config(config: Any) -> tuple[dict[str, Any], Any]:
    """Return a configuration as a dict for ``config.json`` (a copy) and as an object of transformers."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if isinstance(config, nn.Module):
        config = getattr(config, "config", None)
    if isinstance(config, PreTrainedConfig):
        return json.loads(config.to_json_string()), copy.deepcopy(config)
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"config must be a config.json or a folder with one, and there is no {path}")
        try:
            config = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise TypeError(
            "config must be a configuration of transformers, its dict, its path or a model of transformers, "
            f"got {type(config).__name__}"
        )
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"config must have a model_type that transformers knows, got {model_type!r}")
    data = _strict_json(config)
    return data, _parse(CONFIG_MAPPING[model_type], data)


def _strict_json(value: Any) -> Any:
    """Return a copy that strict JSON can represent, infinities included."""
    if isinstance(value, dict):
        return {key: _strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_TAG: json.dumps(value)}
    return copy.deepcopy(value)


def _from_strict_json(value: Any) -> Any:
    """Invert ``_strict_json``."""
    if isinstance(value, dict):
        if value.keys() == {FLOAT_TAG}:
            return float(value[FLOAT_TAG])
        return {key: _from_strict_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_strict_json(item) for item in value]
    return copy.deepcopy(value)


def _parse(config_class: Any, data: dict[str, Any]) -> Any:
    try:
        return config_class.from_dict(_from_strict_json(data))
    except Exception as error:  # transformers raises errors of many kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers refuses this configuration of {data['model_type']}: {reason}") from error


def _is_accepted(config_class: Any, data: dict[str, Any]) -> bool:
    try:
        _parse(config_class, data)
    except ValueError:
        return False
    return True


def _empty_model(text: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model on the meta device, and its rotary embedding with real frequencies."""
    from transformers import MODEL_MAPPING, AutoModel

    try:
        build = AutoModel.from_config if type(text) in MODEL_MAPPING else _class_in_modeling_file(text)
        with torch.device("meta"):
            model = build(text)
    except Exception as error:  # transformers raises errors of many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"transformers cannot build a {text.model_type} of this configuration: {reason}") from error
    rotaries = list(rope_config.rotary_embeddings(model))
    if not rotaries:
        raise ValueError(f"config must be of a model with rotary position embeddings, and {text.model_type} has none")
    own: list[Any] = [rotary.config for rotary in rotaries]
    if any(type(one) is not type(text) or one.rope_parameters != text.rope_parameters for one in own):
        raise ValueError(
            f"mrrope has no export of {text.model_type}: parts of it have RoPEs that differ from rope_parameters; "
            "use mrrope.patch"
        )
    return model, type(rotaries[0])(config=text)


def _class_in_modeling_file(text: Any) -> type[nn.Module]:
    """Return the model class of a configuration that ``AutoModel`` lacks, such as a bare text model's."""
    modeling = importlib.import_module(type(text).__module__.replace("configuration_", "modeling_"))
    for _, found in inspect.getmembers(modeling, inspect.isclass):
        if issubclass(found, nn.Module) and found.__dict__.get("config_class") is type(text):
            return found
    raise ValueError(f"{modeling.__name__} has no model for a {type(text).__name__}")


def _check_engine(engine: str, text: Any, model: nn.Module, rotary: nn.Module) -> None:
    """Raise ValueError where the longrope of vLLM or SGLang cannot express the model's rotation."""

    def cannot(why: str) -> ValueError:
        return ValueError(f"{engine} cannot run {text.model_type} by another table: {why}")

    if text.model_type in LONGROPE_UNREAD[engine]:
        raise cannot(f"its code there {LONGROPE_UNREAD[engine][text.model_type]}, whatever the configuration says")
    if getattr(text, "dual_chunk_attention_config", None):
        raise cannot("with dual_chunk_attention_config it always rotates by plain RoPE")
    if rope_config.layer_types(rotary) != [None]:
        # Only some models there read nested rope_parameters, and there is no list of them.
        raise ValueError(f"mrrope has no export of {text.model_type} for {engine}: each kind of its layers has a RoPE")
    pairs = getattr(rotary, rope_config.FREQUENCIES).numel()
    if pair_sources(rotary, None, pairs) is not None:
        raise cannot("it has M-RoPE, and longrope there takes one position a token")
    try:
        found, _ = rotary_embedding.functions_for(model, rotary, {None: rope_config.settings(rotary, None)})
    except rotary_embedding.UnfusableError as reason:
        raise cannot(f"longrope there pairs component i with i + rotary_dim / 2, but {reason}") from None
    if any(function.convention.pairing != "halves" or function.convention.rotates_last for function in found):
        raise cannot("longrope there pairs component i with i + rotary_dim / 2, and this model pairs others")


def _number(value: float) -> float | int:
    """Return whole numbers as int, as configurations store them."""
    return int(value) if value == int(value) else value


def _longrope(table: FrequencyTable) -> dict[str, Any]:
    factors = table.cumulative_scale.tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": table.base,
        "factor": table.scale,
        "original_max_position_embeddings": _number(table.original_max_position),
        "short_factor": factors,
        "long_factor": list(factors),
        "attention_factor": table.attention_factor,
    }


def _mscales(attention_factor: float) -> dict[str, float]:
    return {"short_mscale": attention_factor, "long_mscale": attention_factor}


def _registered_type(table: ModelTables, method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return tables as one of mrrope's rope types.

    Args:
        table: The tables.
        method: What they were made by; None where they extend other frequencies than plain RoPE's. The name of a rope
            type is exported with its options, which are short and readable. All others hold the tables themselves.
        options: More arguments that they were made with.
    """
    parameters: dict[str, Any] = {
        "rope_theta": table.base,
        "factor": table.scale,  # which DeepSeek's attention reads for every type but the default
        "original_max_position_embeddings": _number(table.original_max_position),
    }
    if isinstance(method, str) and method in ROPE_TYPES:
        named = {key: options[argument] for key, argument in OPTIONS.items() if argument in options}
        return {"rope_type": method, **parameters, **named}
    return {"rope_type": TABLE_TYPE, **parameters, "table": table.to_dict()}


def _section(data: dict[str, Any], parsed: Any, text: Any) -> dict[str, Any]:
    """Return the text model's section of a configuration's dict."""
    if parsed is text:
        return data
    for name in parsed.sub_configs:
        sub = getattr(parsed, name, None)
        if sub is not None and sub.get_text_config() is text:
            return _section(data.setdefault(name, {}), sub, text)
    raise ValueError(f"config must hold its text model's configuration, and that of {parsed.model_type} does not")


def _with_rope(
    data: dict[str, Any], parsed: Any, parameters: dict[str, Any], length: int, *, legacy: bool
) -> dict[str, Any]:
    """Return a configuration's dict with other RoPE, in the keys of transformers 5, and of 4 if ``legacy``."""
    exported = copy.deepcopy(data)
    text = parsed.get_text_config()
    section = _section(exported, parsed, text)
    for key in ("rope_scaling", "rope_theta"):
        section.pop(key, None)
    section[text.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = length
    section["rope_parameters"] = copy.deepcopy(parameters)
    if "rope_type" not in parameters:
        return exported  # These are parameters by layer type, which transformers 4 does not support.
    if hasattr(text, "original_max_position_embeddings"):
        section["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    if legacy:
        section["rope_theta"] = parameters["rope_theta"]
        section["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
        if "partial_rotary_factor" in parameters:
            section["partial_rotary_factor"] = parameters["partial_rotary_factor"]
        if getattr(text, "head_dim", 1) is None:
            section["head_dim"] = text.hidden_size // text.num_attention_heads
    return exported


def _check_exported(text: Any, model: nn.Module, tables: dict[str | None, ModelTables]) -> None:
    """Raise ValueError where the exported configuration gives another rotation than a patched model."""
    rebuilt, rotary = _empty_model(text)
    for layer_type, table in tables.items():
        if not isinstance(table, FrequencyTable):
            continue  # transformers' own code is plain RoPE then, and the model is patched when it is built
        found: torch.Tensor = getattr(rotary, rope_config.attribute(layer_type, rope_config.FREQUENCIES))
        factor: float = getattr(rotary, rope_config.attribute(layer_type, "attention_scaling"))
        is_same = found.shape == table.inv_freq.shape and torch.allclose(found.double(), table.inv_freq, 1e-5, 0.0)
        if not is_same or abs(factor - table.attention_factor) > 1e-6:
            raise ValueError(
                f"transformers does not take the frequencies of {text.model_type} from rope_parameters alone, so that "
                "no configuration can replace them; use mrrope.patch"
            )
    # DeepSeek's YaRN scales the attention logits as well.
    before, after = ([getattr(module, "scaling", None) for module in made.modules()] for made in (model, rebuilt))
    if before != after:
        raise ValueError(
            f"the attention of {text.model_type} is scaled by the rope_parameters that were to be replaced, so that no "
            "configuration gives what mrrope.patch does"
        )
