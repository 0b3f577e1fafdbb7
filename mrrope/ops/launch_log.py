"""Which CUDA kernels the ops launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def launch_log() -> Iterator[list[str]]:
    """Collect a line for every CUDA kernel that ops launch in a ``with`` block, on any thread.

    A line has the op, the shape of its call, the kernel with its template arguments, which are the launch plan, and the
    grid. The list is filled when the block ends. Blocks do not nest. ``MRROPE_PRINT_PLANS=1`` in the environment prints
    each line once to standard error instead.
    """
    lines: list[str] = []
    torch.ops.mrrope.collect_launches(True)
    try:
        yield lines
    finally:
        lines.extend(torch.ops.mrrope.collect_launches(False))
