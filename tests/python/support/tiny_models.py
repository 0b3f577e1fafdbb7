"""Tiny random models of all causal-LM architectures of the installed transformers, and which of them use RoPE."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HEADS = 4
VOCABULARY = 128
ORDINARY_TOKENS = range(3, 96)  # below: pad, bos, eos; above: placeholders for images and audio
LENGTH = 64

# Config sizes for a tiny Llama; many other families take the same names.
TINY_SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

# Upper bounds of integer settings: the first pattern that matches the name decides. Bounds that depend on the head
# dimension are in `tiny_config`.
LARGEST: list[tuple[str, int]] = [
    (r"vocab", VOCABULARY),
    (r"hidden_size_per_layer_input", 16),
    (r"moe_intermediate|expert_ffn", 32),
    (r"intermediate_size|ffn_dim|ffn_hidden_size|d_inner|d_ff$|dff|mamba_d_ssm", 64),
    (r"index_topk|topk_blocks", 4),
    (r"shared_experts", 1),
    (r"experts_per_tok|topk_group|moe_k$|top_?k$|top_k_experts", 2),
    (r"experts$|expert_num$", 4),
    (r"^n_group$|expert_group$", 2),
    (r"index_n_heads", 16),  # with fewer heads many scores are exactly zero, and top-k is a tie
    (r"key_value_heads|kv_n_heads|kv_heads|num_key_heads", 2),
    (r"mamba_(n_|num_)?heads", 2 * HEADS),
    (r"heads?$|heads_per_layer$", HEADS),
    (r"d_state|state_size", 16),
    (r"rank$", 16),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length", LENGTH),
    (r"sliding_window$|window_size|local_attention$|attention_chunk_size|chunk_size$|block_size$", 8),
    (r"first_k_dense|num_dense_layers", 1),
]

# Settings by model type where the rules above give a broken or trivial model; nested for a config inside the config.
# Layers listed here are all kept.
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
}
GEMMA4_DRAFTER = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "global_head_dim": 32,
}
GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
QWEN4 = {
    "head_dim": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 8},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    # With SDPA its attention is not causal; with a smaller window its top-k has ties.
    "doge": {"attn_implementation": "eager", "keep_window_size": LENGTH},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_assistant": {"backbone_hidden_size": 64, "text_config": {"model_type": "gemma4_text", **GEMMA4_DRAFTER}},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": {"global_head_dim": 32}},
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 64,
        "text_config": {"model_type": "gemma4_unified_text", "global_head_dim": 32},
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite_swa": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "layer_rope_theta": [1e4, 1e5, 0.0],
    },
    "granitemoe_swa": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "layer_rope_theta": [1e4, 1e5, 0.0],
    },
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "moshi": {"sliding_window": LENGTH},  # its cache slides, its mask does not
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "roformer": {"is_decoder": True},
    "zaya": {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]},
    "zamba2": {"use_mem_rope": True, "time_step_min": 1e-6},  # a larger one clamps the prefill but not the decode
}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return random tokens without special ones, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(ORDINARY_TOKENS.start, ORDINARY_TOKENS.stop, shape, generator=generator)


def inputs(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    """Return the forward arguments for these tokens; a drafter gets random states of its target model."""
    if "shared_kv_states" not in inspect.signature(model.forward).parameters:
        return {"input_ids": input_ids}
    text = model.config.get_text_config()
    batch, length = input_ids.shape
    generator = torch.Generator().manual_seed(int(input_ids.sum()))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(model.dtype)

    layers = dict(zip(text.layer_types, text.per_layer_config, strict=True))
    shapes = {name: (batch, layer.num_key_value_heads, length, layer.head_dim) for name, layer in layers.items()}
    return {
        "inputs_embeds": random(batch, length, 2 * model.config.backbone_hidden_size),
        "position_ids": torch.arange(length).expand(batch, -1),
        "shared_kv_states": {name: (random(*shape), random(*shape)) for name, shape in shapes.items()},
    }


def smallest_rotary_share(rope_parameters: dict[str, Any]) -> float:
    """Return the smallest partial_rotary_factor in RoPE parameters, which may be nested by layer type."""
    nested = [smallest_rotary_share(value) for value in rope_parameters.values() if isinstance(value, dict)]
    return min([rope_parameters.get("partial_rotary_factor", 1.0), *nested])


def tiny_rope(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters whose original length fits the tiny model."""
    rope = copy.deepcopy(rope_parameters)
    for name, value in rope.items():
        if isinstance(value, dict):
            rope[name] = tiny_rope(value)
        elif name == "original_max_position_embeddings":
            rope[name] = LENGTH // 4
    return rope


def is_per_layer(value: Any, layers: int) -> bool:
    """Return whether a setting has one value per layer; a list of all layer indices does not count."""
    return isinstance(value, list | tuple) and layers > 0 and len(value) == layers and list(value) != [*range(layers)]


def layers_to_keep(settings: dict[str, Any], layers: int) -> list[int]:
    """Return indices of at least two layers that cover every kind of layer in the per-layer settings."""
    per_layer = [value for value in settings.values() if is_per_layer(value, layers)]
    seen: set[tuple[int, Any]] = set()
    keep = []
    for layer in range(layers):
        kinds = {(i, str(values[layer])) for i, values in enumerate(per_layer)}
        if kinds - seen:
            keep.append(layer)
            seen |= kinds
    rest = [layer for layer in range(layers) if layer not in keep]
    return sorted(keep + rest[: max(0, 2 - len(keep))])


def tiny_config(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return a config of the same class with all sizes shrunk and the overrides applied."""
    names = [field.name for field in dataclasses.fields(config)]
    settings = {name: vars(config).get(config.attribute_map.get(name, name)) for name in names}
    share = smallest_rotary_share(settings.get("rope_parameters") or {})
    head_dim = max(16, round(8 / min(share, settings.get("partial_rotary_factor") or 1.0)))
    sizes = [
        (r"^(hidden_size|d_model|n_embd|emb(ed)?_dim|embedding_size|lru_width|hidden_size_global)$", HEADS * head_dim),
        (r"^(qk|index)_head_dim$", 2 * head_dim),
        (r"(head_dim|d_head|kv_channels|rotary_dim)$", head_dim),
        *([(r"key_value_heads$", HEADS)] if "kv_lora_rank" in settings else []),
        *LARGEST,
    ]
    layer_names = [name for name in names if re.fullmatch(r"n(um)?_(hidden_|decoder_)?layers?|depth", name)]
    layers = settings[layer_names[0]] if layer_names else 0
    keep = [*range(layers)] if overrides.keys() & {*layer_names} else layers_to_keep(settings, layers)

    def shrunk(name: str, value: Any) -> Any:
        if isinstance(value, PreTrainedConfig):
            return tiny_config(value, overrides.get(name, {}))
        if is_per_layer(value, layers):
            return type(value)(shrunk(name, value[layer]) for layer in keep)
        if name == "rope_parameters" and value:
            return tiny_rope(value)
        if name in layer_names:
            return len(keep)
        if re.search(r"_token_(id|index)$", name) and value is not None:
            special = {"pad": 0, "bos": 1, "eos": 2}.get(name.split("_")[0], VOCABULARY - 1 - names.index(name) % 16)
            return [special] if isinstance(value, list) else special
        if isinstance(value, float) and re.search(r"drop", name):
            return 0.0
        if name == "initializer_range":
            return 0.2
        if name in ("head_dim", "num_key_value_heads") and value is None:
            return shrunk(name, LENGTH)
        if isinstance(value, int) and not isinstance(value, bool):
            return next((min(value, size) for pattern, size in sizes if re.search(pattern, name)), value)
        return value

    small = {name: shrunk(name, value) for name, value in settings.items()}
    changed = {name: value for name, value in small.items() if value is not settings[name]}
    given = {name: value for name, value in overrides.items() if not isinstance(small.get(name), PreTrainedConfig)}
    return type(config)(**changed | copy.deepcopy(given))


def tiny_model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny random AutoModelForCausalLM of this model type, on the CPU, in eval mode."""
    return random_model(tiny_config_of(model_type), seed=seed, dtype=dtype)


def tiny_config_of(model_type: str) -> PreTrainedConfig:
    """Return a config of this model type for a tiny model."""
    overrides = OVERRIDES.get(model_type, {})
    return tiny_config(CONFIG_MAPPING[model_type](**copy.deepcopy(overrides)), overrides)


def random_model(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random model of this config, on the CPU, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all():
                # A gate or scale that is initialized to zero would hide the effect of RoPE.
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def rotary_signs(model: nn.Module) -> list[str]:
    """Return the buffers, modules and calls that show that a model uses RoPE; empty without RoPE."""
    signs = {f"buffer {name}" for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    for kind in {type(module) for module in model.modules()}:
        if re.search(r"Rotary|RoPE", kind.__name__):
            signs.add(f"module {kind.__name__}")
        for function in filter(inspect.isfunction, vars(kind).values()):
            signs |= {f"{name} in {kind.__name__}" for name in called(function) if name.startswith("apply_rotary")}
    return sorted(signs)


def called(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of functions and attributes that a function's code uses, with decorators unwrapped."""
    return inspect.unwrap(function).__code__.co_names


def position_modules(model: nn.Module) -> list[str]:
    """Return the last name components of modules and parameters that look like position embeddings."""
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    return sorted({last for name in names if re.search(r"pos(?!t)|wpe|alibi|relative", last := name.split(".")[-1])})


@cache
def survey() -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the model types with RoPE, those without, and those that fail to build; the last two with reasons."""
    with_rope, without_rope, unbuilt = [], {}, {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = tiny_model(model_type)
        except Exception as error:
            unbuilt[model_type] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if rotary_signs(model):
            with_rope.append(model_type)
        else:
            without_rope[model_type] = ", ".join(position_modules(model)) or "no position embedding"
    return with_rope, without_rope, unbuilt


def causal_lm_families() -> list[str]:
    """Return the causal-LM model types that use RoPE."""
    return survey()[0]


def families_without_rope() -> dict[str, str]:
    """Return the causal-LM model types without RoPE and their position embeddings."""
    return survey()[1]


def unbuildable() -> dict[str, str]:
    """Return the causal-LM model types of which no tiny model can be built here, with the error."""
    return survey()[2]


def rotary_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that define the text model's rotation: frequencies, or a table of cos and sin."""
    named = [*model.named_buffers(), *model.named_parameters()]
    found = {name: tensor for name, tensor in named if re.search(r"inv_freq$|embed_positions(\.weight)?$", name)}
    return {name: tensor for name, tensor in found.items() if not re.search(r"original_|vision|audio|depth_d", name)}


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Return whether forward takes position_ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


@torch.no_grad()
def rope_effects(model: PreTrainedModel) -> dict[str, float]:
    """Return the relative change of the logits when a rotary tensor is slowed, or positions are spread, by two."""
    # Without a mask, transformers takes gaps in the positions for the starts of packed sequences.
    call = inputs(model, tokens(2, 24)) | {"attention_mask": torch.ones(2, 24, dtype=torch.long)}
    logits = model(**call).logits

    def change(**other: Tensor) -> float:
        return float((model(**call | other).logits - logits).norm() / logits.norm())

    effects = {}
    if takes_position_ids(model):
        effects["position_ids"] = change(position_ids=2 * torch.arange(24).expand(2, -1))
    for name, tensor in rotary_tensors(model).items():
        kept = tensor.clone()
        tensor.copy_(kept / 2 if name.endswith("inv_freq") else kept[torch.arange(len(kept)) // 2])
        effects[name] = change()
        tensor.copy_(kept)
    return effects
