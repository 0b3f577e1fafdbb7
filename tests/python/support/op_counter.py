"""Counts the calls of an op."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OpCounter(TorchDispatchMode):
    """While entered, counts the calls of ``torch.ops.mrrope.<name>`` in ``count``, backward passes included."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op = getattr(torch.ops.mrrope, name).default
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.op
        return func(*args, **(kwargs or {}))
