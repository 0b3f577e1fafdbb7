"""The processes of a search under ``torchrun``: gradients are averaged, the first process decides and writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=2)
"""For the other processes to wait while the first compares the fixed methods of a large model."""


@dataclass(frozen=True)
class Processes:
    """This process among those of one search; by default it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over the processes."""
        if self.size > 1:
            distributed.all_reduce(tensor)
            tensor = tensor / self.size
        return tensor

    def agreed(self, value: Value) -> Value:
        """The first process's value."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box)
        return box[0]


ALONE = Processes()


@contextlib.contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """The processes that ``torchrun`` started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def local_device(device: str | None) -> str | None:
    """The device of this process: each of several processes on a machine takes its own GPU."""
    local = os.environ.get("LOCAL_RANK")
    takes_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    if local is None or not takes_gpu:
        return device
    torch.cuda.set_device(int(local))
    return f"cuda:{local}"
