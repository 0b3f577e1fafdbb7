"""What tells a configuration that mrrope serves: all that processes of other models look at.

Nothing of this package is imported here, so that looking costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "mrrope"
"""Key of ``rope_parameters`` with what mrrope is to serve."""

NAMES = ("rope_parameters", "rope_scaling")
"""The attribute of a configuration, and its old name."""

ROPE_TYPE = "mrrope"
"""The ``rope_type`` that comes with a table or a method."""

OWN_TYPES = frozenset({ROPE_TYPE, "rope", "pi", "yarn_ratio", "mrrope_uni", "mrrope_pro", "mrrope_pow", "radix"})
"""Values of ``rope_type`` that engines do not know."""

OWN_KEYS = frozenset({"method", "table", "max_factor", "reserve"})


def selects_mrrope(parameters: Any) -> bool:
    """Whether ``rope_parameters`` of one layer type are for mrrope to serve."""
    if not isinstance(parameters, Mapping):
        return False
    rope_type = parameters.get("rope_type", parameters.get("type"))
    # A misspelt mrrope_... is refused with a list of methods: vLLM would accept it until it builds the model.
    is_own_type = isinstance(rope_type, str) and (rope_type in OWN_TYPES or rope_type.startswith(ROPE_TYPE))
    has_own_key = any(parameters.get(key) is not None for key in OWN_KEYS)
    return is_own_type or has_own_key or parameters.get("factor") == "auto"


def mentions_mrrope(settings: Any) -> bool:
    """Whether a configuration as a dict, or a user's overrides of one, select mrrope in any part or type of layer."""
    if not isinstance(settings, Mapping):
        return False
    for name, value in settings.items():
        if isinstance(value, Mapping):
            is_selected = name in NAMES and (selects_mrrope(value) or any(map(selects_mrrope, value.values())))
            if is_selected or mentions_mrrope(value):
                return True
    return False


def holds_tables(hf_config: Any) -> bool:
    """Whether a configuration of transformers holds what mrrope is to serve, in any type of layer."""
    parameters = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    return KEY in parameters or any(isinstance(own, Mapping) and KEY in own for own in parameters.values())
