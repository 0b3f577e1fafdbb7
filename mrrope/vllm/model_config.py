"""Hooks in vLLM's model configuration: ``rope_parameters`` of mrrope are merged with the model's own.

After them a configuration holds ``rope_parameters`` as :func:`mrrope.serving.rope_settings.merged` writes them, whether
``--hf-overrides``, a function, or ``config.json`` selected mrrope, and ``max_model_len`` is what the tables reach.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mrrope.hf.rope_config import is_local
from mrrope.hf.rope_types import expect_rope_parameters
from mrrope.serving.layer_checks import require_fitting
from mrrope.serving.mark import KEY
from mrrope.serving.rope_request import OWN_TYPES, selects_mrrope
from mrrope.serving.rope_settings import ServedRope, merged, served_rope
from mrrope.vllm.hooks import wrap

NAMES = ("rope_parameters", "rope_scaling")
"""The attribute of a configuration, and its old name."""


def _quiet_validation() -> None:
    """Let transformers' validation pass over parameters of mrrope: :func:`merged` checks them.

    Called before every file is read, since ``mrrope.register_rope_types`` replaces what it finds.
    """
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin as Mixin

    def validate(
        original: Callable[..., None], config: Any, parameters: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if KEY not in parameters and not selects_mrrope(parameters):
            original(config, parameters, *args, **kwargs)

    for rope_type in OWN_TYPES:
        if not hasattr(Mixin, f"_validate_{rope_type}_rope_parameters"):
            setattr(Mixin, f"_validate_{rope_type}_rope_parameters", lambda *args, **kwargs: None)
    for name in [name for name in dir(Mixin) if name.startswith("_validate_") and name.endswith("_rope_parameters")]:
        wrap(Mixin, name, validate)


def get_config(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    hf_overrides_fn: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a configuration, with parameters that its file or a function of the user sets."""
    expect_rope_parameters()
    _quiet_validation()
    function = None if hf_overrides_fn is None else _OverrideFunction(hf_overrides_fn)
    config = original(model, *args, hf_overrides_fn=function, **kwargs)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if parameters is not None and _asks(parameters):
        text.rope_parameters = _of_file(parameters, text, Path(model) if Path(model).is_dir() else None)
    if function is not None and function.given is not None:
        _extend(text, function.given)
    return config


class _OverrideFunction:
    """A function of the user that overrides a configuration. Parameters of mrrope that it sets are taken out again.

    They are merged after vLLM has standardized and validated the model's own.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.given: Mapping[str, Any] | None = None

    def __call__(self, config: Any) -> Any:
        before = copy.deepcopy(getattr(config.get_text_config(), "rope_parameters", None))
        config = self.function(config)
        text = config.get_text_config()
        given = getattr(config, "rope_parameters", None)
        if text is not config and _asks(given):
            config.rope_parameters = None  # meant for the text model
        else:
            given = getattr(text, "rope_parameters", None)
        # vLLM also calls the function for a dummy, which has no RoPE.
        if before and given != before and _asks(given):
            text.rope_parameters = before
            self.given = _changes(before, given)
        return config


def _changes(before: Any, after: Any) -> Any:
    """Return what a function set, which may have changed the model's own dict: equal values are not the user's."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    always = ("rope_type", "factor")
    changed = {key: value for key, value in after.items() if key in always or before.get(key) != value}
    return {key: _changes(before.get(key), value) for key, value in changed.items()}


def apply_dict_overrides(
    original: Callable[..., None], model_config: Any, config: Any, overrides: dict[str, Any]
) -> None:
    """Apply the user's overrides; vLLM would replace the model's own parameters by those of mrrope."""
    text = config.get_text_config()
    found: dict[str, Mapping[str, Any]] = {}
    rest = _without_mrrope(overrides, config, text, "hf_overrides", found)
    if len(found) > 1:
        raise ValueError(f"hf_overrides must set rope_parameters once, got {' and '.join(found)}")
    original(model_config, config, rest)
    for given in found.values():
        _extend(text, given)


def _without_mrrope(
    overrides: Mapping[str, Any], config: Any, text: Any, path: str, found: dict[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return overrides of a configuration or one of its parts; parameters of mrrope go to ``found``, by their path."""
    rest: dict[str, Any] = {}
    for name, value in overrides.items():
        inner = f"{path}.{name}"
        if name in NAMES and _asks(value):
            if not hasattr(config, "get_text_config") or config.get_text_config() is not text:
                raise ValueError(f"{inner} must be that of the text model to name a type of mrrope, got {value!r}")
            found[inner] = value
        elif isinstance(value, Mapping):
            rest[name] = _without_mrrope(value, getattr(config, name, None), text, inner, found)
        else:
            rest[name] = value
    return rest


def _asks(parameters: Any) -> bool:
    """Whether parameters of a model, or of one of its layer types, are for mrrope to serve and not merged yet."""
    if not isinstance(parameters, Mapping) or KEY in parameters:
        return False
    return selects_mrrope(parameters) or any(
        selects_mrrope(layer) and KEY not in layer for layer in parameters.values() if isinstance(layer, Mapping)
    )


def _extend(text: Any, given: Mapping[str, Any]) -> None:
    """Merge the user's parameters into those of a text model, by layer type where it has several."""
    from vllm.transformers_utils.config import is_rope_parameters_nested

    own = getattr(text, "rope_parameters", None) or {}
    if not own and "rope_theta" not in given:
        raise ValueError(
            f"rope_parameters must come with rope_theta for {text.model_type}, whose configuration has no RoPE, got "
            f"{given!r}"
        )
    stated = getattr(text, "max_position_embeddings", None)
    if not is_rope_parameters_nested(own):
        if not selects_mrrope(given):
            raise ValueError(
                f"rope_parameters must be one dict for {text.model_type}, whose layers share one RoPE, got "
                f"{', '.join(given)}"
            )
        parameters = merged(given, own, stated)
    else:
        if selects_mrrope(given):
            given = {layer: given for layer, settings in own.items() if settings is not None and not is_local(layer)}
        if unknown := sorted(given.keys() - own.keys()):
            raise ValueError(
                f"rope_parameters must be of the layer types {', '.join(own)} of {text.model_type}, got "
                f"{', '.join(unknown)}"
            )
        if all(is_local(layer) or not selects_mrrope(new) for layer, new in given.items()):
            raise ValueError(
                f"rope_parameters must name a type of mrrope for layers of {text.model_type} that see the whole text "
                f"(of {', '.join(own)}), got {given!r}"
            )
        parameters = own | {
            layer: merged(new, own[layer] or {}, stated) if selects_mrrope(new) else new for layer, new in given.items()
        }
    _check_layers(parameters, text)
    _warn_of_extension(text.model_type, parameters)
    text.rope_parameters = parameters


def _of_file(parameters: Mapping[str, Any], text: Any, folder: Path | None) -> dict[str, Any]:
    """Return the parameters of a ``config.json``, merged."""
    stated = getattr(text, "max_position_embeddings", None)
    if selects_mrrope(parameters):
        found = merged(parameters, None, stated, folder, text.ignore_keys_at_rope_validation)
    else:
        found = {
            layer: merged(own, None, stated, folder, text.ignore_keys_at_rope_validation)
            if selects_mrrope(own)
            else own
            for layer, own in parameters.items()
        }
    _check_layers(found, text)
    return found


def _check_layers(parameters: Mapping[str, Any], text: Any) -> None:
    """Raise where tables do not fit the layers, or one choice of a table could not hold for all layers of a request."""
    require_fitting(parameters, text)
    if KEY in parameters:
        return
    served = {layer: ServedRope.of(own) for layer, own in parameters.items() if isinstance(own, Mapping)}
    auto = {layer: own for layer, own in served.items() if own is not None and own.is_auto}
    reaches = {}
    for layer, own in auto.items():
        if is_local(layer):
            raise ValueError(f"rope_parameters: factor must be a number for {layer}, which sees a window, got 'auto'")
        reaches[layer] = own.reaches
    if len(set(reaches.values())) > 1:
        raise ValueError(f"rope_parameters: tables of all layer types must reach the same lengths, got {reaches}")


def _warn_of_extension(model_type: str, parameters: Mapping[str, Any]) -> None:
    """Name both meanings of a factor where a configuration extends RoPE by a method that needs no training."""
    from vllm.logger import init_logger

    layers = [parameters] if KEY in parameters else parameters.values()
    for served in map(ServedRope.of, layers):
        if served is not None and (extension := served.untrained_extension) is not None:
            init_logger("vllm.mrrope").warning(
                "%s is extended by its configuration already (%s): rope_parameters extend the %d tokens that it reads "
                "so; original_max_position_embeddings starts over from plain RoPE",
                model_type,
                extension,
                served.native_length,
            )
            return


def get_and_verify_max_len(
    original: Callable[..., int], hf_config: Any, model_arch_config: Any, *args: Any, **kwargs: Any
) -> int:
    """Check ``max_model_len`` against the length that the tables reach, which no factor multiplies again."""
    served = served_rope(hf_config)
    if served is None:
        return original(hf_config, model_arch_config, *args, **kwargs)
    without_rope = copy.copy(hf_config)
    without_rope.rope_parameters = None
    length = (served.max_length, "rope_parameters")
    return original(
        without_rope, dataclasses.replace(model_arch_config, derived_max_model_len_and_key=length), *args, **kwargs
    )
