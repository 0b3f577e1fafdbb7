"""The keys of ``rope_parameters`` by which a user selects a table of mrrope."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mrrope.serving.mark import OWN_KEYS, ROPE_TYPE
from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS
from mrrope.tables.lookup import (
    PLAIN_ROPE_OPTIONS,
    TABLE_OPTIONS,
    ModelTables,
    config_names,
    is_saved_table,
    load_tables,
    tables_from_dict,
)

SHARED_TYPES = frozenset({"ntk", "yarn", "longrope", "llama3"})
"""Methods that are left to the engine, unless a key of mrrope comes with them. Not every engine has all of them."""

METHOD_OF_TYPE = {"linear": "pi"}
"""Methods whose name differs from that of their ``rope_type``."""

OPTIONS = config_names(*TABLE_OPTIONS)
"""Optional keys, and the arguments of ``mrrope.frequency_table`` that they set."""

MODEL_KEYS = frozenset({"partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved"})
"""Keys that describe the model and no extension."""

DEFAULT_RESERVE = 2048


@dataclass(frozen=True)
class RopeRequest:
    """The tables that a user selects, in terms of JSON."""

    method: str | None
    """A method of :func:`mrrope.frequency_table`; None with ready tables."""
    factor: float | Literal["auto"]
    """By how much to extend the model's length; ``"auto"`` for a scale per request."""
    max_factor: float | None = None
    reserve: int = DEFAULT_RESERVE
    tables: list[dict[str, Any]] = field(default_factory=list)
    """Ready tables and sets as their ``to_dict`` returns them, so that no other process reads a file."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of :func:`mrrope.frequency_table`."""

    @staticmethod
    def read(
        parameters: Mapping[str, Any], model_keys: Collection[str] = MODEL_KEYS, folder: Path | None = None
    ) -> RopeRequest:
        """Return the tables that ``rope_parameters`` select.

        Args:
            parameters: The user's ``rope_parameters``.
            model_keys: Keys that are let through, because they describe the model.
            folder: The model's folder, where the path of a table may start.

        Raises:
            ValueError: A key is unknown, or a value is not what its key takes.
            FileNotFoundError: There is no file of a table.
        """
        known = {"rope_type", "type", "factor", *OWN_KEYS, *OPTIONS}
        if unknown := sorted(parameters.keys() - known - set(model_keys)):
            raise ValueError(
                f"rope_parameters must have the keys {', '.join(sorted(known - {'type'}))}, or keys of the model, "
                f"got {', '.join(map(repr, unknown))}"
            )
        method = _method(parameters)
        options = {OPTIONS[key]: _option(key, parameters[key]) for key in OPTIONS if parameters.get(key) is not None}
        table, max_factor = parameters.get("table"), parameters.get("max_factor")
        steps = shipped.ladder(table) if isinstance(table, str) else []
        tables = _tables(steps or table, folder)
        factor = _factor(parameters.get("factor"), steps or table, tables)
        if max_factor is not None and not (_is_number(max_factor) and max_factor > 1):
            raise ValueError(f"rope_parameters: max_factor must be a number above 1, got {max_factor!r}")
        reserve = parameters.get("reserve")
        if reserve is not None and (not isinstance(reserve, int) or isinstance(reserve, bool) or reserve < 0):
            raise ValueError(f"rope_parameters: reserve must be a non-negative integer, got {reserve!r}")
        for key, value in (("max_factor", max_factor), ("reserve", reserve)):
            if value is not None and factor != "auto":
                raise ValueError(f'rope_parameters: {key} must come with factor "auto", got {key} {value!r}')
        if tables and (
            given := sorted(key for key, name in OPTIONS.items() if name in options.keys() - PLAIN_ROPE_OPTIONS)
        ):
            raise ValueError(f"rope_parameters: a ready table leaves no room for {', '.join(given)}")
        if tables and max_factor is not None:
            tables = _up_to(max_factor, tables, is_shipped=bool(steps))
        if method is not None and factor is None:
            raise ValueError(f'rope_parameters: factor must be given with {method}: a number from 1 on, or "auto"')
        return RopeRequest(
            method,
            1.0 if factor is None else factor,
            None if tables else max_factor,
            DEFAULT_RESERVE if reserve is None else reserve,
            tables,
            options,
        )

    @property
    def is_auto(self) -> bool:
        """Whether every request gets a scale of its own."""
        return self.factor == "auto"

    @property
    def starts_over(self) -> bool:
        """Whether the extension starts from plain RoPE instead of the model's own."""
        return not PLAIN_ROPE_OPTIONS.isdisjoint(self.options)

    def without(self, options: Collection[str]) -> RopeRequest:
        """Return the request without some arguments of :func:`mrrope.frequency_table`."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in options})

    def to_dict(self) -> dict[str, Any]:
        """Return the request as a JSON-serializable dict."""
        return asdict(self)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _method(parameters: Mapping[str, Any]) -> str | None:
    """Return the method, or None where a table is given."""
    rope_type, legacy = parameters.get("rope_type"), parameters.get("type")
    if rope_type is not None and legacy is not None and rope_type != legacy:
        raise ValueError(f"rope_parameters: rope_type and type must agree, got {rope_type!r} and {legacy!r}")
    rope_type = legacy if rope_type is None else rope_type
    method, table = parameters.get("method"), parameters.get("table")
    if rope_type == ROPE_TYPE:
        if (method is None) == (table is None):
            given = "neither" if method is None else f"{method!r} and {table!r}"
            raise ValueError(
                f"rope_parameters: rope_type {ROPE_TYPE!r} must come with a method or a table, got {given}"
            )
        if method is not None and method not in METHODS:
            raise ValueError(f"rope_parameters: method must be one of {', '.join(METHODS)}, got {method!r}")
        return method
    for key, value in (("method", method), ("table", table)):
        if value is not None:
            raise ValueError(f"rope_parameters: {key} must come with rope_type {ROPE_TYPE!r}, got {rope_type!r}")
    of_type = METHOD_OF_TYPE.get(rope_type, rope_type) if isinstance(rope_type, str) else None
    if of_type not in METHODS:
        raise ValueError(
            f"rope_parameters: rope_type must be {ROPE_TYPE!r} or a method of mrrope ({', '.join(METHODS)}), "
            f"got {rope_type!r}"
        )
    return of_type


def _factor(factor: Any, table: Any, tables: Sequence[dict[str, Any]]) -> float | Literal["auto"] | None:
    is_ladder = isinstance(table, Sequence) and not isinstance(table, str)
    if factor == "auto" or (factor is None and is_ladder):
        return "auto"
    if table is not None and not is_ladder and factor == tables[0]["scale"]:
        return None  # export_config writes the table's own scale as factor beside it.
    if table is not None and factor is not None:
        expected = "'auto' or left out with a list of tables" if is_ladder else "'auto' or left out with a ready table"
        raise ValueError(f"rope_parameters: factor must be {expected}, got {factor!r}")
    if factor is not None and not (_is_number(factor) and factor >= 1):
        raise ValueError(f'rope_parameters: factor must be a number from 1 on, or "auto", got {factor!r}')
    return factor  # type: ignore[no-any-return]


def _option(key: str, value: Any) -> Any:
    if key in ("bounds", "factors"):
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_number, value))
        if not is_list or (key == "bounds" and (len(value) != 2 or not all(isinstance(bound, int) for bound in value))):
            expected = "a list of two integers" if key == "bounds" else "a list of numbers"
            raise ValueError(f"rope_parameters: {key} must be {expected}, got {value!r}")
        return list(value)
    is_positive = key in ("rope_theta", "original_max_position_embeddings", "attention_factor")
    if not _is_number(value) or (is_positive and value <= 0):
        expected = "a positive number" if is_positive else "a number"
        raise ValueError(f"rope_parameters: {key} must be {expected}, got {value!r}")
    return value


def _tables(table: Any, folder: Path | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    is_ladder = isinstance(table, Sequence) and not isinstance(table, str)
    if is_ladder and not table:
        raise ValueError("rope_parameters: table must be a table or a list of tables, got an empty list")
    return [_table(item, folder).to_dict() for item in (table if is_ladder else [table])]


def _up_to(max_factor: float, tables: list[dict[str, Any]], *, is_shipped: bool) -> list[dict[str, Any]]:
    """Return the tables of a shipped ladder up to a scale; lists of the user are used whole."""
    if not is_shipped:
        raise ValueError(f"rope_parameters: ready tables leave no room for max_factor, got {max_factor!r}")
    if found := [table for table in tables if table["scale"] <= max_factor]:
        return found
    raise ValueError(
        f"rope_parameters: max_factor must be at least {tables[0]['scale']:g}, the smallest scale of the shipped "
        f"tables, got {max_factor!r}"
    )


def _table(table: Any, folder: Path | None) -> ModelTables:
    if isinstance(table, Mapping):
        try:
            return tables_from_dict(dict(table))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rope_parameters: table must be a table's JSON: {error}") from None
    if not isinstance(table, str) or not is_saved_table(table):
        raise ValueError(
            "rope_parameters: table must be the path of a table's .json, the name of a table or a ladder that comes "
            f"with mrrope ({', '.join((*shipped.names(), *shipped.ladders()))}), or a list of tables, got {table!r}"
        )
    path = Path(table)
    if folder is not None and not path.exists() and (folder / path).exists():
        path = folder / path
    if path.suffix == ".json" and not path.is_file():
        raise FileNotFoundError(f"rope_parameters: table must be the path of a table's .json, and there is no {table}")
    try:
        return load_tables(path if path.suffix == ".json" else table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rope_parameters: table must be a table's JSON, got {table}: {error}") from None
