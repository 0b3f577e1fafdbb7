"""The frequency tables to compare, as they are named on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mrrope import shipped
from mrrope.patching import patched
from mrrope.tables import METHODS, FrequencyTable
from mrrope.trained import is_table_name

UNPATCHED = "unpatched"
"""The model as it comes, with its own table and its own code."""


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
        table = self.table or (FrequencyTable.load(self.name) if is_table_name(self.name) else self.name)
        with patched(model, table, **dict(self.options)):
            yield


def methods_named(names: Sequence[str], model: nn.Module, **options: Any) -> list[Method]:
    """The methods of these names, each tried on the model; tables from files take no options.

    Raises:
        ValueError: naming the method that is not one, or that does not go with the model.
    """
    methods = []
    for name in dict.fromkeys(names):
        if name != UNPATCHED and name not in METHODS and not is_table_name(name):
            known = ", ".join([UNPATCHED, *METHODS, *shipped.names()])
            raise ValueError(f"methods must be {known} or tables' .json files, got {name!r}")
        fixed = name == UNPATCHED or is_table_name(name)
        method = Method(name, () if fixed else tuple(options.items()))
        try:
            with method.applied(model):
                methods.append(method)
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"methods must go with the model, and {name} does not: {error}") from None
    return methods
