"""The methods that transformers lacks, as values of ``rope_type`` in its configurations.

``import mrrope`` is enough for a model saved with one of them to load again: they are registered with transformers as
soon as that is imported, before or after mrrope.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from mrrope.tables import METHOD_TRAITS, FrequencyTable, frequency_table

ROPE_TYPES = tuple(name for name, method in METHOD_TRAITS.items() if method.has_temperature and name != "yarn")
"""What :func:`register_rope_types` adds; the names are those of :func:`mrrope.frequency_table`."""

OPTIONS = {
    "beta_slow": "alpha",
    "beta_fast": "beta",
    "bounds": "bounds",
    "power": "power",
    "attention_factor": "attention_factor",
}
"""Optional ``rope_parameters``, and the arguments of :func:`mrrope.frequency_table` they stand for."""

TRANSFORMERS_MODULE = "transformers.modeling_rope_utils"
MIXIN = "RotaryEmbeddingConfigMixin"
"""What configurations of transformers check their ``rope_parameters`` by, since 5.0."""


def register_rope_types() -> None:
    """Lets configurations of transformers name the methods of :data:`ROPE_TYPES` as their ``rope_type``.

    Importing mrrope does this already; calling it again does no harm. The ``rope_parameters`` are ``rope_type``,
    ``rope_theta``, ``factor``, ``original_max_position_embeddings``, ``power`` for ``mrrope_pow``, and where wanted
    ``partial_rotary_factor`` and those of :data:`OPTIONS`. Names and meanings are those of transformers' ``yarn``.
    """
    rope_utils = importlib.import_module(TRANSFORMERS_MODULE)
    expect_rope_parameters()
    _register(rope_utils)


def expect_rope_parameters() -> None:
    """Raises where the transformers that is imported is one of before ``rope_parameters``."""
    if TRANSFORMERS_MODULE in sys.modules and not hasattr(sys.modules[TRANSFORMERS_MODULE], MIXIN):
        raise ValueError(f"transformers must be 5.0 or later, got {sys.modules['transformers'].__version__}")


def _register(rope_utils: ModuleType) -> None:
    mixin = getattr(rope_utils, MIXIN, None)
    if mixin is None:  # transformers 4, which has to go on working
        return
    for rope_type in ROPE_TYPES:
        rope_utils.ROPE_INIT_FUNCTIONS[rope_type] = _compute_parameters
        setattr(mixin, f"_validate_{rope_type}_rope_parameters", _validate)


def _compute_parameters(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """What transformers asks of a ``rope_type``: the frequencies, and the factor for cosines and sines."""
    table = config_table(config, layer_type)
    return torch.tensor(table.to_dict()["inv_freq"], dtype=torch.float32, device=device), table.attention_factor


def config_table(config: Any, layer_type: str | None = None) -> FrequencyTable:
    """The table that a configuration with one of :data:`ROPE_TYPES` stands for."""
    if layer_type is not None:
        # Transformers' own types do the same; configurations whose layers are all alike raise.
        with contextlib.suppress(AttributeError, ValueError):
            config = config.per_layer_config[layer_type]
    config.standardize_rope_params()
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return frequency_table(
        parameters["rope_type"],
        rotary_dim=int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
        base=parameters["rope_theta"],
        original_max_position=parameters["original_max_position_embeddings"],
        scale=parameters["factor"],
        **{argument: parameters[key] for key, argument in OPTIONS.items() if parameters.get(key) is not None},
    )


def _validate(config: Any, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None) -> None:
    """Checks ``rope_parameters`` when a configuration is made; a method of transformers' configurations."""
    rope_type = rope_parameters["rope_type"]
    required = {"rope_type", "factor", "original_max_position_embeddings"}
    if METHOD_TRAITS[rope_type].needs == "power":
        required.add("power")
    optional = {"rope_theta", *OPTIONS} - ({"power"} - required)
    config._check_received_keys(rope_type, set(rope_parameters), set(required), optional, ignore_keys=ignore_keys)

    def check(key: str, right: bool, what: str) -> None:
        value = rope_parameters.get(key)
        if not right and (key in required or value is not None):
            raise ValueError(f"`rope_parameters`'s {key} field must be {what}, got {value!r}")

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
    """Registers the types right after transformers' RoPE module is imported, whoever imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TRANSFORMERS_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_on_import() -> None:
    """Registers the types now if transformers is imported, else as soon as it is; imports nothing itself."""
    if TRANSFORMERS_MODULE in sys.modules:
        _register(sys.modules[TRANSFORMERS_MODULE])
    if not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())
