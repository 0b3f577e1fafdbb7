"""The mark of a configuration that mrrope serves: all that processes of other models look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "mrrope"
"""Key of ``rope_parameters`` with what mrrope is to serve."""


def holds_tables(hf_config: Any) -> bool:
    """Whether a configuration of transformers holds what mrrope is to serve, in any type of layer."""
    parameters = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    return KEY in parameters or any(isinstance(own, Mapping) and KEY in own for own in parameters.values())
