"""Calls of rescale_cache_."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase

SPARE_BLOCKS = 3


class RescaleCacheCall(OpCall):
    """A call on several layers, whole or in a list of distinct blocks."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        self.row_of_pair: Tensor | None = None
        self.olds, self.news = (self.tables(stream) for stream in (0, 1))
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
            "old": self.table_argument(self.olds),
            "new": self.table_argument(self.news),
            "layout": case.layout,
            "pairing": case.pairing,
            "blocks": blocks,
        }

    def tables(self, stream: int) -> list[mrrope.FrequencyTable]:
        """Return one table per sequence, at least one."""
        random = self.case.numpy_random(6, stream)
        count = 1 if self.case.tables == "one" else self.case.sequences
        return [self.case.make_table(int(random.integers(0, self.case.table_count + 1))) for _ in range(max(1, count))]

    def table_argument(self, tables: list[mrrope.FrequencyTable]) -> Any:
        given: list[Any] = tables
        if self.case.position_rows:
            rows = self.case.position_rows
            sections = self.case.numpy_random(3).multinomial(self.case.rotary_dim // 2, [1.0 / rows] * rows)
            given = [mrrope.AxisTables.of_sections(table, sections.tolist()) for table in tables]
            self.row_of_pair = torch.tensor([given[0].axis_of_pair], device=self.case.device)
        return given[0] if self.case.tables == "one" else given

    def written(self, arguments: Arguments) -> list[Tensor]:
        return arguments["keys"]

    def run(self, arguments: Arguments) -> list[Tensor]:
        mrrope.rescale_cache_(**arguments)
        return arguments["keys"]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        steps = PhaseSteps.of(self.news, case.device).relative_to(PhaseSteps.of(self.olds, case.device))
        by = float64_reference.rotations(before["positions"], steps, case.layout, self.row_of_pair)
        stays = torch.tensor([old == new for old, new in zip(self.olds, self.news, strict=True)], device=case.device)
        found = []
        for i, keys in enumerate(before["keys"]):
            taken = keys if before["blocks"] is None else keys[before["blocks"]]
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
