"""Refuse, when the engine is configured, what cannot be right together with mrrope."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mrrope.serving.rope_settings import served_rope
from mrrope.tables.table_set import TableSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTERS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that run no model but the target, which sees the drafted tokens as tokens of the step."""
CONNECTORS_OF_ONE_ENGINE = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""KV connectors that keep blocks in this engine's host memory, under their salted hashes."""
CONNECTORS_WITH_SALT = ("LMCacheMPConnector",)
"""KV connectors of a cache that engines share, which look up, store and load blocks under the salt of a request."""

OWN_ROPE_TYPES = ("gpt_oss",)
"""Model types whose implementation in vLLM reads ``rope_parameters`` as those of YaRN, whatever their type."""
OWN_ROPE_KERNELS = ("qwen4_exp", "qwen4_exp_text")
"""Model types whose implementation in vLLM rotates by kernels that read the internals of vLLM's rope layers."""


def conflicts(vllm_config: VllmConfig, needed_length: int | None = None) -> Iterator[str]:
    """Yield a sentence for each option that mrrope, as configured, cannot serve.

    Args:
        vllm_config: The configuration of the engine.
        needed_length: What a drafter must read; ``max_model_len`` by default.
    """
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
    if model.hf_text_config.model_type in OWN_ROPE_KERNELS:
        yield (
            f"the model must rotate by its rope layers, got {model.hf_text_config.model_type}: kernels of its "
            "implementation in vLLM read vLLM's cos/sin cache"
        )
    if served.is_auto:
        yield from _conflicts_of_auto(vllm_config)
    else:
        yield from _conflicts_of_drafter(vllm_config, needed_length or model.max_model_len)
        if any(isinstance(table, TableSet) for table in served.ready_tables) and shares_checkpoint(vllm_config):
            yield (
                "speculative_config's method must not be 'mtp' with a table set: the set has no tables for the layers "
                "of the drafter"
            )


def _conflicts_of_drafter(vllm_config: VllmConfig, needed: int) -> Iterator[str]:
    """Yield what a draft model that reads less than its target makes wrong.

    Past its own length the drafter reads rows that its cos/sin cache does not have, a device assert, or drafts tokens
    of which none is accepted.
    """
    speculative = vllm_config.speculative_config
    drafter = None if speculative is None else speculative.draft_model_config
    if drafter is None or speculative.method in DRAFTERS_WITHOUT_MODEL:
        return
    read = drafter.max_model_len
    if read < needed:
        yield (
            f"speculative_config's model must read max_model_len {needed} tokens, got {drafter.model} with {read}: it "
            "has the RoPE of its own configuration. Lower max_model_len, take a drafter that reads as far, or the "
            "method ngram or suffix"
        )


def shares_checkpoint(vllm_config: VllmConfig) -> bool:
    """Whether the drafter is a part of the served model's own checkpoint (MTP), trained with its RoPE."""
    speculative = vllm_config.speculative_config
    drafter = None if speculative is None else speculative.draft_model_config
    return (
        drafter is not None
        and drafter is not vllm_config.model_config
        and speculative.method == "mtp"
        and drafter.model == vllm_config.model_config.model
    )


def share_tables(vllm_config: VllmConfig) -> None:
    """Give a drafter of the served model's checkpoint its target's tables and length.

    vLLM applies overrides in form of a dict to the target only.
    """
    if not shares_checkpoint(vllm_config):
        return
    target, speculative = vllm_config.model_config, vllm_config.speculative_config
    assert speculative is not None
    drafter = speculative.draft_model_config
    for text in {id(part): part for part in (drafter.hf_config.get_text_config(), drafter.hf_text_config)}.values():
        text.rope_parameters = copy.deepcopy(target.hf_config.get_text_config().rope_parameters)
    # A length that the user sets is a limit of the drafter's own.
    if speculative.max_model_len is None:
        drafter.max_model_len = target.max_model_len


def _conflicts_of_auto(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield the conflicts of a table per request: the table of a token is known by its place in the whole batch."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if speculative is not None and speculative.method not in DRAFTERS_WITHOUT_MODEL:
        yield (
            f"speculative_config's method must be one of {', '.join(DRAFTERS_WITHOUT_MODEL)}, got "
            f"{speculative.method!r}: a draft model runs on other tokens than those of the step"
        )
    # Since 0.28.
    if getattr(speculative, "enable_adaptive_verification", False):
        yield (
            "speculative_config's enable_adaptive_verification must be off: the GPU moves drafted tokens between "
            "requests after the step's tokens have their tables"
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
    if transfer is not None and not _separates_tables(transfer):
        known = ", ".join((*CONNECTORS_OF_ONE_ENGINE, *CONNECTORS_WITH_SALT))
        yield (
            f"kv_transfer_config must have a kv_connector of {known} without spec_name, got {transfer.kv_connector!r} "
            f"with {transfer.kv_connector_extra_config}: another engine may have chosen another table for the same text"
        )
    if model.is_encoder_decoder:
        yield "the model must not be an encoder-decoder: its table is chosen by the length of one text"
    if model.runner_type != "generate":
        yield f"runner must be 'generate', got {model.runner_type!r}: a table is chosen for prompt and new tokens"


def _separates_tables(transfer: Any) -> bool:
    is_known = transfer.kv_connector in (None, *CONNECTORS_OF_ONE_ENGINE, *CONNECTORS_WITH_SALT)
    # Other specs of the OffloadingConnector have tiers that engines share.
    spec = transfer.kv_connector_extra_config.get("spec_name", "CPUOffloadingSpec")
    return is_known and spec == "CPUOffloadingSpec"


def can_grow(vllm_config: VllmConfig) -> bool:
    """Whether requests that outgrow their table can be computed again at the next.

    Otherwise tokens may be drafted past the old table, or blocks kept under its hashes.
    """
    return (
        vllm_config.scheduler_config.scheduler_cls is None
        and vllm_config.speculative_config is None
        and vllm_config.kv_transfer_config is None
        and not vllm_config.model_config.is_diffusion
    )


def require_compatible(vllm_config: VllmConfig, needed_length: int) -> None:
    """Raise ValueError where an option conflicts with mrrope."""
    found = list(conflicts(vllm_config, needed_length))
    if found:
        options = "; ".join(found)
        raise ValueError(f"rope_parameters of mrrope with the following cannot be served: {options}")


def check_config(original: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    """Check an engine's configuration when it is created. Workers unpickle theirs, which runs no check again."""
    share_tables(vllm_config)
    # vLLM 0.33 lowers it to what a drafter reads, with a warning, and the extension is lost.
    needed_length = vllm_config.model_config.max_model_len
    original(vllm_config, *args, **kwargs)
    require_compatible(vllm_config, needed_length)
