"""What a model rotates by as it is, and the table that a method gives for it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrrope import calibrated_tables
from mrrope.tables import METHODS, FrequencyTable, frequency_table


@dataclass(frozen=True)
class Trained:
    """What a model does without an extension, as far as a table depends on it."""

    rotary_dim: int
    base: float
    original_max_position: float | None
    """How far the model reads as it is; None where it does not tell."""
    native: FrequencyTable | None = None
    """What the model rotates by, where that is not plain RoPE."""
    trained_length: float | None = None
    """The length before the extension that the model's configuration names; what it states where it names none."""
    held_attention_factor: float = 1.0
    """The root of a temperature that the model's attention applies itself, for the extension of its configuration."""

    def arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of :func:`frequency_table` that extend what the model does; ``base`` or
        ``original_max_position`` among the options start over from plain RoPE."""
        if options.keys().isdisjoint(STARTING_OVER):
            return {
                "rotary_dim": self.rotary_dim,
                "base": self.base,
                "original_max_position": self.original_max_position,
                "native": self.native,
            }
        length = self.trained_length or self.original_max_position
        return {"rotary_dim": self.rotary_dim, "base": self.base, "original_max_position": length}


STARTING_OVER = frozenset({"base", "original_max_position"})
"""What a user may know better than the model's configuration."""


def is_table_name(name: str) -> bool:
    """Whether this is the path of a table's JSON, or the name of a table that comes with the package."""
    return name.endswith(".json") or name in calibrated_tables.names()


def table_for(
    trained: Trained, method: str | FrequencyTable | Path, scale: float, options: dict[str, Any]
) -> FrequencyTable:
    """The table of a method's name, a ready one, or the one in a JSON file or of a name that comes with the package;
    options replace what the model says."""
    if isinstance(method, Path) or (isinstance(method, str) and is_table_name(method)):
        method = FrequencyTable.load(method)
    if isinstance(method, FrequencyTable):
        given = {**({"scale": scale} if scale != 1.0 else {}), **options}
        if given.keys() - STARTING_OVER:
            raise ValueError(f"method is a ready table, which leaves no room for {given}")
        _check_is_of(trained, method, given)
        return method
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, the path of a table's .json, or the name of a table that "
            f"comes with mrrope ({calibrated_tables.listed()}), got {method!r}"
        )
    arguments = trained.arguments(options) | {"scale": scale, **options}
    if arguments["original_max_position"] is None:
        if scale != 1.0:
            raise ValueError(
                "original_max_position must be given for this model: its configuration does not say how far it reads"
            )
        arguments["original_max_position"] = 1.0  # no bounds count where the method has no scale to spread
    table = frequency_table(method, **arguments)
    _check_rotary_dim(trained, table)
    is_native = arguments.get("native") is not None
    if is_native or "attention_factor" in options or trained.held_attention_factor == 1.0:
        return table
    # The model's attention goes on applying the temperature of the extension that is started over.
    remaining = table.attention_factor / trained.held_attention_factor
    return frequency_table(method, **arguments, attention_factor=remaining)


def _check_is_of(trained: Trained, table: FrequencyTable, told: dict[str, Any]) -> None:
    """Raises where a ready table was made for another model; what the user tells replaces what the model says."""
    _check_rotary_dim(trained, table)
    lengths = [trained.original_max_position, trained.trained_length]
    known = {
        "base": [told["base"]] if "base" in told else [trained.base],
        "original_max_position": [told["original_max_position"]]
        if "original_max_position" in told
        else [length for length in lengths if length is not None],
    }
    for name, values in known.items():
        if values and not any(math.isclose(getattr(table, name), value, rel_tol=1e-6) for value in values):
            raise ValueError(
                f"method must be a table for the model's {name} {values[0]:.15g}, got {table!r}; if it is meant, say "
                f"{name}={getattr(table, name):.15g}"
            )
    reached, native = table.original_max_position * table.scale, trained.original_max_position
    if not told and native is not None and reached < native:
        warnings.warn(f"{table!r} reads {reached:.15g} tokens, and the model as it is {native:.15g}", stacklevel=3)
    held = trained.held_attention_factor
    if held != 1.0 and table.original_max_position == trained.trained_length and table.attention_factor != 1.0:
        warnings.warn(
            f"the attention of the model holds a temperature already, and {table!r} adds its own: "
            f"attention_factor={table.attention_factor / held:.15g} would count it once",
            stacklevel=3,
        )


def _check_rotary_dim(trained: Trained, table: FrequencyTable) -> None:
    if table.rotary_dim != trained.rotary_dim:
        raise ValueError(f"method must give a table of the model's rotary_dim {trained.rotary_dim}, got {table!r}")
