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


def save_byte_llama_gguf(
    path: Path, model: LlamaForCausalLM, *, factors: Any = None, adds_bos: bool = False, **rope: Any
) -> None:
    """Write a :func:`byte_llama` of ``vocab_size`` 260 as llama.cpp's converter does.

    Args:
        path: The file.
        model: The model; its RoPE is not written.
        factors: What ``rope_freqs.weight`` holds.
        adds_bos: Whether the file asks for a first token.
        rope: Keys below ``llama.rope.``, with two underscores for a dot.
    """
    import gguf

    config = model.config
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in rope.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"llama.rope.{key.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(adds_bos)
    writer.add_eos_token_id(1)

    def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Return q's or k's rows with the two of a pair side by side, as llama.cpp rotates them."""
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    weights = {"token_embd": model.model.embed_tokens, "output_norm": model.model.norm, "output": model.lm_head}
    for number, layer in enumerate(model.model.layers):
        parts = {
            "attn_q": layer.self_attn.q_proj,
            "attn_k": layer.self_attn.k_proj,
            "attn_v": layer.self_attn.v_proj,
            "attn_output": layer.self_attn.o_proj,
            "ffn_gate": layer.mlp.gate_proj,
            "ffn_up": layer.mlp.up_proj,
            "ffn_down": layer.mlp.down_proj,
            "attn_norm": layer.input_layernorm,
            "ffn_norm": layer.post_attention_layernorm,
        }
        weights |= {f"blk.{number}.{name}": part for name, part in parts.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, part in weights.items():
        weight, kind = part.weight.detach(), name.rpartition(".")[2]
        writer.add_tensor(f"{name}.weight", (in_pairs(weight, heads[kind]) if kind in heads else weight).numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(factors, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
