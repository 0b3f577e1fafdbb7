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

from mrrope.serving.config_merge import expect_files_of_mrrope, extend, merge_file, names_mrrope, take_out
from mrrope.serving.rope_settings import served_rope


def get_config(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    hf_overrides_fn: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a configuration, with parameters that its file or a function of the user sets."""
    expect_files_of_mrrope()
    function = None if hf_overrides_fn is None else _OverrideFunction(hf_overrides_fn)
    config = original(model, *args, hf_overrides_fn=function, **kwargs)
    merge_file(config, Path(model) if Path(model).is_dir() else None)
    if function is not None and function.given is not None:
        extend(config.get_text_config(), function.given, _logger())
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
        if text is not config and names_mrrope(given):
            config.rope_parameters = None  # Overrides at the top are meant for the text model.
        else:
            given = getattr(text, "rope_parameters", None)
        # vLLM also calls the function for a dummy, which has no RoPE.
        if before and given != before and names_mrrope(given):
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
    rest, given = take_out(overrides, config, "hf_overrides")
    original(model_config, config, rest)
    if given is not None:
        expect_files_of_mrrope()  # transformers validates the result again, where it is copied or saved
        extend(config.get_text_config(), given, _logger())


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.mrrope")


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
