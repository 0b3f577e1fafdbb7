"""A tiny random Llama over bytes, its tokenizer, and random words for it to read."""

import random
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 258  # <s>, </s> and every byte


def byte_tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def random_words(count: int, seed: int = 0) -> str:
    """Return words of five letters, six tokens each with the space between them."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(count))


def byte_llama(native_length: int, *, layers: int = 1, heads: int = 1, **settings: Any) -> LlamaForCausalLM:
    """Return a model with the same random weights at every call.

    Args:
        native_length: ``max_position_embeddings``.
        layers: Number of layers.
        heads: Number of query heads; there is one key head.
        settings: Further settings of the config.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 1}
    config = LlamaConfig(
        **sizes | settings,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=native_length,
    )
    return LlamaForCausalLM(config).eval()


def save_byte_llama(folder: Path, native_length: int, **settings: Any) -> None:
    """Save a :func:`byte_llama` with its tokenizer."""
    byte_llama(native_length, **settings).save_pretrained(folder)
    byte_tokenizer(adds_bos=True).save_pretrained(folder)
