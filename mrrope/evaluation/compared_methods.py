"""The methods and tables that an evaluation compares, by their names on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mrrope.evaluation.chunked_reader import Reader, ReaderMaker
from mrrope.evaluation.documents import opening_tokens
from mrrope.evaluation.truncated import TRUNCATED, Truncation, native_length
from mrrope.hf import rope_config
from mrrope.hf.patch import patched
from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS, frequency_table
from mrrope.tables.lookup import ModelTables, is_saved_table, load_tables, nearest

UNPATCHED = "unpatched"
"""The model with its own table and its own code."""
STOCK = (UNPATCHED, TRUNCATED)
"""Rows of the stock model, which need no table."""

TYPICAL_SETTINGS: dict[str, Any] = {"rotary_dim": 128, "base": 10_000.0, "original_max_position": 4096}
"""Settings to check, before a model is loaded, that a method needs no further arguments."""


@dataclass(frozen=True)
class Method:
    """A frequency table, tables per head or layer, a ladder of them, or a method that makes a table for a model.

    Two names are of the stock model: ``unpatched`` reads the whole text, ``truncated`` a window of its native length.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    table: ModelTables | None = None
    """The table or set to use; without one, ``name`` is a method or the name of a table, a set or a ladder."""

    @property
    def follows_length(self) -> bool:
        """Whether the table depends on the length of the text."""
        return dict(self.options).get("scale") == "auto"

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Patch the model with this table within a ``with`` block."""
        if self.name == UNPATCHED or (self.name == TRUNCATED and self.is_plain(model)):
            yield
            return
        table = "rope" if self.name == TRUNCATED else self.name if self.table is None else self.table
        with patched(model, table, **dict(self.options)):
            yield

    def is_plain(self, model: nn.Module) -> bool:
        """Whether the stock model rotates as the options say: they may ask for plain RoPE instead of its extension."""
        return not self.options or rope_config.global_settings(model).native is None

    def window(self, model: nn.Module) -> int | None:
        """The native length that ``truncated`` reads; None for what reads the whole text."""
        if self.name != TRUNCATED:
            return None
        stated = dict(self.options).get("original_max_position")
        return native_length(model) if stated is None else int(stated)

    def reader(self, model: nn.Module, tokenizer: Any) -> ReaderMaker:
        """What reads texts with this method."""
        window = self.window(model)
        if window is None:
            return Reader
        return Truncation(window, len(opening_tokens(tokenizer))).reader


def methods_named(names: Sequence[str], **options: Any) -> list[Method]:
    """The methods of these names.

    Args:
        names: methods, files of tables, shipped names and ladders, ``unpatched`` or ``truncated``.
        options: of :func:`mrrope.patch`, for methods. Ready tables have a scale of their own; those that were made for
            the ``original_max_position`` among the options get that, too.

    Raises:
        ValueError: a name is unknown or gives no table, or is that of a ladder and the scale is not auto.
    """
    if not names:
        raise ValueError("methods must be one or more, with commas between them, got none")
    methods = []
    for name in dict.fromkeys(names):
        if name in shipped.ladders():
            if options.get("scale") != "auto":
                given = options.get("scale")
                raise ValueError(f"methods may have the ladder {name} with scale auto only, got scale {given}")
            methods.append(Method(name, (("scale", "auto"),)))
            continue
        if name not in (*STOCK, *METHODS) and not is_saved_table(name):
            known = [*STOCK, *METHODS, *shipped.names(), *shipped.ladders()]
            near = nearest(name, known)
            raise ValueError(f"methods must be {', '.join(known)} or .json files of tables or sets, got {name!r}{near}")
        own: dict[str, Any] = {}
        try:
            if is_saved_table(name):
                own = stated_length(load_tables(name), options)
            elif name == TRUNCATED:
                own = {key: value for key, value in options.items() if key == "original_max_position"}
            elif name != UNPATCHED:
                frequency_table(name, **TYPICAL_SETTINGS)
                own = options
        except (TypeError, ValueError, OSError) as error:
            raise ValueError(f"methods must give a table, and {name} does not: {error}") from None
        methods.append(Method(name, tuple(own.items())))
    return methods


def stated_length(table: ModelTables, options: dict[str, Any]) -> dict[str, Any]:
    """The option ``original_max_position``, where it is that of a ready table."""
    length = options.get("original_max_position")
    return {"original_max_position": length} if length == table.original_max_position else {}


def check_methods(methods: Sequence[Method], model: nn.Module) -> None:
    """Patch the model with each method once, so that a bad one fails before the evaluation starts.

    Raises:
        ValueError: a method does not fit the model.
    """
    for method in methods:
        try:
            method.window(model)
            with method.applied(model):
                pass
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"methods must go with the model, and {method.name} does not: {error}") from None


def truncation_past(longest: int, model: nn.Module, **options: Any) -> list[Method]:
    """The row ``truncated``, if the longest length is past the native length; none if that is not known."""
    [method] = methods_named([TRUNCATED], **options)
    try:
        window = method.window(model)
    except ValueError:
        return []
    return [method] if window is not None and longest > window else []
