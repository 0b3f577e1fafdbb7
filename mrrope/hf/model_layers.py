"""The layers that a rotary embedding of a transformers model serves: how many, which, and their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mrrope.hf.rope_config import RotaryTable
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.lookup import ModelTables
from mrrope.tables.table_set import TableSet


@dataclass(frozen=True)
class ServedLayers:
    """The layers of a model that take their cosines and sines from one rotary embedding."""

    model: str
    """The model's class, for error messages."""
    config: Any
    """The configuration of the rotary embedding."""
    holders: tuple[int, ...]
    """The layers that the rotary embedding is in: those of attention modules that call their own; else empty."""

    @staticmethod
    def of(model: nn.Module, rotary: nn.Module) -> ServedLayers:
        """Find the layers of a rotary embedding in a model, patched or not."""
        holders = set()
        for module in model.modules():
            layer = layer_index(module)
            if layer is not None and any(part is rotary for part in module.modules()):
                holders.add(layer)
        return ServedLayers(type(model).__name__, rotary.config, tuple(sorted(holders)))

    @property
    def count(self) -> int:
        """The number of layers of the model, also of those without RoPE."""
        return int(self.config.num_hidden_layers)

    def with_type(self, layer_type: str | None) -> list[int]:
        """Return the layers that take the table of a layer type; all where the configuration does not say."""
        types = getattr(self.config, "layer_types", None) or []
        if self.holders:
            return list(self.holders)
        return [i for i in range(self.count) if layer_type not in types or types[i] == layer_type]

    def _config_of(self, layer: int) -> Any:
        return self.config.per_layer_config[layer] if getattr(self.config, "is_heterogeneous", False) else self.config

    def query_heads(self, layer: int) -> int:
        """Return the number of query heads of a layer."""
        config = self._config_of(layer)
        by_layer = getattr(config, "num_attention_heads_per_layer", None)  # Laguna's
        return int(by_layer[layer] if by_layer else config.num_attention_heads)

    def key_heads(self, layer: int) -> int:
        """Return the number of key heads that RoPE sees in a layer."""
        config = self._config_of(layer)
        is_falcon_40b = getattr(config, "new_decoder_architecture", False)  # which says multi_query, and has groups
        if getattr(config, "multi_query", False) and not is_falcon_40b:
            return 1
        if getattr(config, "kv_lora_rank", None):
            return 1  # latent attention rotates one key for all heads
        names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
        return next(int(heads) for heads in (getattr(config, name, None) for name in names) if heads)

    def fitted(self, table: ModelTables, layer_type: str | None, own: FrequencyTable) -> RotaryTable:
        """Return a table as the rotary embedding hands it to its layers.

        Args:
            table: tables for the model. Entries of a set for layers of other types are ignored.
            layer_type: one of the layer types of the rotary embedding.
            own: the model's own table, which takes the place of ignored entries.

        Raises:
            ValueError: the tables are for another number of layers or of heads.
        """
        self.require_fitting(table, layer_type)
        if not isinstance(table, TableSet):
            return table
        if len(self.holders) > 1:
            raise ValueError(
                f"method must be one table for all layers of {self.model}: its layers {list(self.holders)} share a "
                f"rotary embedding, got {table!r}"
            )
        if self.holders:
            return table[self.holders[0]]
        layers = self.with_type(layer_type)
        return tuple(table[i] if i in layers else own for i in range(self.count))

    def require_fitting(self, table: ModelTables, layer_type: str | None) -> None:
        """Raise ValueError where tables are for another number of layers, of key heads or of query heads.

        Args:
            table: tables for the model. Entries of a set for layers of other types are ignored.
            layer_type: one of the layer types of the rotary embedding.
        """
        if isinstance(table, FrequencyTable):
            return
        if isinstance(table, TableSet) and len(table) != self.count:
            raise ValueError(
                f"method must be a set for the {self.count} layers of {self.model}, got one for {len(table)}: {table!r}"
            )
        for i in self.with_type(layer_type):
            of_layer = table[i] if isinstance(table, TableSet) else table
            # What a table does not need is not read: not every configuration states it.
            if of_layer.key_heads is not None and of_layer.key_heads != self.key_heads(i):
                raise ValueError(
                    f"method must hold tables for the {self.key_heads(i)} key heads of {self.model} in layer {i}, got "
                    f"tables for {of_layer.key_heads}: {table!r}"
                )
            if of_layer.query_heads is not None and of_layer.query_heads != self.query_heads(i):
                raise ValueError(
                    f"method must hold query_factors for the {self.query_heads(i)} query heads of {self.model} in "
                    f"layer {i}, got {of_layer.query_heads}: {table!r}"
                )


def layer_index(module: nn.Module) -> int | None:
    """Return the layer that a module belongs to by its own account."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def key_layer(config: Any, layer: int) -> int:
    """Return the layer whose keys a layer attends to: in Gemma 3n and 4 the last layers have none of their own."""
    first_without = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if layer < first_without:
        return layer
    kinds = config.layer_types
    return max((i for i in range(first_without) if kinds[i] == kinds[layer]), default=layer)
