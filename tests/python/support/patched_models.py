"""Patched tiny models against the same models unfused: logits, gradients, generated text, and what a patch touches."""

import sys
from typing import Any

import torch
from model_tolerance import relative
from tiny_models import takes_position_ids, tiny_model, tokens
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import mrrope
from mrrope.hf import rope_config

# Relative error of the logits in the Frobenius norm. Stock code computes angles in float32 in every dtype.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LENGTH = 64  # the training length in the tiny models' configurations
LLAMA = {"rotary_dim": 16, "base": 1e4, "original_max_position": LENGTH}
NEW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}

# rotary_dim and base of the tiny models whose convention differs from Llama's.
CONVENTIONS = {
    "gpt_neox": (8, 1e4),  # a quarter of each head
    "phi": (8, 1e4),  # half of each head, split by the caller
    "cohere": (16, 5e5),  # interleaved
    "glm": (8, 1e4),  # interleaved, half of each head
    "deepseek_v3": (16, 1e4),  # MLA: interleaved in, halves out, one key head
    "llama4_text": (16, 5e5),  # complex numbers
    "qwen3_5_text": (8, 1e4),  # M-RoPE
    "qwen4_exp_text": (16, 1e4),  # M-RoPE; selects tokens of cosines and sines
}

# Families whose stock logits with a cache differ from those of one full forward, and why.
KNOWN = {
    "blt": "it hashes groups of bytes within one call only, without those in the cache; not the only cause",
    "roformer": "its attention is bidirectional even with is_decoder (5.17; causal in 5.22)",
}

IN_A_FRESH_PROCESS = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    cases = pickle.load(file)
import torch
import mrrope
for name, (model, ids, want, plain) in cases.items():
    with torch.no_grad():
        got = model(ids).logits
        assert torch.allclose(got, want, rtol=0, atol=1e-5 * want.abs().max().item()), name
        mrrope.unpatch(model)
        got = model(ids).logits
        assert torch.allclose(got, plain, rtol=0, atol=1e-5 * plain.abs().max().item()), name
"""


class OwnCosines(LlamaAttention):
    """Attention that computes with cosines and sines itself, which the op cannot replace."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos * 1.0, sin * 1.0), *args, **kwargs)


UNFUSABLE = "llama with cosines of its own"


def model_named(family: str) -> PreTrainedModel:
    """Return a tiny model of a family, or the Llama that gets a table but not the fused op."""
    if family != UNFUSABLE:
        return tiny_model(family)
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnCosines
    return model


def rotary_embedding(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))


def turns_in_local_layers_alone(model: nn.Module) -> bool:
    """Whether only local layers have RoPE, so that a patch without ``local_layers`` changes nothing."""
    rotaries = rope_config.rotary_embeddings(model)
    return all(rope_config.is_local(kind) for rotary in rotaries for kind in rope_config.layer_types(rotary))


def packed_tables(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("packed_table")}


def ready() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_pro", **LLAMA, scale=4.0)


def unfused(model: PreTrainedModel, table: mrrope.FrequencyTable, layer_type: str = "") -> PreTrainedModel:
    """Set a table's frequencies in the stock model, which keeps its own code."""
    rotary = rotary_embedding(model)
    prefix = layer_type and f"{layer_type}_"
    for name in ("inv_freq", "original_inv_freq"):
        getattr(rotary, prefix + name).copy_(table.inv_freq)
    setattr(rotary, f"{prefix}attention_scaling", table.attention_factor)
    return model


@torch.no_grad()
def logits(model: nn.Module, **inputs: Any) -> Tensor:
    return model(**({"input_ids": tokens(2, 24)} | inputs)).logits


@torch.no_grad()
def decoded(model: PreTrainedModel, input_ids: Tensor, prompt: int) -> Tensor:
    """Return the logits of a prefill of the prompt and of single-token steps after it, called as `generate` does."""
    dynamic = DynamicCache(config=model.config.get_text_config(decoder=True))
    call = {"past_key_values": dynamic if model._supports_default_dynamic_cache() else None, "use_cache": True}
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    lengths = [prompt] + [1] * (input_ids.shape[1] - prompt)
    found = []
    for step, where in zip(input_ids.split(lengths, dim=1), positions.split(lengths, dim=1), strict=True):
        if takes_position_ids(model):
            call["position_ids"] = where
        output = model(step, **call)
        call["past_key_values"] = output.get("past_key_values", dynamic)
        found.append(output.logits)
    return torch.cat(found, dim=1)


def generated(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model.generate(input_ids, **NEW | {"return_dict_in_generate": True, "output_logits": True} | options)


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    ids = tokens(2, 24)
    model(input_ids=ids, labels=ids, **inputs).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(got: Tensor, want: Tensor) -> None:
    assert relative(got, want) < TOLERANCE[want.dtype]


def assert_same_text(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    assert_same(torch.stack(got.logits), torch.stack(want.logits))


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert want
    largest = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        # The absolute term is the rounding of the largest gradient: some gradients are nearly zero.
        assert (got[name] - gradient).norm() < 2e-5 * gradient.norm() + 1e-6 * largest, name


class Snapshot:
    """Everything of a model that patching could touch, compared by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.classes = {name: type(module) for name, module in self.modules.items()}
        self.attributes = {name: dict(vars(module)) for name, module in self.modules.items()}
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.values = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.keys = list(model.state_dict())
        self.functions = dict(vars(sys.modules[type(model).__module__]))

    def assert_untouched(self) -> None:
        now = Snapshot(self.model)
        for before, after in (
            (self.modules, now.modules),
            (self.classes, now.classes),
            (self.tensors, now.tensors),
            (self.functions, now.functions),
            *((self.attributes[name], now.attributes[name]) for name in self.modules),
        ):
            assert before.keys() == after.keys()
            assert [name for name in before if before[name] is not after[name]] == []
        assert self.keys == now.keys
        assert all(torch.equal(now.values[name], value) for name, value in self.values.items())
