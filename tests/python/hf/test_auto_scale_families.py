"""scale="auto" in every family of causal language models."""

import copy

import pytest
import torch

import mrrope
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import tiny_models
from patched_models import turns_in_local_layers_alone


def families_that_follow():
    unsupported = {"codegen", "gptj", "roformer"}
    return [family for family in tiny_models.causal_lm_families() if family not in unsupported]


# Families whose scale cannot follow the text, by the reason in the error.
UNFOLLOWABLE = {
    # Keys are normalized after the rotation, or every layer has its own rotary embedding.
    "in a way that is not understood": {"granite_swa", "granitemoe_swa", "hunyuan_v1_dense", "hunyuan_v1_moe"},
    "it does not read one token by itself": {
        "blt",
        "deepseek_v4",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "moshi",
    },
    "its configuration states no native length": {"recurrent_gemma"},
}


def layer_sees_scale(old, new):
    """Whether both keys and values of a layer changed with the table, although at most one of them is rotated."""
    pairs = [(getattr(old, name, None), getattr(new, name, None)) for name in ("keys", "values")]
    return all(isinstance(a, torch.Tensor) and a.numel() and not torch.allclose(a, b, rtol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("family", families_that_follow())
def test_family(family):
    """One token has the same hidden states by every table, so that its re-rotated keys equal those of the new table."""
    model = tiny_models.tiny_model(family)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(**tiny_models.inputs(model, ids)).logits
    reason = next((reason for reason, families in UNFOLLOWABLE.items() if family in families), None)
    options = {"scale": "auto", "max_scale": 256.0, "local_layers": turns_in_local_layers_alone(model)}
    if reason is not None:
        with pytest.raises(ValueError, match=f"scale must be a number for .*{reason}"):
            mrrope.patch(model, "mrrope_pro", **options)
        with torch.no_grad():
            assert torch.equal(model(**tiny_models.inputs(model, ids)).logits, before)
        return
    mrrope.patch(model, "mrrope_pro", **options)
    with torch.no_grad():
        after = model(**tiny_models.inputs(model, ids)).logits
        assert ((after - before).norm() / before.norm()).item() < 1e-4
        rotaries = [m for m in model.modules() if isinstance(m, TableRotaryEmbedding)]
        before = model(input_ids=ids[:, :1], position_ids=torch.full((2, 1), 3), use_cache=True).past_key_values
        cache = copy.deepcopy(before)
        for rotary in rotaries:
            rotary.follower.expected_lengths = torch.tensor([10**9, 10**9])
        model(input_ids=ids[:, 1:2], position_ids=torch.full((2, 1), 4), past_key_values=cache)
        fresh = model(input_ids=ids[:, :1], position_ids=torch.full((2, 1), 3), use_cache=True).past_key_values
    rescaled = 0
    for old, got, want in zip(before.layers, cache.layers, fresh.layers, strict=True):
        if layer_sees_scale(old, want):
            break  # with attention sinks and the like, later hidden states depend on the attention factor
        for name in ("keys", "values", "indexer_keys"):
            parts = [getattr(layer, name, None) for layer in (got, want, old)]
            if all(isinstance(part, torch.Tensor) and part.numel() for part in parts):
                new, right, earlier = (part.narrow(-2, 0, 1) for part in parts)
                torch.testing.assert_close(new, right, rtol=1e-4, atol=1e-5)
                rescaled += not torch.allclose(right, earlier, rtol=1e-3)
    assert rescaled > 0
