"""Lets vLLM's CPU backend schedule asynchronously, which its platform turns off. Python imports this when it starts."""

import contextlib
from types import ModuleType
from typing import Any

from mrrope.vllm.hooks import when_imported


class NoStream(contextlib.nullcontext[None]):
    """In place of a CUDA stream and of an event on it: a CPU has done its work when a function returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def nothing(self, *_: Any) -> None:
        """Neither record nor wait."""

    record = synchronize = wait_stream = wait_event = wait = nothing


def keep_async_scheduling(platform: ModuleType) -> None:
    """Keep what ``--async-scheduling`` sets."""
    original = platform.CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    platform.CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def replace_streams(runner: ModuleType) -> None:
    """Replace the streams that outputs are copied on."""
    cuda = runner.torch.cuda
    cuda.Stream = cuda.Event = cuda.stream = NoStream
    cuda.current_stream = NoStream


when_imported("vllm.platforms.cpu", keep_async_scheduling)
when_imported("vllm.v1.worker.cpu_model_runner", replace_streams)
