"""Every RoPE family of the installed transformers, patched: right, fused where it can be, and back again exactly."""

import warnings

import mrrope
import pytest
import torch
from mrrope.patching import SwappedTable, TableRotaryEmbedding, patch, unpatch

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

TOKENS = 24
FUSED_SHARE = 0.95
rows: dict[str, str] = {}


def logits(model, tokens, **kwargs):
    with torch.no_grad():
        return model(tokens, **kwargs).logits


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def unfused_with(model, **options):
    """The model's own code with the new frequencies, computed here: what the patched model has to agree with."""
    for rotary in list(mrrope.model_rope.rotary_embeddings(model)):
        tables = mrrope.patching._tables_for(rotary, "mrrope_pro", 4.0, False, options)
        SwappedTable(rotary, tables)
    return model


@pytest.mark.parametrize("family", tiny_models.causal_lm_families())
def test_family(family):
    model = tiny_models.tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 100, (2, TOKENS), generator=generator)
    before = logits(model, tokens)
    want = logits(unfused_with(tiny_models.tiny_model(family)), tokens)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch(model, "mrrope_pro", scale=4.0)
    fused = any(isinstance(module, TableRotaryEmbedding) for module in model.modules())
    reasons = [str(warning.message) for warning in caught if "not the fused op" in str(warning.message)]
    rows[family] = "fused" if fused and not reasons else "table only: " + "; ".join(reasons)
    assert relative(logits(model, tokens), want) < 1e-5
    assert relative(want, before) > 1e-4, "the new table must matter, or the comparison shows nothing"

    unpatch(model)
    assert torch.equal(logits(model, tokens), before)
