"""The fallback where the op cannot be fused: a rotary embedding keeps its code and gets other frequencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mrrope.hf import rope_config
from mrrope.hf.rotary_embedding import RotaryTables, Rotation
from mrrope.tables.frequency_table import FrequencyTable

ATTRIBUTE = "_mrrope_swapped"
"""The attribute of a rotary embedding that holds its :class:`TableSwap`."""


@dataclass(frozen=True)
class TableSwap:
    """The tables of a rotary embedding, and the values that they replaced, by attribute."""

    tables: RotaryTables
    originals: dict[str, Any] = field(default_factory=dict)


class SwappedTable:
    """Sets the frequencies of rotary embeddings that cannot be fused; a :class:`ModulePatch`."""

    def __init__(self, rotations: Sequence[Rotation] = ()) -> None:
        self.tables = {rotation.rotary: rotation.tables for rotation in rotations if rotation.fused is None}

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, TableSwap]]:
        """Yield the rotary embeddings that cannot be fused, with their tables."""
        for rotary, tables in self.tables.items():
            yield rotary, TableSwap(tables)

    def apply(self, module: nn.Module, state: TableSwap) -> None:
        """Set the frequencies and the attention factor of a rotary embedding."""
        kinds: Any = module.rope_type
        state.originals.clear()
        state.originals["rope_type"] = kinds
        setattr(module, ATTRIBUTE, state)  # first, so that undo finds it where the rest raises
        for layer_type, (table,) in state.tables.by_layer_type.items():
            rotated = state.tables.settings[layer_type].rotated_pairs
            assert isinstance(table, FrequencyTable)  # RotaryTables.can_be_swapped
            values: dict[str, Any] = {
                rope_config.FREQUENCIES: table.inv_freq * rotated,
                f"original_{rope_config.FREQUENCIES}": table.inv_freq * rotated,
                "attention_scaling": table.attention_factor,
            }
            for name, value in values.items():
                attribute = rope_config.attribute(layer_type, name)
                old = state.originals[attribute] = getattr(module, attribute)
                setattr(module, attribute, value.to(old) if isinstance(old, torch.Tensor) else value)
        # Rope types that recompute their frequencies would overwrite them.
        if isinstance(kinds, dict):
            module.rope_type = kinds | dict.fromkeys(state.tables.by_layer_type, "default")  # type: ignore[assignment]
        elif state.tables.by_layer_type:
            module.rope_type = "default"  # type: ignore[assignment]

    def undo(self, module: nn.Module) -> None:
        """Restore the original frequencies."""
        state = self.state_of(module)
        assert state is not None
        for name, value in state.originals.items():
            current = getattr(module, name)
            setattr(module, name, value.to(current.device) if isinstance(value, torch.Tensor) else value)
        delattr(module, ATTRIBUTE)

    def state_of(self, module: nn.Module) -> TableSwap | None:
        """Return the tables of a rotary embedding whose frequencies are swapped."""
        return vars(module).get(ATTRIBUTE)
