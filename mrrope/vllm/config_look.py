"""A look at a model's configuration, before and after vLLM loads it: what of mrrope it needs is imported only then."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrrope.serving.mark import NAMES, holds_tables, mentions_mrrope
from mrrope.vllm import hooks

CONFIG_FILE = "config.json"


def get_config(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    hf_overrides_fn: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a configuration: by vLLM alone, unless its file or a function of the user selects mrrope."""
    revision = kwargs.get("revision", args[1] if len(args) > 1 else None)
    if not file_mentions_mrrope(model, revision):
        watched = None if hf_overrides_fn is None else _WatchedFunction(hf_overrides_fn)
        try:
            config = original(model, *args, hf_overrides_fn=watched, **kwargs)
        except Exception:
            # A file that was not on this machine before may be one that only mrrope can read.
            if not (watched and watched.names_mrrope) and not file_mentions_mrrope(model, revision):
                raise
        else:
            if not (watched and watched.names_mrrope) and not config_mentions_mrrope(config):
                return config
    from mrrope.vllm import model_config

    hooks.require_installed()
    return model_config.get_config(original, model, *args, hf_overrides_fn=hf_overrides_fn, **kwargs)


class _WatchedFunction:
    """A function of the user that overrides a configuration, without effect where it selects mrrope."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.names_mrrope = False

    def __call__(self, config: Any) -> Any:
        before = copy.deepcopy(config)
        config = self.function(config)
        if not config_mentions_mrrope(config):
            return config
        self.names_mrrope = True  # The configuration is loaded again.
        return before


def file_mentions_mrrope(model: Any, revision: str | None) -> bool:
    """Whether the ``config.json`` of a model selects mrrope. One that is not on this machine is not fetched."""
    path: Any = Path(model, CONFIG_FILE)
    try:
        if not path.is_file():
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(str(model), CONFIG_FILE, revision=revision)
        return isinstance(path, (str, Path)) and mentions_mrrope(json.loads(Path(path).read_text()))
    except (OSError, ValueError):  # vLLM's to report, where it needs this file
        return False


def config_mentions_mrrope(config: Any) -> bool:
    """Whether a configuration of transformers selects mrrope, itself or in its text model."""
    parts = [config]
    # A parser of the user may return another class, and a configuration may have several texts.
    with contextlib.suppress(AttributeError, ValueError):
        parts.append(config.get_text_config())
    return any(mentions_mrrope({name: getattr(part, name, None)}) for part in parts for name in NAMES)


def apply_dict_overrides(original: Callable[..., Any], model_config: Any, config: Any, overrides: Any) -> Any:
    """Apply a user's overrides: by vLLM alone, unless they select mrrope."""
    if not mentions_mrrope(overrides):
        return original(model_config, config, overrides)
    from mrrope.vllm.model_config import apply_dict_overrides

    hooks.require_installed()
    return apply_dict_overrides(original, model_config, config, overrides)


def get_and_verify_max_len(original: Callable[..., int], hf_config: Any, *args: Any, **kwargs: Any) -> int:
    """Check ``max_model_len``: by vLLM alone, unless the configuration holds what mrrope serves."""
    if not holds_tables(hf_config):
        return original(hf_config, *args, **kwargs)
    from mrrope.vllm.model_config import get_and_verify_max_len

    return get_and_verify_max_len(original, hf_config, *args, **kwargs)


def model_mentions_mrrope(config: Any) -> bool:
    """Whether a ``ModelConfig`` of vLLM, or as much of it as there is, selects mrrope."""
    hf_config: Any = getattr(config, "hf_config", None)
    overrides: Any = getattr(config, "hf_overrides", None)
    return mentions_mrrope(overrides) or config_mentions_mrrope(hf_config)
