"""The study of table sets: every row is measured once, on held-out texts and on texts of other kinds."""

import json
import math
import random
from pathlib import Path

import measurements
import pytest
import study_tables
import table_set_study as study
import torch
from byte_llama import random_words, save_byte_llama
from layer_search import LayerGenes

import mrrope
from mrrope.calibration.spaces import PowerSpace
from mrrope.evaluation import model_loading
from mrrope.tables.lookup import load_tables

SETTINGS = {"rotary_dim": 8, "base": 1e4, "original_max_position": 32, "scale": 4.0}


def uni() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_uni", **SETTINGS)


def test_layers_mutate_and_cross_apart() -> None:
    genes = LayerGenes(PowerSpace(uni(), 0.0), 3)
    start = genes.nearest(genes.start())
    assert genes.table(start).is_like(mrrope.TableSet([genes.space.table(genes.space.start)] * 3))
    rng = random.Random(0)
    moved = [genes.mutated(start, rng) for _ in range(20)]
    changed = {tuple(one[3 * i : 3 * i + 3] != start[3 * i : 3 * i + 3] for i in range(3)) for one in moved}
    assert len(changed) > 3  # not always the same layers
    for point in moved:
        assert genes.nearest(point) == point
        tables = genes.table(point)
        assert [layer.bounds for layer in tables] == [tuple(map(int, point[3 * i : 3 * i + 2])) for i in range(3)]
    child = genes.crossed(moved[0], moved[1], rng)
    for i in range(0, 9, 3):
        assert child[i : i + 3] in (moved[0][i : i + 3], moved[1][i : i + 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    save_byte_llama(folder / "model", 32, layers=2, heads=4, num_key_value_heads=2, initializer_range=0.3)
    for name, seeds in (("texts", range(6)), ("held", range(7, 9)), ("other", range(9, 11))):
        (folder / name).write_text("\0".join(random_words(40, seed) for seed in seeds))
    mrrope.TableSet([mrrope.HeadTables([uni(), mrrope.frequency_table("pi", **SETTINGS)])] * 2).save(
        folder / "head.json"
    )
    mrrope.TableSet([mrrope.frequency_table("ntk", **SETTINGS | {"scale": 2.0})] * 2).save(folder / "two.json")
    return folder


def options(folder: Path, output: Path, *given: str):
    texts = [str(folder / name) for name in ("model", "texts", "held", "other")]
    always = ["--scale", "4", "--documents", "2", "--trials", "0", "--budget", "0.05", "--output", str(output)]
    found = study.parser().parse_args([*texts, *always, *given])
    found.found = dict(found.found)
    return found


def test_rows_are_measured_apart_and_once(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    model, tokenizer = model_loading.load(folder / "model", device="cpu")
    found = ("--found", f"head={folder / 'head.json'}", "--ladder", str(folder / "two.json"), str(folder / "head.json"))
    study.run(options(folder, tmp_path / "out", "--rows", "fixed", *found), model, tokenizer)
    calls = []
    forward = model.forward
    model.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    rows = ("fixed", "truncated", "head", "evolved", "layer_search", "ladder")
    results = study.run(options(folder, tmp_path / "out", "--rows", *rows, *found), model, tokenizer)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    for part in (data, data["parts"][study.OTHER_KINDS]):
        measured = part["results"]["perplexity"]
        assert {"yarn", "su", "truncated", "head", "evolved", "layer_search", "ladder"} <= measured.keys()
        assert all(set(by_length) == {"32", "64", "128"} for by_length in measured.values())
    assert set(data["searches"]) == {"evolved", "layer_search"}
    assert len(data["searches"]["layer_search"]["tables"]["layers"]) == 2
    printed = capsys.readouterr().out
    assert "other kinds" in printed
    for row in ("head", "evolved", "layer_search"):
        assert (tmp_path / f"out.{row}.tables.png").read_bytes().startswith(b"\x89PNG")
    # The rows are those of the tables.
    tokens = [0, *tokenizer(random_words(40, 7), add_special_tokens=False).input_ids][:128]
    with mrrope.patched(model, load_tables(folder / "head.json")), torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    losses = -logits.log_softmax(-1)[torch.arange(127), tokens[1:]]
    row = data["results"]["perplexity"]["head"]["128"]["documents"][0]
    assert row["second_half_loss"] == pytest.approx(losses[63:].mean().item(), rel=1e-4)
    # Truncated up to the native length is the stock model, and so is the ladder.
    truncated, ladder = (data["results"]["perplexity"][name] for name in ("truncated", "ladder"))
    assert truncated["32"]["perplexity"] == pytest.approx(ladder["32"]["perplexity"], rel=1e-4)
    assert truncated["128"]["perplexity"] != pytest.approx(ladder["128"]["perplexity"], rel=1e-4)
    # The ladder reads the native length as the stock model does, longer ones with the sets.
    ladder, head = (data["results"]["perplexity"][name] for name in ("ladder", "head"))
    assert ladder["128"]["perplexity"] == pytest.approx(head["128"]["perplexity"], rel=1e-4)
    assert ladder["32"]["perplexity"] != pytest.approx(head["32"]["perplexity"], rel=1e-4)
    calls.clear()
    again = study.run(options(folder, tmp_path / "out", "--rows", *rows, *found), model, tokenizer)
    assert calls == []
    assert again.data["results"] == results.data["results"]
    for row, other in (("head", "--found"), ("ladder", "--ladder")):
        path = str(folder / "two.json")
        given = ("--rows", row, other, f"head={path}" if row == "head" else path)
        with pytest.raises(ValueError, match=f"has the row '{row}' of others than are given now"):
            study.run(options(folder, tmp_path / "out", *given), model, tokenizer)
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    (tmp_path / "out.json").rename(tmp_path / "table_sets_16x.json")
    shown = {line.split(" | ")[0].strip("| `"): line for line in study_tables.table_sets(16)}
    assert shown.keys() >= {"head", "ladder", "yarn"}
    for name in ("head", "yarn"):
        for part in (data, data["parts"][study.OTHER_KINDS]):
            halves = [one["second_half_perplexity"] for one in part["results"]["perplexity"][name].values()]
            assert measurements.perplexity(math.prod(halves) ** (1 / 3)) in shown[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("--rows", "best"),
            r"--rows must be of fixed, truncated, shipped, evolved, layer_search, ladder, got \['best'\]",
        ),
        (("--found", "evolved=head.json"), r"--found must have other names than fixed, .*, got \['evolved'\]"),
        (("--found", "truncated=head.json"), r"--found must have other names than fixed, .*, got \['truncated'\]"),
        (("--rows", "ladder"), "--ladder must name the sets of the row ladder, got none"),
    ],
)
def test_bad_rows_are_named(folder: Path, tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    model, tokenizer = model_loading.load(folder / "model", device="cpu")
    with pytest.raises(ValueError, match=message):
        study.run(options(folder, tmp_path / "out", *given), model, tokenizer)
