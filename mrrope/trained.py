"""What a model was trained with, and the table that a method gives for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrrope import shipped
from mrrope.tables import METHODS, FrequencyTable, frequency_table


@dataclass(frozen=True)
class Trained:
    """What a model was trained with, as far as a table depends on it."""

    rotary_dim: int
    base: float
    original_max_position: float | None
    """None where the model does not tell."""


def is_table_name(name: str) -> bool:
    """Whether this is the path of a table's JSON, or the name of a table that comes with the package."""
    return name.endswith(".json") or name in shipped.names()


def table_for(
    trained: Trained, method: str | FrequencyTable | Path, scale: float, options: dict[str, Any]
) -> FrequencyTable:
    """The table of a method's name, a ready one, or the one in a JSON file or of a name that comes with the package;
    options replace what the model says."""
    if isinstance(method, Path) or (isinstance(method, str) and is_table_name(method)):
        method = FrequencyTable.load(method)
    if isinstance(method, FrequencyTable):
        if options or scale != 1.0:
            given = {**({"scale": scale} if scale != 1.0 else {}), **options}
            raise ValueError(f"method is a ready table, which leaves no room for {given}")
        table = method
    else:
        if isinstance(method, str) and method not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(METHODS)}, the path of a table's .json, or the name of a table that "
                f"comes with mrrope ({shipped.listed()}), got {method!r}"
            )
        arguments = {name: getattr(trained, name) for name in ("rotary_dim", "base", "original_max_position")}
        arguments |= {"scale": scale, **options}
        if arguments["original_max_position"] is None:
            raise ValueError(
                "original_max_position must be given for this model: its configuration does not say what length it "
                "was trained on"
            )
        table = frequency_table(method, **arguments)
    if table.rotary_dim != trained.rotary_dim:
        raise ValueError(f"method must give a table of the model's rotary_dim {trained.rotary_dim}, got {table!r}")
    return table
