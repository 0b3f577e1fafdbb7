"""Which CUDA kernels the ops launch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_open = threading.Lock()


@contextlib.contextmanager
def launch_log() -> Iterator[list[str]]:
    """Collect a line for every kernel of mrrope that ops launch in a ``with`` block, on any thread.

    A line has the op, the shape of its call, the kernel with its template arguments, which are the launch plan, and the
    grid. The list is filled when the block ends. Not in it: ``qkv_rotary``'s fused kernel and cuBLAS, replays of CUDA
    graphs, and what ``torch.compile`` generates. ``MRROPE_PRINT_PLANS=1`` in the environment prints each line once to
    standard error instead.

    Raises:
        RuntimeError: another block is open in this process.
    """
    if not _open.acquire(blocking=False):
        raise RuntimeError("launch_log must not be open already: its lines would be lost")
    lines: list[str] = []
    torch.ops.mrrope.collect_launches(True)
    try:
        yield lines
    finally:
        lines.extend(torch.ops.mrrope.collect_launches(False))
        _open.release()
