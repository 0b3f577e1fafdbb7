"""``mrrope eval`` compares table sets and head tables like tables: by file, and by content."""

from pathlib import Path

import pytest
import torch
from layer_tables import random_set
from tiny_models import tiny_model, tokens

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


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(1, 24)).logits


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


def test_sets_that_do_not_fit_are_refused(model: torch.nn.Module, tables: mrrope.TableSet, tmp_path: Path) -> None:
    short = Method("short", table=mrrope.TableSet(list(tables)[:1]))
    with pytest.raises(ValueError, match=r"methods must go with the model, and short does not: .*layers"):
        check_methods([short], model)
    (tmp_path / "t.json").write_text('{"format": "mrrope.TableSet/1", "layers": [3]}')
    with pytest.raises(ValueError, match=r"methods must give a table, and .*t\.json does not: layers\[0\] must be"):
        methods_named([str(tmp_path / "t.json")])
