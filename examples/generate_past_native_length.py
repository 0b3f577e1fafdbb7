"""Generate past a model's native length, with a fixed scale and with scale="auto".

    python examples/generate_past_native_length.py [MODEL]

Without MODEL, a folder or a name on the hub, a tiny random Llama with 128 native tokens runs on the CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

import mrrope

NEW_TOKENS = 16


def load_model(name: str | None) -> Any:
    """Load a model, or make a tiny random one."""
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Return the greedy continuation of a prompt."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    output: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return output[0, prompt.shape[1] :]


def main() -> None:
    """Read a prompt of twice the native length."""
    model = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
    native = model.config.max_position_embeddings
    long_prompt = torch.randint(3, model.config.vocab_size, (1, 2 * native))
    short_prompt = long_prompt[:, : native // 2]
    unpatched = generate(model, short_prompt)

    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        continuation = generate(model, long_prompt)
    print(f"scale=4: {long_prompt.shape[1]} tokens read, {len(continuation)} generated")

    # Short prompts are read by the model's own table, long ones by the smallest scale that covers them.
    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=4.0)
    continuation = generate(model, long_prompt)
    print(f"scale=auto: {long_prompt.shape[1]} tokens read, {len(continuation)} generated")
    print(f"scale=auto, short prompt as unpatched: {torch.equal(generate(model, short_prompt), unpatched)}")
    mrrope.unpatch(model)


if __name__ == "__main__":
    main()
