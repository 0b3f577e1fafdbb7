"""RMSNorms of patched models, those of q and k included: torch's fused kernel, and no other change.

Those that add 1 to their weight are in test_fused_offset_norm.py.

The reference is the same model patched without fuse_norms, and float64 arithmetic.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.rope_config import rotary_embeddings

pytest.importorskip("transformers")

from fused_norms import PATCH, QK_NORMS, fused, norms, reference
from model_tolerance import relative, tolerance
from patched_models import (
    Snapshot,
    assert_same,
    assert_same_text,
    generated,
    logits,
)
from tiny_models import causal_lm_families, inputs, tiny_model, tokens

FAMILIES = {
    "llama": "two a layer, one at the end",
    "qwen3": "q and k, per head",
    "llama4_text": "another name for eps",
    "deepseek_v3": "norms within the attention",
    "olmo2": "norms after the attention; q and k, over all heads",
    "smollm3": "layers that do not rotate",
    "lfm2": "q and k, under other names",
    "hunyuan_v1_dense": "q and k, after the rotation",
    "exaone4": "q and k, also in layers that do not rotate",
}


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, norm_inputs: list[torch.Tensor]) -> None:
    model = fused(family)
    found = logits(model)
    assert len(norm_inputs) == len(norms(model)) > len(model.model.layers)
    assert_same(found, logits(reference(family)))


@pytest.mark.slow
def test_every_family_norms_as_it_did() -> None:
    """Those that have norms of this kind; most do."""
    changed = []
    for family in causal_lm_families():
        if not [*rotary_embeddings(tiny_model(family))]:
            continue
        model = fused(family, local_layers=True)
        if not norms(model):
            continue
        changed.append(family)
        apart = reference(family, local_layers=True)

        @torch.no_grad()
        def run(one: nn.Module) -> torch.Tensor:
            return one(**inputs(one, tokens(1, 16))).logits

        assert relative(run(model), run(apart)) < tolerance(apart, run), family
    assert len(changed) > 80, changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_rounds_once(dtype: torch.dtype) -> None:
    model = fused().to(dtype)
    norm = model.model.norm
    x = 3 * torch.randn(64, norm.weight.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    exact = exact * norm.weight.double()
    one_rounding = torch.finfo(dtype).eps / 2

    def error(got: torch.Tensor) -> float:
        return float(((got.double() - exact) / exact).abs().max())

    with torch.no_grad():
        assert error(norm(x)) < 1.01 * one_rounding
        mrrope.unpatch(model)
        assert error(norm(x)) > 1.5 * one_rounding, "the model's own code rounds twice"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_other_dtypes(family: str, dtype: torch.dtype, norm_inputs: list[torch.Tensor]) -> None:
    """As near as the model's own code, or nearer, to the same weights in float64."""
    model, apart, exact = (tiny_model(family).to(dtype) for _ in range(3))
    for one, fuse_norms in ((model, True), (apart, False), (exact.double(), False)):
        mrrope.patch(one, "yarn", scale=4.0, fuse_norms=fuse_norms)
    want = logits(exact)
    assert relative(logits(model), want) < 1.1 * relative(logits(apart), want)
    assert {x.dtype for x in norm_inputs} == {dtype}


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family: str) -> None:
    model = tiny_model(family)
    before, plain = Snapshot(model), logits(model)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert norms(model)
    assert model.state_dict().keys() == {*before.keys}
    mrrope.unpatch(model)
    before.assert_untouched()
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_by_default_only_rope_is_patched(family: str) -> None:
    model = tiny_model(family)
    own = {module: type(module) for module in model.modules()}
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert not norms(model)
    assert all(type(module) is own[module] for module in model.modules() if module in own)
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        assert not norms(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0, fuse_norms=True)
    assert norms(model)


def test_patched_anew_without() -> None:
    model = fused()
    mrrope.patch(model, "mrrope_pro", **PATCH | {"fuse_norms": False})
    assert torch.equal(logits(model), logits(reference()))
    assert not norms(model)


def test_a_block_leaves_it_fused() -> None:
    model = fused()
    found, fused_norms = logits(model), norms(model)
    with mrrope.patched(model, "yarn", scale=2.0, fuse_norms=False):
        assert not norms(model)
    assert norms(model) == fused_norms
    assert torch.equal(logits(model), found)


def test_a_block_that_fuses() -> None:
    model = tiny_model("llama")
    before = Snapshot(model)
    with mrrope.patched(model, "mrrope_pro", **PATCH):
        assert_same(logits(model), logits(reference()))
    before.assert_untouched()


@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_auto_scale(family: str) -> None:
    model, apart = (patch(family, scale="auto", max_scale=8.0) for patch in (fused, reference))
    batch = torch.cat([nn.functional.pad(tokens(1, 40), (60, 0)), tokens(1, 100, seed=1)])
    call = {"input_ids": batch, "attention_mask": (batch != 0).long()}  # sequences of two scales
    assert_same(logits(model, **call), logits(apart, **call))
    options = {"do_sample": False, "max_new_tokens": 80}  # over a step
    assert_same_text(*(generated(one, tokens(2, 9), **options) for one in (model, apart)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gemma3_text", *QK_NORMS])
def test_generate(family: str, cache: str) -> None:
    options = {"cache_implementation": "static"} if cache == "static" else {}
    assert_same_text(*(generated(model, tokens(2, 12), **options) for model in (fused(family), reference(family))))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_copies_stand_on_their_own(family: str, how: Callable[[Any], Any]) -> None:
    model = fused(family)
    found, plain = logits(model), logits(tiny_model(family))
    clone = how(model)
    assert len(norms(clone)) == len(norms(model))
    mrrope.unpatch(model)
    assert torch.equal(logits(clone), found)
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)
    assert type(clone.model.norm) is type(model.model.norm)
