"""Every causal LM of transformers with RoPE: a tiny model builds, depends on RoPE, and decodes as it prefills."""

import re

import pytest
import torch
from patched_models import KNOWN, decoded
from tiny_models import (
    causal_lm_families,
    families_without_rope,
    inputs,
    rope_effects,
    tiny_model,
    tokens,
    unbuildable,
)
from torch import Tensor
from transformers import PreTrainedModel

import mrrope

UNBUILDABLE = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the same language model",
    "musicgen": "no RoPE; AutoModelForCausalLM hands MusicgenForCausalLM the whole config, which it does not take",
    "musicgen_melody": "as musicgen",
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_transformers")]

# Rotary tensors on which no logits depend.
UNUSED = {
    "blt": r"patcher\.",  # only decides where patches end
    "deepseek_v4": r"compressor\..*main_inv_freq",  # compressors rotate by the other table
    "granite_swa": r"rotary_emb\.",  # the ones in rotary_embs are used
    "granitemoe_swa": r"rotary_emb\.",
    "phimoe": r"rotary_emb\.",  # computes its frequencies from the config at every call
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
