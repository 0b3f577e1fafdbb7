"""Every RoPE family of the installed transformers: patched right, fused where possible, and restored exactly."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import mrrope
from mrrope.hf import rope_config
from mrrope.hf.patch import is_patched
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import tiny_models
import transformers
from model_tolerance import relative, tolerance
from patched_models import turns_in_local_layers_alone

pytestmark = pytest.mark.slow

TOKENS = 16
TRAINED_LENGTH = 64
FAMILIES = tiny_models.causal_lm_families()
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
# Families that keep no rotary embedding to swap: their own code holds a table of sines by position.
UNSUPPORTED = {"codegen", "gptj", "roformer"}
# Families whose own code computes with cosines and sines. Those of transformers 5.17 at most select tokens of them.
TABLE_ONLY: set[str] = set()
rows: dict[str, tuple[str, str]] = {}
"""By family: its convention and the result."""


def logits(model, tokens):
    with torch.no_grad():
        return model(**tiny_models.inputs(model, tokens)).logits


def unfused(model, *, local_layers, **options):
    """Set the new frequencies in the stock model, which keeps its own code."""
    for rotary in list(rope_config.rotary_embeddings(model)):
        for layer_type in rope_config.layer_types(rotary):
            if rope_config.is_local(layer_type) and not local_layers:
                continue
            parameters = rotary.config.rope_parameters
            prefix = "" if layer_type is None else f"{layer_type}_"
            base = (parameters if layer_type is None else parameters[layer_type])["rope_theta"]
            old = getattr(rotary, f"{prefix}inv_freq")
            table = mrrope.frequency_table("mrrope_pro", rotary_dim=2 * old.numel(), base=base, **options)
            new = (table.inv_freq * (old != 0)).to(old)
            setattr(rotary, f"{prefix}inv_freq", new)
            setattr(rotary, f"{prefix}attention_scaling", table.attention_factor)
            if hasattr(rotary, "rope_init_fn"):  # recomputes them at every call
                rotary.rope_init_fn = lambda *_, new=new, table=table: (new, table.attention_factor)
        kinds = rotary.rope_type
        rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return model


def convention_of(model):
    """Describe the conventions of a patched model."""
    functions = [f for module in model.modules() if isinstance(module, TableRotaryEmbedding) for f in module.functions]
    ways = {}
    for form, way in ((function.form, function.convention) for function in functions):
        parts = [
            "interleaved in, halves out" if way.gathers_halves else way.pairing,
            way.layout,
            "last components" if way.rotates_last else None,
            "backwards" if way.backwards else None,
            "q and k apart" if len(form.heads) == 1 else None,
            "complex" if len(form.embedding) == 1 else None,
        ]
        ways[", ".join(filter(None, parts))] = None
    return "; ".join(ways)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    options = {"scale": 4.0, "original_max_position": TRAINED_LENGTH}
    model = tiny_models.tiny_model(family)
    tokens = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    before = logits(model, tokens)
    if family in UNSUPPORTED:
        with pytest.raises(ValueError, match="model must have rotary position embeddings"):
            mrrope.patch(model, "mrrope_pro", **options)
        assert torch.equal(logits(model, tokens), before)
        rows[family] = "", "unsupported: has no rotary embedding module"
        return

    options["local_layers"] = turns_in_local_layers_alone(model)
    reference = unfused(tiny_models.tiny_model(family), **options)
    want = logits(reference, tokens)
    limit = tolerance(reference, lambda model: logits(model, tokens))
    assert relative(want, before) > 100 * limit, "the new table must matter, or the comparison shows nothing"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mrrope.patch(model, "mrrope_pro", **options)
    reasons = [str(w.message).partition("fused op: ")[2] for w in caught if "not the fused op" in str(w.message)]
    rows[family] = convention_of(model), f"table only: {reasons[0]}" if reasons else "fused"
    assert bool(reasons) == (family in TABLE_ONLY), rows[family]
    assert is_patched(model)
    assert relative(logits(model, tokens), want) < limit

    mrrope.unpatch(model)
    assert torch.equal(logits(model, tokens), before)


def test_documented_number_of_families_is_fused(capsys):
    if rows.keys() != set(FAMILIES):
        pytest.skip("says something only when every family was tried in the same run")
    fused = sum(status == "fused" for _, status in rows.values())
    with capsys.disabled():
        print(f"\n{'family':28}{'convention':46}")
        for family, (convention, status) in rows.items():
            print(f"{family:28}{convention:46}{status}")
        print(f"{fused} of {len(rows)} families are fused")
    documented = documented_families()
    installed = ".".join(transformers.__version__.split(".")[:2])
    if installed in documented:
        assert (fused, len(rows) - fused) == documented[installed]
    else:
        assert fused >= min(documented.values())[0]


def documented_families():
    """Return the numbers of fused and of refused families in the page's table, by version of transformers."""
    columns = [
        re.search(rf"^\| {row} \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.MULTILINE).groups()
        for row in ("causal-LM families .*", "fused", "refused .*")
    ]
    return {version: (int(fused), int(refused)) for version, fused, refused in zip(*columns, strict=True)}
