"""The table of every token of a step, in a buffer that all rope layers of a model read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mrrope.serving.rope_layer import served_layers


class TokenTables:
    """Table index per token slot. CUDA graphs read the buffer in place, so it is filled before each forward."""

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self.index = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._held = np.zeros(max_num_tokens, dtype=np.int32)  # host copy of self.index

    def fill(self, tables_of_requests: npt.ArrayLike, num_scheduled_tokens: npt.NDArray[np.int32]) -> None:
        """Write the tables of a step. Slots past the step keep valid indices; a padded token may read any of them.

        Args:
            tables_of_requests: Table of each request, in batch order.
            num_scheduled_tokens: Number of tokens of each request in this step.
        """
        tables = np.repeat(np.asarray(tables_of_requests, dtype=np.int32), num_scheduled_tokens)
        held = self._held[: len(tables)]
        # Steps of decoding repeat the last one, and so do all steps while only one table is in use.
        if np.array_equal(tables, held):
            return
        held[:] = tables
        source = torch.from_numpy(tables)
        if self.index.is_cuda:
            # Fresh pinned memory: PyTorch's host allocator reuses it only after the copy, whatever step that is in.
            source = source.pin_memory()
        self.index[: len(tables)].copy_(source, non_blocking=True)


def attach(model: torch.nn.Module, max_num_tokens: int, device: torch.device) -> TokenTables | None:
    """Give all rope layers with several tables one index buffer. Return None where there is no such layer."""
    layers = [layer for layer in served_layers(model) if not layer.ladder.is_fixed]
    if not layers:
        return None
    if len({layer.ladder.reaches for layer in layers}) > 1:
        raise ValueError(
            "rope_parameters must give all layers tables of the same lengths, got "
            f"{sorted({layer.ladder.reaches for layer in layers})}"
        )
    token_tables = TokenTables(max_num_tokens, device)
    for layer in layers:
        layer.table_index = token_tables.index
    return token_tables
