"""The hooks of a process that runs a served model: its rope layers, its graphs and its steps."""

from __future__ import annotations

from typing import Any

from mrrope.vllm import hooks


def install() -> None:
    """Install the hooks. They import vLLM's compiler and the ops, which no other process needs."""
    from mrrope.vllm import cache_fusion, layer_tables, model_runners, norm_fusion, rotary_embedding

    for concept in (rotary_embedding, layer_tables, norm_fusion, cache_fusion, model_runners):
        concept.install()


def make_worker(original: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Make a worker of a served model, with the hooks that it needs."""
    install()
    hooks.require_installed()
    original(worker, *args, **kwargs)
