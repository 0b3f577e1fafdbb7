"""The entry point: checks vLLM's version, and installs the hooks that find out whether a model is served."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from mrrope.vllm import config_look, hooks

KNOWN_VERSIONS = ((0, 25), (0, 33))
"""Oldest and newest minor version of vLLM whose internals the hooks fit. Both are tested; those between were read."""
KNOWN = " to ".join(f"{major}.{minor}" for major, minor in KNOWN_VERSIONS)


def register() -> None:
    """Install the hooks of this package in vLLM. Called by vLLM in each of its processes.

    Nothing of vLLM is imported for them, and of a model that names none of mrrope's types only the configuration is
    looked at. Where a hook does not fit, served models are refused. In a version that is not known, nothing but a check
    is installed: models that need the plugin get an error in the log, and vLLM refuses their types as unknown.
    """
    from vllm import __version__

    if not is_known(__version__):
        hooks.when_imported("vllm.config.model", _tell_where_used)
        return
    for module, hook in {
        "vllm.transformers_utils.config": _hook_config_files,
        "vllm.config.model": _hook_model_config,
        "vllm.config.vllm": _hook_engine_config,
        "vllm.v1.engine.input_processor": _hook_front_end,
        "vllm.v1.engine.async_llm": _hook_engine_of_server,
        "vllm.entrypoints.openai.api_server": _hook_server,
        "vllm.entrypoints.launchers.app": _hook_server,  # since 0.29
        "vllm.entrypoints.anthropic.serving": _hook_messages,
        "vllm.v1.engine.core": _hook_engine_core,
        "vllm.v1.core.sched.scheduler": _hook_scheduler,
        "vllm.v1.worker.worker_base": _hook_workers,
    }.items():
        hooks.when_imported(module, hook)
    hooks.when_imported("vllm.config.model", _tell_where_failed)


def is_known(version: str) -> bool:
    """Return whether a version's internals are known: a release, candidate or local build within ``KNOWN_VERSIONS``.

    A development build (``0.25.1rc1.dev7+g1a2b3c4``) is a state of the main branch and has the internals of no release.
    """
    release = re.match(r"v?(\d+)\.(\d+)(?!\d)", version)
    if release is None or "dev" in version.partition("+")[0]:
        return False
    oldest, newest = KNOWN_VERSIONS
    return oldest <= (int(release[1]), int(release[2])) <= newest


def _hook_config_files(config: ModuleType) -> None:
    hooks.wrap_everywhere(config, "get_config", config_look.get_config)


def _hook_model_config(model: ModuleType) -> None:
    hooks.wrap(model.ModelConfig, "_apply_dict_overrides", config_look.apply_dict_overrides)
    hooks.wrap(model, "_get_and_verify_max_len", config_look.get_and_verify_max_len)


def _hook_engine_config(config: ModuleType) -> None:
    here = hooks.where_served(lambda config, *_, **__: config, "mrrope.vllm.compatibility", "check_config")
    hooks.wrap(config.VllmConfig, "__post_init__", here)
    here = hooks.where_served(lambda config, *_, **__: config, "mrrope.vllm.compile_cache", "hash_with_sources")
    hooks.wrap(config.VllmConfig, "compute_hash", here)


def _hook_front_end(front_end: ModuleType) -> None:
    def of_arguments(processor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return vllm_config

    admission = "mrrope.vllm.request_scale"
    processor = front_end.InputProcessor
    hooks.wrap(processor, "__init__", hooks.where_served(of_arguments, admission, "announce"))
    hooks.wrap(processor, "process_inputs", hooks.where_served(_config_of, admission, "admit_in_front_end"))


def _hook_engine_of_server(engine: ModuleType) -> None:
    def of_arguments(engine: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return vllm_config

    around = hooks.where_served(of_arguments, "mrrope.vllm.grown_requests", "make_engine")
    hooks.wrap(engine.AsyncLLM, "__init__", around)


def _hook_server(server: ModuleType) -> None:
    def of_arguments(args: Any, supported_tasks: Any = None, model_config: Any = None, **kwargs: Any) -> Any:
        return _OfModel(model_config)

    around = hooks.where_served(of_arguments, "mrrope.vllm.http_answers", "build_app")
    hooks.wrap_everywhere(server, "build_app", around)


def _hook_messages(serving: ModuleType) -> None:
    def of_server(messages: Any, *args: Any, **kwargs: Any) -> Any:
        return _OfModel(messages.model_config)

    around = hooks.where_served(of_server, "mrrope.vllm.http_answers", "create_messages")
    hooks.wrap(serving.AnthropicServingMessages, "create_messages", around)


def _hook_engine_core(core: ModuleType) -> None:
    around = hooks.where_served(_config_of, "mrrope.vllm.request_scale", "admit_in_core")
    hooks.wrap(core.EngineCore, "preprocess_add_request", around)


def _hook_scheduler(scheduling: ModuleType) -> None:
    def of_arguments(scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return vllm_config

    around = hooks.where_served(of_arguments, "mrrope.vllm.growth", "make_scheduler")
    hooks.wrap(scheduling.Scheduler, "__init__", around)


def _hook_workers(workers: ModuleType) -> None:
    def of_arguments(worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return vllm_config

    hooks.wrap(
        workers.WorkerBase, "__init__", hooks.where_served(of_arguments, "mrrope.vllm.worker_hooks", "make_worker")
    )


class _OfModel:
    """As much of a ``VllmConfig`` as the check needs."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config


def _config_of(owner: Any, *args: Any, **kwargs: Any) -> Any:
    return owner.vllm_config


# Versions that are not known, or whose configuration the hooks do not fit


def _tell_where_failed(model: ModuleType) -> None:
    if hooks.FAILED:
        _tell_where_used(model)


def _tell_where_used(model: ModuleType) -> None:
    if hasattr(getattr(model, "ModelConfig", None), "__post_init__"):
        hooks.wrap(model.ModelConfig, "__post_init__", _tell_if_used)


def _tell_if_used(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Log an error where a configuration names one of mrrope's types, which this version of vLLM does not know."""
    try:
        return original(config, *args, **kwargs)
    finally:
        if config_look.model_mentions_mrrope(config):
            hooks.log_error(hooks.failure() or _unknown_version())


def _unknown_version() -> str:
    from vllm import __version__

    return (
        f"mrrope's plugin knows vLLM {KNOWN}, got {__version__}: it "
        "installs nothing, and mrrope's rope types stay unknown to vLLM. Install a known version, or serve a "
        "configuration written by `mrrope export --engine vllm`"
    )
