"""The entry point: checks SGLang's version, and registers the hooks that find out whether a model is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mrrope.serving.mark import KEY, holds_tables

KNOWN_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose internals the hooks were written for and tested with. Its minor versions change them."""

FOR_ALL_MODELS = {
    "sglang.srt.utils.hf_transformers.config.get_config": "_get_config",
    "sglang.srt.utils.hf_transformers.common.get_context_length": "_get_context_length",
    "sglang.srt.configs.model_config.ModelConfig.from_server_args": "_from_server_args",
}
"""Functions of SGLang, and the hooks around them that look whether a model is served."""

logger = logging.getLogger("sglang.mrrope")


def register() -> None:
    """Register the hooks of this package. Called by SGLang in its processes.

    The hooks of requests and of model runners follow with the first served model. In a version that is not known,
    nothing but a check is installed: models that need the plugin get an error in the log, and SGLang refuses their
    types as unknown.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__

    if __version__ not in KNOWN_VERSIONS:
        HookRegistry.register(next(iter(FOR_ALL_MODELS)), _tell_if_used, HookType.AROUND)
        return
    for target, hook in FOR_ALL_MODELS.items():
        HookRegistry.register(target, globals()[hook], HookType.AROUND)


def _get_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from mrrope.sglang import model_config

    return model_config.get_config(original, *args, **kwargs)


def _get_context_length(original: Callable[..., int], config: Any) -> int:
    if not holds_tables(config):
        return original(config)
    from mrrope.sglang import model_config

    return model_config.context_length(config)


def _from_server_args(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the configuration of a model. All that serves it, in whatever process, has called this before."""
    config = original(server_args, *args, **kwargs)
    if holds_tables(config.hf_text_config):
        from mrrope.sglang import compatibility, hooks

        compatibility.require_compatible(server_args, config)
        hooks.install()
    return config


def _tell_if_used(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Log an error where a configuration names one of mrrope's types, which this version of SGLang does not know."""
    config = None
    try:
        config = original(*args, **kwargs)
        return config
    finally:
        own = {} if config is None else {"rope_parameters": getattr(config, "rope_parameters", None)}
        if _names_mrrope([own, kwargs.get("model_override_args") or {}]):
            _log_unknown_version()


def _names_mrrope(pending: list[Mapping[str, Any]]) -> bool:
    from mrrope.serving.mark import selects_mrrope

    while pending:
        part = pending.pop()
        if KEY in part or selects_mrrope(part):
            return True
        pending.extend(value for value in part.values() if isinstance(value, Mapping))
    return False


def _log_unknown_version() -> None:
    from sglang.version import __version__

    message = (
        f"mrrope's plugin knows SGLang {', '.join(KNOWN_VERSIONS)}, got {__version__}: it installs nothing, and "
        "mrrope's rope types stay unknown to SGLang. Install a known version, or serve a configuration written by "
        "`mrrope export --engine sglang`"
    )
    if message not in _logged:
        _logged.add(message)
        logger.error(message)


_logged: set[str] = set()
