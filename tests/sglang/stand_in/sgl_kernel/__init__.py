"""Stands in for SGLang's kernels, which a server on a CPU imports and, with torch's backends, never runs."""

from typing import NoReturn

import torch

__version__ = "0.4.10"  # SGLang compares it with the one that it needs
__path__: list[str] = []

_ops = torch.library.Library("sgl_kernel", "DEF")
_ops.define("init_cpu_threads_env(str cpu_ids) -> str")
_ops.impl("init_cpu_threads_env", lambda cpu_ids: cpu_ids, "CompositeExplicitAutograd")
_ops.define("initialize(int size, int rank) -> ()")
_ops.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} must not be called by a server on a CPU")

    return kernel
