"""The entry point: checks vLLM's version and installs the hooks."""

from __future__ import annotations

import importlib.metadata

KNOWN_VERSIONS = ("0.25",)
"""Minor versions of vLLM whose internals the hooks were written for and tested with."""


def register() -> None:
    """Install the hooks of this package in vLLM. Called by vLLM in each of its processes.

    Raises:
        RuntimeError: vLLM's version is not known.
    """
    require_known_version(importlib.metadata.version("vllm"))
    from mrrope.vllm import compatibility, model_config, norm_fusion, request_scale, rotary_embedding, token_tables

    for concept in (model_config, rotary_embedding, norm_fusion, request_scale, token_tables, compatibility):
        concept.install()


def require_known_version(version: str) -> None:
    """Raise RuntimeError unless ``version`` is one of ``KNOWN_VERSIONS``."""
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        known = ", ".join(f"{minor}.x" for minor in KNOWN_VERSIONS)
        raise RuntimeError(
            f"mrrope's plugin knows vLLM {known}, got {version}: install a known version, or exclude the plugin by "
            "VLLM_PLUGINS and serve a configuration made by `mrrope export --engine vllm`"
        )
