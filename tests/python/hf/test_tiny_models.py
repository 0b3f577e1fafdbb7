"""Every causal LM of transformers that uses RoPE builds tiny, shows what RoPE does, and decodes as it prefills."""

import re

import pytest
import torch
from tiny_models import (
    causal_lm_families,
    families_without_rope,
    inputs,
    rope_effects,
    takes_position_ids,
    tiny_model,
    tokens,
    unbuildable,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import mrrope

UNBUILDABLE = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the same language model",
    "musicgen": "no RoPE; AutoModelForCausalLM hands MusicgenForCausalLM the whole config, which it does not take",
    "musicgen_melody": "as musicgen",
}

pytestmark = pytest.mark.usefixtures("quiet_transformers")

# Rotary tensors on which no logits depend.
UNUSED = {
    "blt": r"patcher\.",  # only decides where patches end
    "deepseek_v4": r"compressor\..*main_inv_freq",  # compressors rotate by the other table
    "granite_swa": r"rotary_emb\.",  # the ones in rotary_embs are used
    "granitemoe_swa": r"rotary_emb\.",
    "phimoe": r"rotary_emb\.",  # computes its frequencies from the config at every call
}

# Why stock transformers, with a cache, does not give the logits of one full forward.
KNOWN = {
    "blt": "it hashes groups of bytes within one call only, without those in the cache; not the only cause",
    "roformer": "its attention is bidirectional even with is_decoder (5.17; causal in 5.22)",
}


@pytest.fixture(scope="module", params=causal_lm_families())
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return tiny_model(family)


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    return model(**inputs(model, input_ids)).logits


@torch.no_grad()
def decoded(model: PreTrainedModel, input_ids: Tensor, prompt: int) -> Tensor:
    """The logits of a prefill of the prompt and then of one token at a time, called as `generate` calls the model."""
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


def test_every_family_is_accounted_for() -> None:
    print(f"\n{len(causal_lm_families())} families with RoPE; without:")
    print(*(f"  {family}: {instead}" for family, instead in families_without_rope().items()), sep="\n")
    assert unbuildable().keys() <= UNBUILDABLE.keys(), unbuildable()
    assert {"llama", "gptj", "roformer", "deepseek_v3", "got_ocr2"} <= {*causal_lm_families()}
    assert {"gpt2", "bloom", "mamba", "jamba", "xlnet"} <= families_without_rope().keys()


def test_logits_are_finite_and_the_same_for_the_same_seed(family: str, model: PreTrainedModel) -> None:
    found = logits(model, tokens(2, 24))
    assert found.shape == (2, 24, model.config.get_text_config().vocab_size)
    assert found.isfinite().all()
    assert torch.equal(found, logits(tiny_model(family), tokens(2, 24)))
    assert not torch.equal(found, logits(tiny_model(family, seed=1), tokens(2, 24)))


def test_rope_matters(family: str, model: PreTrainedModel) -> None:
    effects = rope_effects(model)
    unused = {name for name in effects if family in UNUSED and re.search(UNUSED[family], name)}
    assert effects.keys() - unused
    assert all((effects[name] == 0) == (name in unused) for name in effects), effects
    assert all(effects[name] > 1e-3 for name in effects.keys() - unused), effects


def test_cached_decode_equals_full_forward(family: str, model: PreTrainedModel) -> None:
    check_cached_decode(family, model)


@pytest.mark.filterwarnings("ignore:.*gets the table but not the fused op")
def test_cached_decode_equals_full_forward_patched(family: str, model: PreTrainedModel) -> None:
    if family in ("codegen", "gptj", "roformer"):
        pytest.skip("has no rotary embedding to patch")
    with mrrope.patched(model, "mrrope_pro", scale=4.0, original_max_position=16, local_layers=True):
        check_cached_decode(family, model)


def check_cached_decode(family: str, model: PreTrainedModel) -> None:
    if "input_ids" not in inputs(model, tokens(1, 1)):
        pytest.skip("a drafter, which keeps no cache of its own")
    input_ids = tokens(2, 24)
    full = logits(model, input_ids)
    error = float((decoded(model, input_ids, 16) - full).abs().max() / full.abs().max())
    if error >= 1e-4 and family in KNOWN:
        pytest.xfail(KNOWN[family])
    assert error < 1e-4
