"""Engine configurations of tiny models without weights."""

import json
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

NATIVE_LENGTH = 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NATIVE_LENGTH,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
AUTO = {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": 16, "reserve": 32}
"""Lengths of the ladder: 64, 128, 256, 512, 1024."""


def engine_config(folder: Path, rope_parameters: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the VllmConfig of a tiny Llama, as ``LLM(...)`` would create it."""
    config = {**LLAMA, **options.pop("config", {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    overrides = {"rope_parameters": rope_parameters} if rope_parameters else {}
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, hf_overrides=overrides, **options)
    return arguments.create_engine_config()
