"""Calibrate a table for a model, save it, and patch the model with it.

    python examples/calibrate_table.py

runs `mrrope calibrate` on a tiny random Llama with a byte tokenizer, for a few seconds. For a real model:

    mrrope calibrate MODEL --text FILE --scale 16 --budget 5 --output found
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers

import mrrope
from mrrope.cli import main as mrrope_command

NATIVE, SCALE = 128, 2


def save_tiny_model(folder: Path) -> None:
    """Write a random byte-level Llama and its tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=NATIVE,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_documents(folder: Path) -> None:
    """Write six documents of random words."""
    for number in range(6):
        chance = random.Random(number)
        words = ("".join(chance.choices("abcdefgh", k=4)) for _ in range(500))
        (folder / f"{number}.txt").write_text(" ".join(words))


def main() -> None:
    """Calibrate, load the table, patch."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, write in (("model", save_tiny_model), ("text", write_documents)):
            (folder / name).mkdir()
            write(folder / name)
        arguments = ["--text", folder / "text", "--scale", SCALE, "--budget", 0.05, "--retrieval", 0]
        arguments += ["--device", "cpu", "--output", folder / "found"]
        status = mrrope_command(["calibrate", str(folder / "model"), *map(str, arguments)])
        assert status == 0, f"mrrope calibrate failed with status {status}"

        table = mrrope.FrequencyTable.load(folder / "found.table.json")
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
        mrrope.patch(model, table)
        logits = model(torch.arange(SCALE * NATIVE)[None] % 256).logits
        print(f"{table!r}: {logits.shape[1]} tokens read")


if __name__ == "__main__":
    main()
