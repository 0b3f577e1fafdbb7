"""``rope_parameters`` of mrrope are merged into a configuration of transformers: those of its file, and a user's.

After it a configuration holds ``rope_parameters`` as :func:`mrrope.serving.rope_settings.merged` writes them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mrrope.hf.rope_config import is_local
from mrrope.hf.rope_types import expect_rope_parameters
from mrrope.serving.layer_checks import require_fitting
from mrrope.serving.mark import KEY, NAMES, OWN_TYPES, selects_mrrope
from mrrope.serving.rope_settings import ServedRope, merged

QUIET = "__mrrope_quiet__"
"""Attribute of a validation of transformers that passes over parameters of mrrope."""


def expect_files_of_mrrope() -> None:
    """Let transformers load files that name mrrope's types: :func:`merge_file` checks their parameters.

    Called before every file is read, since ``mrrope.register_rope_types`` replaces what it finds.
    """
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin as Mixin

    expect_rope_parameters()
    for rope_type in OWN_TYPES:
        if not hasattr(Mixin, f"_validate_{rope_type}_rope_parameters"):
            setattr(Mixin, f"_validate_{rope_type}_rope_parameters", lambda *args, **kwargs: None)
    for name in [name for name in dir(Mixin) if name.startswith("_validate_") and name.endswith("_rope_parameters")]:
        if not hasattr(getattr(Mixin, name), QUIET):
            setattr(Mixin, name, _quiet(getattr(Mixin, name)))


def _quiet(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate(config: Any, parameters: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if KEY not in parameters and not selects_mrrope(parameters):
            original(config, parameters, *args, **kwargs)

    setattr(validate, QUIET, True)
    return validate


def merge_file(config: Any, folder: Path | None) -> None:
    """Merge the parameters of mrrope that a model's own ``config.json`` holds.

    Args:
        config: The configuration, as transformers loaded it.
        folder: The model's folder, where the path of a table may start.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if parameters is not None and names_mrrope(parameters):
        text.rope_parameters = _of_file(parameters, text, folder)


def take_out(
    overrides: Mapping[str, Any], config: Any, path: str, text: Any = None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return a user's overrides without the parameters of mrrope, and these parameters.

    Args:
        overrides: The overrides of a configuration.
        config: The configuration.
        path: What messages call the overrides.
        text: The part that the engine takes for the text model; None for the one that transformers does.

    Raises:
        ValueError: Parameters of mrrope are given twice, or for another part than the text model.
    """
    found: dict[str, Mapping[str, Any]] = {}
    text = config.get_text_config() if text is None else text
    rest = _without_mrrope(overrides, config, config, text, path, found)
    if len(found) > 1:
        raise ValueError(f"{path} must set rope_parameters once, got {' and '.join(found)}")
    return rest, next(iter(found.values()), None)


def _without_mrrope(
    overrides: Mapping[str, Any], part: Any, whole: Any, text: Any, path: str, found: dict[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return overrides of a configuration or one of its parts; parameters of mrrope go to ``found``, by their path."""
    rest: dict[str, Any] = {}
    for name, value in overrides.items():
        inner = f"{path}.{name}"
        if name in NAMES and names_mrrope(value):
            of_text = part is whole or (hasattr(part, "get_text_config") and part.get_text_config() is text)
            if not of_text:
                raise ValueError(f"{inner} must be that of the text model to name a type of mrrope, got {value!r}")
            found[inner] = value
        elif isinstance(value, Mapping):
            rest[name] = _without_mrrope(value, getattr(part, name, None), whole, text, inner, found)
        else:
            rest[name] = value
    return rest


def names_mrrope(parameters: Any) -> bool:
    """Whether parameters of a model, or of one of its layer types, are for mrrope to serve and not merged yet."""
    if not isinstance(parameters, Mapping) or KEY in parameters:
        return False
    return selects_mrrope(parameters) or any(
        selects_mrrope(layer) and KEY not in layer for layer in parameters.values() if isinstance(layer, Mapping)
    )


def extend(text: Any, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Merge the user's parameters into those of a text model, by layer type where it has several.

    Args:
        text: The configuration of the text model.
        given: The user's ``rope_parameters``.
        logger: Where a warning names both meanings of a factor.

    Raises:
        ValueError: The parameters are invalid, or do not fit the model.
    """
    own = getattr(text, "rope_parameters", None) or {}
    if not own and "rope_theta" not in given:
        raise ValueError(
            f"rope_parameters must come with rope_theta for {text.model_type}, whose configuration has no RoPE, got "
            f"{given!r}"
        )
    stated = getattr(text, "max_position_embeddings", None)
    if not _is_of_layer_types(own):
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
        _require_whole_text(given, own, text)
        parameters = own | {
            layer: merged(new, own[layer] or {}, stated) if selects_mrrope(new) else new for layer, new in given.items()
        }
    _check_layers(parameters, text)
    _warn_of_extension(text.model_type, parameters, logger)
    text.rope_parameters = parameters


def _require_whole_text(given: Mapping[str, Any], own: Mapping[str, Any], text: Any) -> None:
    """Raise ValueError where parameters by layer type extend none of the layers that see the whole text."""
    if all(is_local(layer) or not selects_mrrope(new) for layer, new in given.items()):
        raise ValueError(
            f"rope_parameters must name a type of mrrope for layers of {text.model_type} that see the whole text "
            f"(of {', '.join(own)}), got {given!r}"
        )


def _is_of_layer_types(parameters: Mapping[str, Any]) -> bool:
    """Whether parameters are a dict for each layer type; layers of a type without RoPE have None."""
    return bool(parameters) and all(own is None or isinstance(own, Mapping) for own in parameters.values())


def _of_file(parameters: Mapping[str, Any], text: Any, folder: Path | None) -> dict[str, Any]:
    """Return the parameters of a ``config.json``, merged."""
    stated = getattr(text, "max_position_embeddings", None)
    if selects_mrrope(parameters):
        found = merged(parameters, None, stated, folder, text.ignore_keys_at_rope_validation)
    else:
        _require_whole_text(parameters, parameters, text)
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


def _warn_of_extension(model_type: str, parameters: Mapping[str, Any], logger: logging.Logger) -> None:
    """Name both meanings of a factor where a configuration extends RoPE by a method that needs no training."""
    layers = [parameters] if KEY in parameters else parameters.values()
    for served in map(ServedRope.of, layers):
        if served is not None and (extension := served.untrained_extension) is not None:
            logger.warning(
                "%s is extended by its configuration already (%s): rope_parameters extend the %d tokens that it reads "
                "so; original_max_position_embeddings starts over from plain RoPE",
                model_type,
                extension,
                served.native_length,
            )
            return
