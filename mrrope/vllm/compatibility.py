"""Refuse, when the engine is configured, what cannot be right together with mrrope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mrrope.vllm.hooks import wrap
from mrrope.vllm.rope_settings import served_rope

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTERS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that run no model but the target, which sees the drafted tokens as tokens of the step."""
CONNECTORS_OF_ONE_ENGINE = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""KV connectors that keep blocks in this engine's host memory, under their salted hashes."""

OWN_ROPE_TYPES = ("gpt_oss",)
"""Model types whose implementation in vLLM reads ``rope_parameters`` as those of YaRN, whatever their type."""


def conflicts(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield a sentence for each option that mrrope, as configured, cannot serve."""
    model = vllm_config.model_config
    served = None if model is None else served_rope(model.hf_config)
    if served is None:
        return
    if model.using_transformers_backend():
        yield "model_impl must not be 'transformers': that backend rotates by the model's own code in transformers"
    if model.is_deepseek_mla or model.hf_text_config.model_type in OWN_ROPE_TYPES:
        yield (
            f"the model must rotate by its rope_parameters, got {model.hf_text_config.model_type}: its implementation "
            "in vLLM replaces their rope_type"
        )
    if served.is_auto:
        yield from _conflicts_of_auto(vllm_config)


def _conflicts_of_auto(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield the conflicts of a table per request: the table of a token is known by its place in the whole batch."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if speculative is not None and speculative.method not in DRAFTERS_WITHOUT_MODEL:
        yield (
            f"speculative_config's method must be one of {', '.join(DRAFTERS_WITHOUT_MODEL)}, got "
            f"{speculative.method!r}: a draft model runs on other tokens than those of the step"
        )
    if parallel.use_ubatching:
        yield (
            f"enable_dbo must be off and ubatch_size at most 1, got {parallel.enable_dbo} and {parallel.ubatch_size}: "
            "each microbatch holds a part of the step's tokens"
        )
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill must be off: later layers run on a part of the step's tokens"
    if parallel.prefill_context_parallel_size > 1:
        yield (
            f"prefill_context_parallel_size must be 1, got {parallel.prefill_context_parallel_size}: each rank runs on "
            "a part of the step's tokens"
        )
    if transfer is not None and not _stays_in_engine(transfer):
        yield (
            f"kv_transfer_config must have a kv_connector of {', '.join(CONNECTORS_OF_ONE_ENGINE)} without spec_name, "
            f"got {transfer.kv_connector!r} with {transfer.kv_connector_extra_config}: another engine may have chosen "
            "another table for the same text"
        )
    if model.is_encoder_decoder:
        yield "the model must not be an encoder-decoder: its table is chosen by the length of one text"
    if model.runner_type != "generate":
        yield f"runner must be 'generate', got {model.runner_type!r}: a table is chosen for prompt and new tokens"


def _stays_in_engine(transfer: Any) -> bool:
    is_local = transfer.kv_connector in (None, *CONNECTORS_OF_ONE_ENGINE)
    # Other specs of the OffloadingConnector have tiers that engines share.
    spec = transfer.kv_connector_extra_config.get("spec_name", "CPUOffloadingSpec")
    return is_local and spec == "CPUOffloadingSpec"


def require_compatible(vllm_config: VllmConfig) -> None:
    """Raise ValueError where an option conflicts with mrrope."""
    found = list(conflicts(vllm_config))
    if found:
        options = "; ".join(found)
        raise ValueError(f"rope_parameters of mrrope with the following cannot be served: {options}")


def _check_config(original: Any, vllm_config: VllmConfig) -> None:
    original(vllm_config)
    require_compatible(vllm_config)


def install() -> None:
    """Check each engine's configuration when it is created. Workers unpickle theirs, which runs no check again."""
    from vllm.config import VllmConfig

    wrap(VllmConfig, "__post_init__", _check_config)
