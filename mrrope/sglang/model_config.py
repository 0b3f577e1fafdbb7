"""Hooks in SGLang's model configuration: ``rope_parameters`` of mrrope are merged with the model's own.

After them a configuration holds ``rope_parameters`` as :func:`mrrope.serving.rope_settings.merged` writes them, whether
``--json-model-override-args`` or ``config.json`` selected mrrope, and the context length is what the tables reach.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mrrope.serving.config_merge import expect_files_of_mrrope, extend, merge_file, names_mrrope, take_out
from mrrope.serving.rope_settings import served_rope

OVERRIDES = "model_override_args"

logger = logging.getLogger("sglang.mrrope")


def get_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a configuration, with parameters of mrrope that its file or the user's overrides hold."""
    expect_files_of_mrrope()
    call = inspect.signature(original).bind(*args, **kwargs)
    overrides: Mapping[str, Any] = call.arguments.get(OVERRIDES) or {}
    given = None
    if _hold_mrrope(overrides):
        call.arguments[OVERRIDES] = {}
        config = copy.deepcopy(original(*call.args, **call.kwargs))
        rest, given = take_out(overrides, config, "json_model_override_args", _text_config(config))
        call.arguments[OVERRIDES] = rest
    config = original(*call.args, **call.kwargs)
    if given is None and not _any_part_names_mrrope(config):
        return config
    config = copy.deepcopy(config)  # SGLang caches the one that it returned.
    text, model = _text_config(config), Path(call.arguments["model"])
    merge_file(text, model if model.is_dir() else None)
    if given is not None:
        extend(text, given, logger)
    return config


def _hold_mrrope(overrides: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, Mapping) and (names_mrrope(value) or _hold_mrrope(value)) for value in overrides.values()
    )


def _any_part_names_mrrope(config: Any) -> bool:
    """Whether a configuration or one of its parts names a type of mrrope. Changes nothing in it."""
    parts = (value for value in vars(config).values() if hasattr(value, "get_text_config"))
    return names_mrrope(getattr(config, "rope_parameters", None)) or any(map(_any_part_names_mrrope, parts))


def _text_config(config: Any) -> Any:
    """Return the part of a configuration that SGLang takes for the text model: it knows more names than transformers.

    Raises:
        ValueError: It is another part than its own text model.
    """
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config

    text = get_hf_text_config(config)
    if text.get_text_config() is not text:
        raise ValueError(
            f"rope_parameters of mrrope must be for a model with one text configuration, got {text.model_type}, of "
            "which SGLang takes another than transformers"
        )
    return text


def context_length(config: Any) -> int:
    """Return the number of tokens that the tables of a served model reach, which no factor multiplies again."""
    served = served_rope(config)
    assert served is not None
    return served.max_length
