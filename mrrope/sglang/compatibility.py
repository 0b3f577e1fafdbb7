"""Refuse, when a model is configured, what cannot be right together with mrrope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrrope.serving.rope_settings import served_rope
from mrrope.tables.frequency_table import FrequencyTable

OTHER_KERNELS = ("enable_nvidia_megakernel", "enable_amd_monokernel")
"""Options whose kernels rotate by themselves."""
OTHER_FRONT_ENDS = ("grpc_mode", "smg_grpc_mode")
"""Options that start a front end without the hooks of requests."""
PARTS_OF_A_STEP = {
    "enable_two_batch_overlap": "each half holds a part of the step's tokens",
    "enable_pdmux": "two steps run at the same time",
    "enable_prefill_cp": "each rank runs on a part of the step's tokens",
    "enable_encoder_swa_bounded_replay": "tokens are added to a step",
    "enable_decoder_swa_bounded_replay": "tokens are added to a step",
}
"""Options under which the model sees other tokens than those of the step."""
SHARED_CACHES = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
"""Options of caches outside SGLang. FlexKV finds keys by tokens alone; the others were not run. HiCache's storage is
served: it hashes the ``extra_key`` of a scale into its keys."""
WITHOUT_DRAFT_MODEL = (None, "NGRAM")
"""Values of ``speculative_algorithm`` under which one model runs."""


def conflicts(server_args: Any, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each option that mrrope, as configured, cannot serve.

    Args:
        server_args: The ``ServerArgs``, looked at again by every process: SGLang resolves some values later.
        model_config: The ``ModelConfig``.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import AttentionArch

    served = served_rope(model_config.hf_text_config)
    if served is None:
        return
    options = resolving_view(server_args)
    if str(options.model_impl) == "transformers":
        yield "model_impl must not be 'transformers': that backend rotates by the model's own code in transformers"
    # DeepSeek-V4 counts as MHA there, and rotates a part of each head by its own kernels likewise.
    text = model_config.hf_text_config
    if model_config.attention_arch == AttentionArch.MLA or getattr(text, "qk_rope_head_dim", None):
        yield (
            f"the model must rotate by its rope_parameters, got {text.model_type} with "
            "multi-head latent attention: its implementation in SGLang has kernels of its own"
        )
    for option in OTHER_KERNELS:
        if getattr(options, option):
            yield f"{option} must be off: its kernels rotate by themselves"
    if options.weight_cache_mode != "off":
        yield (
            f"weight_cache_mode must be 'off', got {options.weight_cache_mode!r}: SGLang loads no plugin in the "
            "daemon that holds the weights"
        )
    if options.load_format == "layered":
        yield "load_format must not be 'layered': it empties all buffers of a model, which hold its tables"
    if options.tokenizer_worker_num > 1:
        yield (
            f"tokenizer_worker_num must be 1, got {options.tokenizer_worker_num}: SGLang loads no plugin in the "
            "workers of its HTTP server"
        )
    if options.use_ray:
        yield "use_ray must be off: SGLang loads no plugin in the actors that run its schedulers"
    # Draft models number their layers from 0, so they would rotate by the tables of the first layers.
    algorithm = options.speculative_algorithm
    if algorithm not in WITHOUT_DRAFT_MODEL and any(not isinstance(t, FrequencyTable) for t in served.ready_tables):
        yield (
            f"speculative_algorithm must be None or 'NGRAM' with tables per layer or head, got {algorithm!r}: they "
            "are none of a draft model's layers"
        )
    if served.is_auto:
        yield from _conflicts_of_auto(options, model_config)


def _conflicts_of_auto(options: Any, model_config: Any) -> Iterator[str]:
    """Yield the conflicts of a table per request: the table of a token is known by its place in the whole batch."""
    from sglang.srt.environ import envs

    if options.speculative_algorithm is not None:
        yield (
            f"speculative_algorithm must be None, got {options.speculative_algorithm!r}: drafted tokens are tokens "
            "of a step, and a draft model runs on others"
        )
    if options.dllm_algorithm is not None:
        yield f"dllm_algorithm must be None, got {options.dllm_algorithm!r}: a step holds blocks of tokens"
    if options.disaggregation_mode != "null":
        yield (
            f"disaggregation_mode must be 'null', got {options.disaggregation_mode!r}: another engine may have "
            "chosen another table for the same text"
        )
    # Before SGLang resolves 'auto' it may still become that of the scheduler.
    if options.language_only and options.encoder_transfer_backend != "zmq_to_tokenizer":
        yield (
            "encoder_transfer_backend must be 'zmq_to_tokenizer' with language_only, got "
            f"{options.encoder_transfer_backend!r}: a prompt gets its image tokens after its table is chosen"
        )
    for option in SHARED_CACHES:
        if value := getattr(options, option):
            yield f"{option} must be off, got {value!r}: it may return keys of another table for the same text"
    for option, reason in PARTS_OF_A_STEP.items():
        if getattr(options, option):
            yield f"{option} must be off: {reason}"
    for option in OTHER_FRONT_ENDS:
        if getattr(options, option):
            yield f"{option} must be off: its front end runs no hook that chooses a table"
    if envs.SGLANG_RUST_SERVER.get():
        yield "SGLANG_RUST_SERVER must be off: its front end runs no hook that chooses a table"
    if model_config.is_encoder_decoder:
        yield "the model must not be an encoder-decoder: its table is chosen by the length of one text"
    if not model_config.is_generation:
        yield "is_embedding must be off: a table is chosen for prompt and new tokens"


def require_compatible(server_args: Any, model_config: Any) -> None:
    """Raise ValueError where an option conflicts with mrrope."""
    if found := list(conflicts(server_args, model_config)):
        options = "; ".join(found)
        raise ValueError(f"rope_parameters of mrrope with the following cannot be served: {options}")
