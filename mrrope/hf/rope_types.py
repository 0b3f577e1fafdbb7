"""The methods that transformers lacks, as values of ``rope_type`` in its configurations.

Importing this module registers nothing: :func:`mrrope.register_rope_types` does, for all configurations from then on,
and :func:`types_registered` for the length of a block.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from mrrope.tables.frequency_table import METHOD_TRAITS, FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables, config_names, load_tables, tables_from_dict
from mrrope.tables.table_set import TableSet

ROPE_TYPES = tuple(name for name, method in METHOD_TRAITS.items() if method.has_temperature and name != "yarn")
"""The values of ``rope_type`` that :func:`register_types` adds, named as in ``mrrope.frequency_table``."""

TABLE_TYPE = "mrrope"
"""The ``rope_type`` whose key ``table`` holds ready tables: their dict, the path of their JSON, or a shipped name."""

OPTIONS = config_names("alpha", "beta", "bounds", "power", "attention_factor")
"""Optional ``rope_parameters``, and the arguments of ``mrrope.frequency_table`` that they set."""

TRANSFORMERS_MODULE = "transformers.modeling_rope_utils"
MIXIN = "RotaryEmbeddingConfigMixin"
"""Base class of transformers' configurations since 5.0, which validates ``rope_parameters``."""


REGISTERING = threading.RLock()
"""Held while types are registered: for the length of a block they are registered for all threads."""


def register_types() -> None:
    """Register the types with transformers, once. A model of several tables needs :mod:`mrrope.hf.registration`, too.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.0.
    """
    rope_utils = _checked_rope_utils()
    with REGISTERING:
        if not _is_registered(rope_utils):
            _register(rope_utils)


@contextlib.contextmanager
def types_registered() -> Iterator[None]:
    """Register the types for the length of a block, unless they are registered already.

    Raises:
        ImportError, ValueError: as in :func:`register_types`.
    """
    rope_utils = _checked_rope_utils()
    with REGISTERING:
        if _is_registered(rope_utils):
            yield
            return
        _register(rope_utils)
        try:
            yield
        finally:
            _unregister(rope_utils)


def _checked_rope_utils() -> ModuleType:
    rope_utils = importlib.import_module(TRANSFORMERS_MODULE)
    expect_rope_parameters()
    return rope_utils


def expect_rope_parameters() -> None:
    """Raise ValueError where the imported transformers is older than ``rope_parameters``."""
    if TRANSFORMERS_MODULE in sys.modules and not hasattr(sys.modules[TRANSFORMERS_MODULE], MIXIN):
        raise ValueError(f"transformers must be 5.0 or later, got {sys.modules['transformers'].__version__}")


def _is_registered(rope_utils: ModuleType) -> bool:
    # Registered again, the types would lose what others have wrapped around them.
    return rope_utils.ROPE_INIT_FUNCTIONS.get(TABLE_TYPE) is _compute_parameters


def _register(rope_utils: ModuleType) -> None:
    for rope_type in (*ROPE_TYPES, TABLE_TYPE):
        rope_utils.ROPE_INIT_FUNCTIONS[rope_type] = _compute_parameters
        validate = _validate_table if rope_type == TABLE_TYPE else _validate
        setattr(getattr(rope_utils, MIXIN), f"_validate_{rope_type}_rope_parameters", validate)


def _unregister(rope_utils: ModuleType) -> None:
    for rope_type in (*ROPE_TYPES, TABLE_TYPE):
        del rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
        delattr(getattr(rope_utils, MIXIN), f"_validate_{rope_type}_rope_parameters")


def _compute_parameters(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """Return the frequencies and the attention factor, as an entry of ``ROPE_INIT_FUNCTIONS`` does."""
    table = config_table(config, layer_type)
    return torch.tensor(table.to_dict()["inv_freq"], dtype=torch.float32, device=device), table.attention_factor


def config_table(config: Any, layer_type: str | None = None) -> FrequencyTable:
    """Return the table of a configuration whose ``rope_type`` is in ``ROPE_TYPES``, or ``mrrope``.

    Where ``mrrope`` has tables per layer or head, it is that of plain RoPE: such models are patched
    (:mod:`mrrope.hf.registration`).
    """
    if layer_type is not None:
        # As in transformers' own types. Configurations with one kind of layer raise.
        with contextlib.suppress(AttributeError, ValueError):
            config = config.per_layer_config[layer_type]
    config.standardize_rope_params()
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if parameters["rope_type"] == TABLE_TYPE:
        tables = embedded_table(parameters)
        if isinstance(tables, FrequencyTable):
            return tables
        # The rotary_dim is the model's: patch refuses tables of another.
        return frequency_table(
            "rope", rotary_dim=rotary_dim, base=tables.base, original_max_position=tables.original_max_position
        )
    return frequency_table(
        parameters["rope_type"],
        rotary_dim=rotary_dim,
        base=parameters["rope_theta"],
        original_max_position=parameters["original_max_position_embeddings"],
        scale=parameters["factor"],
        **{argument: parameters[key] for key, argument in OPTIONS.items() if parameters.get(key) is not None},
    )


def embedded_table(parameters: dict[str, Any]) -> ModelTables:
    """Return the tables in ``rope_parameters`` of type ``mrrope``.

    Raises:
        ValueError: there are none, or a list of them, of which only vLLM's plugin chooses.
    """
    table = parameters.get("table")
    if not isinstance(table, (dict, str)):
        raise ValueError(f"`rope_parameters`'s table field must be a dict of tables, a path or a name, got {table!r}")
    return tables_from_dict(table) if isinstance(table, dict) else load_tables(table)


def tables_per_layer_or_head(parameters: dict[str, Any]) -> HeadTables | TableSet | None:
    """Return the tables with which a model of these ``rope_parameters`` is patched; None where one table suffices."""
    if parameters.get("rope_type") != TABLE_TYPE:
        return None
    tables = embedded_table(parameters)
    return None if isinstance(tables, FrequencyTable) else tables


def _validate_table(config: Any, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None) -> None:
    """Validate ``rope_parameters`` of type ``mrrope``; installed as a method of transformers' configurations."""
    table = rope_parameters.get("table")
    if isinstance(table, dict):
        tables_from_dict(table)
    elif not isinstance(table, (str, list)) and rope_parameters.get("factor") is None:
        raise ValueError(f"`rope_parameters`'s table field must be a dict of tables, a path or a name, got {table!r}")


def _validate(config: Any, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None) -> None:
    """Validate ``rope_parameters``; installed as a method of transformers' configurations."""
    rope_type = rope_parameters["rope_type"]
    required = {"rope_type", "factor", "original_max_position_embeddings"}
    if METHOD_TRAITS[rope_type].needs == "power":
        required.add("power")
    optional = {"rope_theta", *OPTIONS} - ({"power"} - required)
    config._check_received_keys(rope_type, set(rope_parameters), set(required), optional, ignore_keys=ignore_keys)

    def check(key: str, is_valid: bool, expected: str) -> None:
        value = rope_parameters.get(key)
        if not is_valid and (key in required or value is not None):
            raise ValueError(f"`rope_parameters`'s {key} field must be {expected}, got {value!r}")

    numbers = {key: value for key, value in rope_parameters.items() if isinstance(value, (int, float))}
    check("factor", numbers.get("factor", 0) >= 1, "a float or int >= 1")
    check("original_max_position_embeddings", numbers.get("original_max_position_embeddings", 0) >= 1, "an int >= 1")
    check("attention_factor", numbers.get("attention_factor", 0) > 0, "a float or int greater than 0")
    for key in ("rope_theta", "beta_slow", "beta_fast", "power"):
        check(key, key in numbers, "a float or int")
    bounds = rope_parameters.get("bounds")
    is_pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(bound, int) for bound in bounds)
    check("bounds", is_pair, "a list of two ints")
