"""The methods that transformers lacks, as values of ``rope_type`` in its configurations.

``import mrrope`` suffices to load a model saved with one of them. An import hook registers them as soon as transformers
is imported, before or after mrrope.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from mrrope.tables.frequency_table import METHOD_TRAITS, FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables, load_tables, tables_from_dict
from mrrope.tables.table_set import TableSet

ROPE_TYPES = tuple(name for name, method in METHOD_TRAITS.items() if method.has_temperature and name != "yarn")
"""The values of ``rope_type`` that ``register_rope_types`` adds, named as in ``mrrope.frequency_table``."""

TABLE_TYPE = "mrrope"
"""The ``rope_type`` whose key ``table`` holds ready tables: their dict, the path of their JSON, or a shipped name."""

OPTIONS = {
    "beta_slow": "alpha",
    "beta_fast": "beta",
    "bounds": "bounds",
    "power": "power",
    "attention_factor": "attention_factor",
}
"""Optional ``rope_parameters``, and the arguments of ``mrrope.frequency_table`` that they set."""

TRANSFORMERS_MODULE = "transformers.modeling_rope_utils"
MIXIN = "RotaryEmbeddingConfigMixin"
"""Base class of transformers' configurations since 5.0, which validates ``rope_parameters``."""


def register_rope_types() -> None:
    """Register ``mrrope_pro``, ``mrrope_uni``, ``mrrope_pow``, ``yarn_ratio`` and ``mrrope`` as a ``rope_type``.

    Importing mrrope does this already; calling it again has no effect. The ``rope_parameters`` are ``rope_type``,
    ``rope_theta``, ``factor``, ``original_max_position_embeddings``, and ``power`` for ``mrrope_pow``. Optional are
    ``partial_rotary_factor``, ``beta_slow``, ``beta_fast``, ``bounds`` and ``attention_factor``. Names and meanings
    are those of transformers' ``yarn``.

    ``mrrope`` takes ready tables as ``table``: a dict of ``to_dict``, the path of a JSON, or the name of shipped ones.
    A model with head tables or a set is patched when it is built or loaded.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.0.
    """
    rope_utils = importlib.import_module(TRANSFORMERS_MODULE)
    expect_rope_parameters()
    register_on_import()
    _register(rope_utils)


def expect_rope_parameters() -> None:
    """Raise ValueError where the imported transformers is older than ``rope_parameters``."""
    if TRANSFORMERS_MODULE in sys.modules and not hasattr(sys.modules[TRANSFORMERS_MODULE], MIXIN):
        raise ValueError(f"transformers must be 5.0 or later, got {sys.modules['transformers'].__version__}")


def _register(rope_utils: ModuleType) -> None:
    mixin = getattr(rope_utils, MIXIN, None)
    # transformers 4 must still import. Registered again, the types would lose what others have wrapped around them.
    if mixin is None or rope_utils.ROPE_INIT_FUNCTIONS.get(ROPE_TYPES[0]) is _compute_parameters:
        return
    for rope_type in ROPE_TYPES:
        rope_utils.ROPE_INIT_FUNCTIONS[rope_type] = _compute_parameters
        setattr(mixin, f"_validate_{rope_type}_rope_parameters", _validate)
    rope_utils.ROPE_INIT_FUNCTIONS[TABLE_TYPE] = _compute_parameters
    setattr(mixin, f"_validate_{TABLE_TYPE}_rope_parameters", _validate_table)


def _compute_parameters(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """Return the frequencies and the attention factor, as an entry of ``ROPE_INIT_FUNCTIONS`` does."""
    table = config_table(config, layer_type)
    return torch.tensor(table.to_dict()["inv_freq"], dtype=torch.float32, device=device), table.attention_factor


def config_table(config: Any, layer_type: str | None = None) -> FrequencyTable:
    """Return the table of a configuration whose ``rope_type`` is in ``ROPE_TYPES``, or ``mrrope``.

    Where ``mrrope`` has tables per layer or head, it is that of plain RoPE: such models are patched
    (:mod:`mrrope.hf.embedded_tables`).
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


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Import hook that calls ``ON_IMPORT`` right after modules of transformers are executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ON_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            ON_IMPORT[fullname](module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


ON_IMPORT: dict[str, Callable[[ModuleType], None]] = {}
"""What is done with modules of transformers when they are imported."""


def register_on_import() -> None:
    """Register the types now if transformers is imported, else through an import hook. Imports nothing itself."""
    call_on_import(TRANSFORMERS_MODULE, _register)


def call_on_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module of transformers now if it is imported, else as soon as it is."""
    ON_IMPORT[name] = function
    if name in sys.modules:
        function(sys.modules[name])
    if not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())
