"""The frequency tables to compare, as they are named on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mrrope import calibrated_tables
from mrrope.hf.patch import patched
from mrrope.table_lookup import is_saved_table
from mrrope.tables import METHODS, FrequencyTable, frequency_table

UNPATCHED = "unpatched"
"""The model as it comes, with its own table and its own code."""

USUAL: dict[str, Any] = {"rotary_dim": 128, "base": 10_000.0, "original_max_position": 4096}
"""A model's settings, to find out without one whether a method makes a table by its name alone."""


@dataclass(frozen=True)
class Method:
    """A frequency table, or the rule that makes one for a model."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    table: FrequencyTable | None = None
    """Where it is at hand, whatever the name."""

    @property
    def follows_length(self) -> bool:
        """Whether the table depends on how long the text is."""
        return dict(self.options).get("scale") == "auto"

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model reads by this table within the ``with`` block."""
        if self.name == UNPATCHED:
            yield
            return
        table = self.table or (FrequencyTable.load(self.name) if is_saved_table(self.name) else self.name)
        with patched(model, table, **dict(self.options)):
            yield


def methods_named(names: Sequence[str], **options: Any) -> list[Method]:
    """The methods of these names; tables from files take no options.

    Raises:
        ValueError: naming the method that is not one, or of which no table comes.
    """
    if not names:
        raise ValueError("methods must be one or more, with commas between them, got none")
    methods = []
    for name in dict.fromkeys(names):
        if name != UNPATCHED and name not in METHODS and not is_saved_table(name):
            known = ", ".join([UNPATCHED, *METHODS, *calibrated_tables.names()])
            raise ValueError(f"methods must be {known} or tables' .json files, got {name!r}")
        try:
            if is_saved_table(name):
                FrequencyTable.load(name)
            elif name != UNPATCHED:
                frequency_table(name, **USUAL)
        except (ValueError, OSError) as error:
            raise ValueError(f"methods must give a table, and {name} does not: {error}") from None
        fixed = name == UNPATCHED or is_saved_table(name)
        methods.append(Method(name, () if fixed else tuple(options.items())))
    return methods


def try_methods(methods: Sequence[Method], model: nn.Module) -> None:
    """Patches the model by each, before hours of reading.

    Raises:
        ValueError: naming the method that does not go with the model.
    """
    for method in methods:
        try:
            with method.applied(model):
                pass
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"methods must go with the model, and {method.name} does not: {error}") from None
