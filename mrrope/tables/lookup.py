"""Resolve a method, tables or a file to the frequency table, or the tables, for one model."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrrope.tables import json as table_json
from mrrope.tables import shipped
from mrrope.tables.axis_tables import AxisTables
from mrrope.tables.frequency_table import METHODS, FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.table_set import TableSet, every_table

ModelTables = FrequencyTable | HeadTables | TableSet
"""What rotates a model: one table for all, one per key head of every layer, or the tables of each layer."""

PLAIN_ROPE_OPTIONS = frozenset({"base", "original_max_position"})
"""Options that override the model's configuration; with one of them a method extends plain RoPE."""

TABLE_OPTIONS = tuple(
    name for name in inspect.signature(frequency_table).parameters if name not in ("method", "scale", "native")
)
"""The names of the options that extend a model by a method."""
STOCK_ROWS = {
    "unpatched": "the row of mrrope eval for the stock model",
    "truncated": "the row of mrrope eval for the stock model over a sliding window of its native length",
}
"""Names beside those of methods in the comparisons, and what they are."""
CONFIG_NAMES = {
    "rope_theta": "base",
    "original_max_position_embeddings": "original_max_position",
    "factor": "scale",
    "max_factor": "max_scale",
    "beta_slow": "alpha",
    "beta_fast": "beta",
    **{name: name for name in ("bounds", "power", "factors", "attention_factor", "reserve")},
}
"""The keys of ``rope_parameters`` that mrrope's types take, and the arguments that they set."""

OTHER_NAMES = CONFIG_NAMES | {
    "low_freq_factor": "alpha",
    "high_freq_factor": "beta",
    "short_factor": "factors",
    "long_factor": "factors",
}
"""Names that configurations of transformers have for arguments, and the names that they have here."""


def config_names(*arguments: str) -> dict[str, str]:
    """Return the keys of ``rope_parameters`` that set these arguments, each with its argument."""
    return {key: argument for key, argument in CONFIG_NAMES.items() if argument in arguments}


@dataclass(frozen=True)
class NativeRope:
    """The RoPE of an unpatched model, as far as a table depends on it."""

    rotary_dim: int
    base: float
    original_max_position: float | None
    """The context length of the unpatched model; None where its configuration states none."""
    native: FrequencyTable | None = None
    """The table of the unpatched model, where that is not plain RoPE."""
    trained_length: float | None = None
    """The context length before the extension that the configuration sets; the configured length if it sets none."""
    held_attention_factor: float = 1.0
    """The square root of the temperature that the model's attention applies for its configured extension."""
    untrained_extension: str | None = None
    """The extension in the configuration, if it is one that needs no training."""

    def extension_warning(self, name: str, scale: float | Literal["auto"] | None) -> str | None:
        """Return what to warn of where a scale may be meant to replace the model's extension; else None.

        Args:
            name: the model's.
            scale: by how much a method is to extend this RoPE; None where it is not extended by a scale.
        """
        if self.untrained_extension is None or scale is None or scale == 1.0:
            return None
        return (
            f"{name} is extended by its configuration already ({self.untrained_extension}): scale={scale!r} extends "
            f"the {self.original_max_position:.15g} tokens that it covers now; "
            f"original_max_position={self.trained_length:.15g} extends plain RoPE instead"
        )

    def table_arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with which :func:`frequency_table` extends this RoPE.

        Args:
            options: the user's options; any of :data:`PLAIN_ROPE_OPTIONS` extends plain RoPE instead.
        """
        if options.keys().isdisjoint(PLAIN_ROPE_OPTIONS):
            return {
                "rotary_dim": self.rotary_dim,
                "base": self.base,
                "original_max_position": self.original_max_position,
                "native": self.native,
            }
        length = self.trained_length or self.original_max_position
        return {"rotary_dim": self.rotary_dim, "base": self.base, "original_max_position": length}


def needs_scale(method: Any) -> bool:
    """Whether ``method`` is the name of a method that extends, and so must come with a scale."""
    return isinstance(method, str) and method in METHODS and method != "rope"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known name that is nearest to an unknown one, if one is near."""
    # Underscores and capitals are no difference: "YaRN", "mrrope-pro".
    spelled = {each.lower().replace("-", "_"): each for each in known}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), spelled, n=1)
    return f": the nearest is {spelled[near[0]]!r}" if near else ""


def unknown_method(name: str, *others: str) -> str:
    """Return an error message for a name that is no method and no saved table: the nearest known one, and all of them.

    Args:
        name: what was given.
        others: more names that were possible.
    """
    return (
        f"method must be one of {', '.join(METHODS)}, the path of a table's .json, or the name of a table that comes "
        f"with mrrope ({shipped.listed()}), got {name!r}{nearest(name, (*METHODS, *shipped.names(), *others))}"
    )


def is_saved_table(name: str) -> bool:
    """Whether ``name`` is the path of a JSON with a table or a set, or the name of a shipped one."""
    return name.endswith(".json") or name in shipped.names()


def tables_from_dict(data: dict[str, Any]) -> ModelTables:
    """Return the table, the head tables or the set of a ``to_dict`` dict, by its format.

    Raises:
        TypeError, ValueError: ``data`` holds none of them.
    """
    kinds: dict[str, Callable[[dict[str, Any]], ModelTables]] = {
        table_json.HEADS_FORMAT: HeadTables.from_dict,
        table_json.SET_FORMAT: TableSet.from_dict,
    }
    found = data.get("format") if isinstance(data, dict) else None
    return kinds.get(str(found), FrequencyTable.from_dict)(data)


def load_tables(path: str | Path) -> ModelTables:
    """Read a table, head tables or a table set, whichever the file or the shipped name holds.

    Raises:
        FileNotFoundError: there is no such file or shipped name.
        ValueError: the file holds none of them.
    """
    return tables_from_dict(table_json.read_object(shipped.file_of(path)))


def resolve_table(
    trained: NativeRope, method: str | ModelTables | Path, scale: float | None, options: dict[str, Any]
) -> FrequencyTable:
    """Return the one table that ``method`` means for a model, with the arguments of :func:`resolve_tables`.

    Raises:
        ValueError: as in :func:`resolve_tables`, or ``method`` has tables per layer or head.
    """
    tables = resolve_tables(trained, method, scale, options)
    if not isinstance(tables, FrequencyTable):
        raise ValueError(f"method must be one table for all layers and heads here, got {tables!r}")
    return tables


def resolve_tables(
    trained: NativeRope, method: str | ModelTables | Path, scale: float | None, options: dict[str, Any]
) -> ModelTables:
    """Return the table or the tables that ``method`` means for a model.

    Args:
        trained: the unpatched model's RoPE.
        method: a method's name, a table, head tables, a table set, the path of the JSON of one of those, or the name
            of a shipped one.
        scale: by how much to extend the context. Methods need it, but for ``"rope"``; a ready table has its own, which
            may be stated.
        options: more arguments of :func:`frequency_table`; they override the model's configuration.

    Raises:
        TypeError: ``method`` is none of these.
        ValueError: ``method`` is unknown, does not fit the model or the options, or lacks its scale.
    """
    _check_names(options)
    if isinstance(method, Path) or (isinstance(method, str) and is_saved_table(method)):
        method = load_tables(method)
    if isinstance(method, FrequencyTable | HeadTables | TableSet):
        given = {**({"scale": scale} if scale not in (None, method.scale) else {}), **options}
        if given.keys() - PLAIN_ROPE_OPTIONS:
            raise ValueError(
                f"method is a ready table, which leaves no room for {given}: its scale is {method.scale:g}"
            )
        _check_fits_model(trained, method, options)
        return method
    if isinstance(method, AxisTables):
        raise TypeError(
            "method must be a method's name, a FrequencyTable, HeadTables, a TableSet or a path: a model knows itself "
            f"which of a token's positions rotates each pair, got {method!r}"
        )
    if isinstance(method, str) and (steps := shipped.ladder(method)):
        raise ValueError(
            f"method must be one table without scale='auto', such as {steps[0]!r}, and {method!r} is a ladder of "
            f"{len(steps)}, got scale {scale!r}"
        )
    if isinstance(method, str) and method not in METHODS:
        row = f", which is {STOCK_ROWS[method]}: leave the model unpatched" if method in STOCK_ROWS else ""
        raise ValueError(unknown_method(method, *shipped.ladders()) + row)
    arguments = trained.table_arguments(options)
    if scale is None and needs_scale(method):
        length = (arguments | options)["original_max_position"]
        tokens = "the tokens" if length is None else f"the {length:.15g} tokens"
        raise ValueError(
            f"scale must be given with method {method!r}: scale=4.0 covers 4 times {tokens} of the model, and patch "
            "takes scale='auto', got none"
        )
    scale = 1.0 if scale is None else scale
    arguments |= {"scale": scale, **options}
    if arguments["original_max_position"] is None:
        if scale != 1.0:
            raise ValueError(
                "original_max_position must be given for this model: its configuration states no native length"
            )
        arguments["original_max_position"] = 1.0  # at scale 1 the bounds have no effect
    table = frequency_table(method, **arguments)
    _check_rotary_dim(trained, table)
    is_native = arguments.get("native") is not None
    if is_native or "attention_factor" in options or trained.held_attention_factor == 1.0:
        return table
    # The model's attention still applies the temperature of its configured extension, which this table replaces.
    remaining = table.attention_factor / trained.held_attention_factor
    return frequency_table(method, **arguments, attention_factor=remaining)


def _check_names(options: dict[str, Any]) -> None:
    for name in options.keys() - set(TABLE_OPTIONS):
        known = f"it is called {OTHER_NAMES[name]} here" if name in OTHER_NAMES else f"only {', '.join(TABLE_OPTIONS)}"
        raise TypeError(f"there is no option {name!r}: {known}, got {name}={options[name]!r}")


def _check_fits_model(trained: NativeRope, table: ModelTables, overrides: dict[str, Any]) -> None:
    """Raise where a table was made for another model; options in ``overrides`` override the model's configuration."""
    _check_rotary_dim(trained, table)
    lengths = [trained.original_max_position, trained.trained_length]
    known = {
        "base": [overrides["base"]] if "base" in overrides else [trained.base],
        "original_max_position": [overrides["original_max_position"]]
        if "original_max_position" in overrides
        else [length for length in lengths if length is not None],
    }
    for name, values in known.items():
        if values and not any(math.isclose(getattr(table, name), value, rel_tol=1e-6) for value in values):
            raise ValueError(
                f"method must be a table for the model's {name} {values[0]:.15g}, got {table!r}; if it is meant, say "
                f"{name}={getattr(table, name):.15g}"
            )
    reached, native = table.original_max_position * table.scale, trained.original_max_position
    if not overrides and native is not None and reached < native:
        warnings.warn(f"{table!r} reads {reached:.15g} tokens, and the unpatched model {native:.15g}", stacklevel=3)
    held, factors = trained.held_attention_factor, {one.attention_factor for one in every_table(table)}
    if held != 1.0 and table.original_max_position == trained.trained_length and factors != {1.0}:
        once = "attention_factor=" + ", ".join(f"{factor / held:.15g}" for factor in sorted(factors))
        warnings.warn(
            f"the attention of the model holds a temperature already, and {table!r} adds its own: {once} would count "
            "it once",
            stacklevel=3,
        )


def _check_rotary_dim(trained: NativeRope, table: ModelTables) -> None:
    if table.rotary_dim != trained.rotary_dim:
        raise ValueError(f"method must give a table of the model's rotary_dim {trained.rotary_dim}, got {table!r}")
