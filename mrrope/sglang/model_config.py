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
        rest, given = take_out(overrides, original(*call.args, **call.kwargs), "json_model_override_args")
        call.arguments[OVERRIDES] = rest
    config = original(*call.args, **call.kwargs)
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    if given is None and not names_mrrope(parameters):
        return config
    config = copy.deepcopy(config)  # SGLang caches the one that it returned.
    model = Path(call.arguments["model"])
    merge_file(config, model if model.is_dir() else None)
    if given is not None:
        extend(config.get_text_config(), given, logger)
    return config


def _hold_mrrope(overrides: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, Mapping) and (names_mrrope(value) or _hold_mrrope(value)) for value in overrides.values()
    )


def context_length(config: Any) -> int:
    """Return the number of tokens that the tables of a served model reach, which no factor multiplies again."""
    served = served_rope(config)
    assert served is not None
    return served.max_length
