"""Serve short and long prompts with vLLM, each at the smallest scale that covers it.

    python examples/serve_with_vllm.py [MODEL]

Without MODEL, a folder or a name on the hub, it is a tiny Llama with random weights and 128 native tokens. Needs a GPU.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

NEW_TOKENS = 16
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
}


def requests_by_scale() -> dict[str, int]:
    """Return how many requests each scale has served, from the plugin's Prometheus counter."""
    counters = [metric for metric in REGISTRY.collect() if metric.name == "mrrope:requests"]
    samples = [sample for metric in counters for sample in metric.samples if sample.name.endswith("_total")]
    return {sample.labels["scale"]: int(sample.value) for sample in samples}


def main() -> None:
    """Send prompts of an eighth of the native length up to three native lengths in one batch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
        is_tiny = len(sys.argv) == 1
        llm = LLM(
            folder if is_tiny else sys.argv[1],
            load_format="dummy" if is_tiny else "auto",
            skip_tokenizer_init=True,  # prompts are token ids
            enforce_eager=True,  # starts in seconds; leave it out to serve
            gpu_memory_utilization=0.1 if is_tiny else 0.9,
            hf_overrides={"rope_parameters": {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": 4}},
        )
        config = llm.llm_engine.vllm_config.model_config
        native, vocabulary = config.max_model_len // 4, config.get_vocab_size()
        lengths = [native // 8, native // 2, native, 3 * native]
        prompts = [{"prompt_token_ids": random.choices(range(3, vocabulary), k=length)} for length in lengths]
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for length, output in zip(lengths, llm.generate(prompts, sampling), strict=True):
            print(f"{length} tokens read, {len(output.outputs[0].token_ids)} generated")

        # A request may name its scale; vllm_xargs does it through the OpenAI API.
        sampling.extra_args = {"mrrope_scale": 4}
        llm.generate(prompts[:1], sampling)
        print(f"requests by scale: {requests_by_scale()}")


if __name__ == "__main__":
    main()
