"""benchmarks/model.py: every shape runs, tiny and without a GPU, and its results make a table."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import model
import speed_tables
from model_shapes import SHAPES

from mrrope.hf.fusion.rms_norm import FusedNorms
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_runs(shape, tmp_path, monkeypatch, capsys):
    for name in ("PREFILL_ROUNDS", "DECODE_ROUNDS", "WARM_UP_ROUNDS"):
        monkeypatch.setattr(model, name, 1)
    output = tmp_path / shape
    model.main(["--shape", shape, "--tiny", "--only", "prefill.*eager", "--output", str(output)])
    model.main(["--shape", shape, "--tiny", "--only", "decode.*eager", "--append", "--output", str(output)])
    record = json.loads(output.with_suffix(".json").read_text())
    assert [row["name"] for row in record["rows"]] == ["prefill 8, eager, 2 layers", "decode batch 1, eager, 2 layers"]
    for row in record["rows"]:
        assert row["seconds"].keys() == {model.STOCK, model.ROTATION, model.PATCHED}
        # Logits of bfloat16 models, of which stock rounds its cosines too.
        assert max(row["logits_differences"].values()) < 0.05
    assert record["errors"][model.PATCHED] < 0.05
    assert output.with_suffix(".png").exists()
    assert "prefill 8, eager" in capsys.readouterr().out

    monkeypatch.setattr(speed_tables, "rows_of", lambda name: record["rows"])
    assert len(speed_tables.model("model_cuda.json", "eager")) == 2 + len(record["rows"])


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("shape", SHAPES)
def test_patched_shapes_are_fused(shape):
    models = model.as_kinds(SHAPES[shape].shrunk().model(2, "cpu"), [model.STOCK, model.ROTATION, model.PATCHED])
    for kind, one in models.items():
        is_fused = any(isinstance(module, TableRotaryEmbedding) for module in one.modules())
        norms = [module for module in one.modules() if FusedNorms().state_of(module) is not None]
        assert is_fused == (kind != model.STOCK)
        assert bool(norms) == (kind == model.PATCHED)


def test_a_tiny_run_is_no_result(capsys):
    with pytest.raises(SystemExit):
        model.main(["--tiny"])
    assert "--tiny must come with --output" in capsys.readouterr().err


def test_rows_of_an_earlier_run_are_kept_in_order():
    old = [{"name": name, "seconds": 1} for name in "abc"]
    new = [{"name": name, "seconds": 2} for name in "bd"]
    assert [(row["name"], row["seconds"]) for row in model.with_new_rows(old, new)] == [
        ("a", 1),
        ("b", 2),
        ("c", 1),
        ("d", 2),
    ]
