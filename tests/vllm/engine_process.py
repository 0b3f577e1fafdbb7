"""vLLM engines in processes of their own, serving SmolLM2 in bfloat16."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smollm2
import torch


def save_smollm2(folder: Path) -> Path:
    """Write SmolLM2 in bfloat16, and its tokenizer, as a folder that vLLM loads."""
    from transformers import LlamaForCausalLM

    model, tokenizer = smollm2.model_and_tokenizer()
    config = model.config
    del config.quantization_config  # transformers refuses to save a model that it read from GGUF
    saved = LlamaForCausalLM(config).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())
    saved.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Answer:
    """What came back of one request."""

    nll: tuple[float, ...]
    """Negative log-likelihood of every prompt token but the first, where asked for."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish_reason: str | None


class Engine:
    """An engine in another process, which starts at once and is waited for by its first call; ends with the context."""

    def __init__(self, model: Path, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "mrrope", **(environment or {})}
        self._started = self._pool.submit(_start, str(model), environment, options)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def ask(
        self, prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]] | None = None, **params: Any
    ) -> list[Answer]:
        """Send prompts at once; ``each`` holds sampling parameters per request besides those of all."""
        self._started.result()
        return self._pool.submit(_ask, prompts, each, params).result()

    def state(self) -> dict[str, Any]:
        """Return counters of the engine: preemptions, cached prompt tokens, requests and blocks in use."""
        return self._pool.submit(_state).result()


def _start(model: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    os.environ |= environment
    global llm
    from vllm import LLM

    # A given size of the cache lets several engines start at once: none measures the free memory.
    defaults = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30, "disable_log_stats": False}
    llm = LLM(model, **(defaults | options))


def _ask(
    prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]] | None, params: dict[str, Any]
) -> list[Answer]:
    from vllm import SamplingParams

    common = {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
    settings = [SamplingParams(**(common | params | extra)) for extra in each or [{}] * len(prompts)]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], settings, use_tqdm=False)
    return [_answer(output) for output in outputs]


def _answer(output: Any) -> Answer:
    known = output.prompt_logprobs or []
    nll = tuple(-entry[token].logprob for token, entry in zip(output.prompt_token_ids, known, strict=False) if entry)
    completion = output.outputs[0]
    logprobs = tuple(
        entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=False)
    )
    return Answer(nll, tuple(completion.token_ids), logprobs, output.num_cached_tokens or 0, completion.finish_reason)


def _state() -> dict[str, Any]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "preemptions": counters["vllm:num_preemptions"],
        "cached": counters["vllm:prompt_tokens_cached"],
        "requests": len(scheduler.requests),
        "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
