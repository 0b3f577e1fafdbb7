"""Separate vLLM's compile caches by the state of this package: its passes and ops shape the compiled graphs."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mrrope

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache
def sources_hash() -> str:
    """Return a hash of the modules whose code graphs depend on. vLLM itself counts only those that Dynamo traces."""
    package = Path(mrrope.__file__).parent
    modules = sorted(path for folder in ("ops", "serving", "vllm") for path in (package / folder).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()


def hash_with_sources(compute_hash: Any, config: VllmConfig, *args: Any, **kwargs: Any) -> str:
    """Add this package to the hash of a served model's configuration, which all keys of compiled graphs contain."""
    own: str = compute_hash(config, *args, **kwargs)
    return hashlib.sha256(f"{own} {sources_hash()}".encode()).hexdigest()[: len(own)]
