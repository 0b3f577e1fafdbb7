"""The entry point: checks vLLM's version and installs the hooks."""

from __future__ import annotations

import logging
import re

KNOWN_VERSIONS = ("0.25",)
"""Minor versions of vLLM whose internals the hooks were written for and tested with."""

logger = logging.getLogger("vllm.mrrope")
"""Below vLLM's own logger, which writes in its format and from its level on."""


def register() -> None:
    """Install the hooks of this package in vLLM, and register mrrope's rope types with transformers.

    Called by vLLM in each of its processes.

    In a version that is not known nothing is installed, and an error is logged: vLLM goes on for models that do not
    need the plugin, and refuses configurations that name one of mrrope's types as unknown.
    """
    from vllm import __version__

    if not is_known(__version__):
        logger.error(
            "mrrope's plugin knows vLLM %s, got %s: it installs nothing, and mrrope's rope types stay unknown to vLLM. "
            "Install a known version, or serve a configuration written by `mrrope export --engine vllm`; "
            "VLLM_PLUGINS without mrrope silences this message",
            ", ".join(f"{minor}.x" for minor in KNOWN_VERSIONS),
            __version__,
        )
        return
    from mrrope.hf.registration import register_rope_types
    from mrrope.vllm import (
        cache_fusion,
        compatibility,
        compile_cache,
        model_config,
        norm_fusion,
        request_scale,
        rotary_embedding,
        token_tables,
    )

    register_rope_types()  # vLLM reads configurations through transformers, and builds some models with it
    rotation = (model_config, rotary_embedding, norm_fusion, cache_fusion, compile_cache)
    for concept in (*rotation, request_scale, token_tables, compatibility):
        concept.install()


def is_known(version: str) -> bool:
    """Return whether a version's internals are known: a release, candidate or local build of ``KNOWN_VERSIONS``.

    A development build (``0.25.1rc1.dev7+g1a2b3c4``) is a state of the main branch and has the internals of no release.
    """
    release = re.match(r"v?(\d+\.\d+)(?!\d)", version)
    is_development = "dev" in version.partition("+")[0]
    return release is not None and release[1] in KNOWN_VERSIONS and not is_development
