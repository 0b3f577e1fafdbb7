"""The shapes of the models that whole-model benchmarks build, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True)
class Shape:
    """The shape of a published model, and the steps that are measured with it."""

    model_class: Any
    config_class: Any
    config: dict[str, Any]
    layers: int
    output: str
    compiled_layers: int = 4
    prefill_tokens: tuple[int, ...] = (8192, 32768)
    decode_batches: tuple[int, ...] = (1, 16, 64)
    context: int = 1024
    """Tokens in the cache when decoding starts."""
    tiny: dict[str, Any] = field(default_factory=dict)
    """Settings of a model of the same kind that a CPU runs at once."""

    def model(self, layers: int, device: str = "cuda") -> Any:
        """Return a model of this shape with random weights."""
        config = self.config_class(**self.config, num_hidden_layers=layers)
        with torch.device(device):
            return self.model_class._from_config(config, dtype=torch.bfloat16).eval()

    def shortened(self) -> Shape:
        """Return the shape with fewer layers, which are all alike, and fewer steps."""
        return replace(
            self, layers=min(8, self.layers), compiled_layers=2, prefill_tokens=(8192,), decode_batches=(1, 16)
        )

    def shrunk(self) -> Shape:
        """Return a tiny shape of the same kind, to run the benchmark itself on any machine."""
        return replace(
            self,
            config=self.config | TINY | self.tiny,
            layers=2,
            compiled_layers=2,
            prefill_tokens=(8,),
            decode_batches=(1,),
            context=4,
        )


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

SHAPES = {
    "llama3-8b": Shape(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
        layers=32,
        output="model_cuda",
    ),
    "qwen3-8b": Shape(
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        layers=36,
        output="model_qwen3_cuda",
    ),
    # The attention of DeepSeek-V3 at full size. 8 layers, one of them dense, and 8 experts instead of 256 are 21 GB of
    # weights; transformers caches the keys and values of all 128 heads, 82 KB per token and layer.
    "deepseek-v3": Shape(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        layers=8,
        output="model_deepseek_cuda",
        compiled_layers=2,
        prefill_tokens=(2048, 8192),
        decode_batches=(1, 16),
        tiny={
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma3-4b": Shape(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
        },
        layers=34,
        output="model_gemma3_cuda",
        compiled_layers=6,
        tiny={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
