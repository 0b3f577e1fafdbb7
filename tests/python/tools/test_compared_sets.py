"""``mrrope eval`` compares table sets and head tables like tables: by file, and by content."""

from pathlib import Path

import pytest
import torch
from layer_tables import random_set
from tiny_models import random_model, tiny_model, tokens
from transformers import LlamaConfig

import mrrope
from mrrope.evaluation.compared_methods import Method, check_methods, methods_named
from mrrope.hf.rope_config import global_settings

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.fixture
def tables(model: torch.nn.Module) -> mrrope.TableSet:
    own, config = global_settings(model), model.config
    return random_set(
        config.num_hidden_layers,
        config.num_key_value_heads,
        rotary_dim=own.rotary_dim,
        base=own.base,
        original_max_position=own.original_max_position,
    )


def logits(model: torch.nn.Module, first: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(1, 24), position_ids=torch.arange(first, first + 24)[None]).logits


def model_of_smollm2s_heads() -> torch.nn.Module:
    """Return a thin random model with the layers, heads and RoPE of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=18,
        intermediate_size=16,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    return random_model(config)


@pytest.mark.parametrize("kind", ["set", "heads"])
def test_files_and_contents_are_applied(
    model: torch.nn.Module, tables: mrrope.TableSet, kind: str, tmp_path: Path
) -> None:
    chosen = tables if kind == "set" else tables[0]
    chosen.save(tmp_path / "t.json")
    own = logits(model)
    with mrrope.patched(model, chosen):
        expected = logits(model)
    assert not torch.allclose(own, expected, rtol=1e-3)
    methods = [*methods_named([str(tmp_path / "t.json")], scale=4.0), Method("found", table=chosen)]
    check_methods(methods, model)
    for method in methods:
        with method.applied(model):
            assert torch.equal(logits(model), expected), method.name
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("ladder", ["smollm2-135m", "smollm2-135m-heads"])
def test_a_shipped_ladder_follows_the_length(ladder: str) -> None:
    one_scale = rf"methods may have the ladder {ladder} with scale auto only, got scale 4\.0"
    with pytest.raises(ValueError, match=one_scale):
        methods_named([ladder], scale=4.0)
    (method,) = methods_named([ladder], scale="auto", max_scale=8.0)
    assert method.follows_length
    model = model_of_smollm2s_heads()
    check_methods([method], model)
    for first, covering in ((0, "unpatched"), (9000, f"{ladder}-2x"), (30000, f"{ladder}-4x")):
        (alone,) = methods_named([covering])
        with alone.applied(model):
            expected = logits(model, first)
        with method.applied(model):
            torch.testing.assert_close(logits(model, first), expected)
        is_stock = torch.equal(logits(model, first), expected)
        assert is_stock == (covering == "unpatched")


def test_sets_that_do_not_fit_are_refused(model: torch.nn.Module, tables: mrrope.TableSet, tmp_path: Path) -> None:
    short = Method("short", table=mrrope.TableSet(list(tables)[:1]))
    with pytest.raises(ValueError, match=r"methods must go with the model, and short does not: .*layers"):
        check_methods([short], model)
    (tmp_path / "t.json").write_text('{"format": "mrrope.TableSet/1", "layers": [3]}')
    with pytest.raises(ValueError, match=r"methods must give a table, and .*t\.json does not: layers\[0\] must be"):
        methods_named([str(tmp_path / "t.json")])
