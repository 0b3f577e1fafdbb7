"""Calls of rescale_cache_."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase, by_heads

SPARE_BLOCKS = 3


class RescaleCacheCall(OpCall):
    """A call on several layers, whole or in a list of distinct blocks."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        self.row_of_pair: Tensor | None = None
        self.olds, self.news = (self.tables(stream) for stream in (0, 1))
        given_olds, given_news = (self.given_tables(tables) for tables in (self.olds, self.news))
        self.stays = [old == new for old, new in zip(given_olds, given_news, strict=True)]
        memory = "contiguous" if case.memory == "packed" else case.memory
        layers = [self.tensors.view(case.heads_shape(case.q_heads), memory) for i in range(case.layers)]
        blocks = None
        if case.blocks:
            # One block per sequence, at random places among SPARE_BLOCKS more.
            shape = list(case.heads_shape(case.q_heads))
            shape[0] += SPARE_BLOCKS
            layers = [self.tensors.view(tuple(shape), memory) for i in range(case.layers)]
            order = case.numpy_random(5).permutation(shape[0])[: case.batch]
            blocks = torch.from_numpy(order.astype(np.int64)).to(case.device)
        self.arguments = {
            "keys": layers,
            "positions": self.tensors.positions(),
            "old": given_olds[0] if case.tables == "one" else given_olds,
            "new": given_news[0] if case.tables == "one" else given_news,
            "layout": case.layout,
            "pairing": case.pairing,
            "blocks": blocks,
        }

    @property
    def layers_with_tables(self) -> int:
        """How many layers have tables of their own; one where all layers share them."""
        return self.case.layers if self.case.table_sets else 1

    def tables(self, stream: int) -> list[mrrope.FrequencyTable]:
        """Return the head tables of the layers of each sequence, one after the other, of at least one sequence."""
        random = self.case.numpy_random(6, stream)
        count = 1 if self.case.tables == "one" else max(1, self.case.sequences)
        size = count * self.layers_with_tables * self.case.table_heads
        return [self.case.make_table(int(number)) for number in random.integers(0, self.case.table_count + 1, size)]

    def given_tables(self, tables: list[mrrope.FrequencyTable]) -> list[Any]:
        """Return what the op is given for each sequence."""
        if not self.case.position_rows:
            layers = by_heads(tables, self.case.table_heads)
            if not self.case.table_sets:
                return layers
            size = self.case.layers
            return [mrrope.TableSet(layers[i : i + size]) for i in range(0, len(layers), size)]
        rows = self.case.position_rows
        sections = self.case.numpy_random(3).multinomial(self.case.rotary_dim // 2, [1.0 / rows] * rows)
        given = [mrrope.AxisTables.of_sections(table, sections.tolist()) for table in tables]
        self.row_of_pair = torch.tensor([given[0].axis_of_pair], device=self.case.device)
        return given

    def written(self, arguments: Arguments) -> list[Tensor]:
        return arguments["keys"]

    def run(self, arguments: Arguments) -> list[Tensor]:
        mrrope.rescale_cache_(**arguments)
        return arguments["keys"]

    def rotations(self, positions: Tensor, layer: int) -> list[Tensor]:
        """Return the factors of every head table of a layer."""
        heads, layers = self.case.table_heads, self.layers_with_tables

        def of_layer(tables: list[mrrope.FrequencyTable]) -> list[PhaseSteps]:
            firsts = range(layer * heads, len(tables), layers * heads)  # of each sequence
            its_tables = [table for first in firsts for table in tables[first : first + heads]]
            return PhaseSteps.of_heads(its_tables, heads, self.case.device)

        return [
            float64_reference.rotations(positions, new.relative_to(old), self.case.layout, self.row_of_pair)
            for old, new in zip(of_layer(self.olds), of_layer(self.news), strict=True)
        ]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        of_layers = [self.rotations(before["positions"], layer) for layer in range(self.layers_with_tables)]
        stays = torch.tensor(self.stays, device=case.device)
        found = []
        for i, keys in enumerate(before["keys"]):
            taken = keys if before["blocks"] is None else keys[before["blocks"]]
            by = float64_reference.of_every_head(of_layers[i % len(of_layers)], taken, case.layout)
            value = float64_reference.rotated(taken, by, case.pairing)
            allowed = float64_reference.allowed_error(value, case.torch_dtype, case.rotary_dim, case.pairing)
            kept = stays.view(-1, *[1] * (keys.dim() - 1))
            value, allowed = torch.where(kept, taken.double(), value), torch.where(kept, 0.0, allowed)
            if before["blocks"] is not None:
                whole, none = keys.double(), torch.zeros(keys.shape, dtype=torch.float64, device=case.device)
                value = whole.index_copy(0, before["blocks"], value)
                allowed = none.index_copy(0, before["blocks"], allowed)
            found.append(Expected(f"keys[{i}]", value, allowed))
        return found
