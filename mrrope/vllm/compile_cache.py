"""Separate vLLM's compile caches by the state of this package: its passes and ops shape the compiled graphs."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mrrope
from mrrope.vllm import hooks
from mrrope.vllm.rope_settings import served_rope

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache
def sources_hash() -> str:
    """Return a hash of the modules whose code graphs depend on. vLLM itself counts only those that Dynamo traces."""
    package = Path(mrrope.__file__).parent
    modules = sorted(path for folder in ("ops", "vllm") for path in (package / folder).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()


def _hash_with_sources(compute_hash: Any, config: VllmConfig) -> str:
    own: str = compute_hash(config)
    if config.model_config is None or served_rope(config.model_config.hf_config) is None:
        return own
    return hashlib.sha256(f"{own} {sources_hash()}".encode()).hexdigest()[: len(own)]


def install() -> None:
    """Hook the hash of vLLM's configuration, which is in the keys of all its caches of compiled graphs."""
    from vllm.config import VllmConfig

    hooks.wrap(VllmConfig, "compute_hash", _hash_with_sources)
