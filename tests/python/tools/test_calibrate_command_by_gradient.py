"""``mrrope calibrate --per layer|head``: runs on tiny models, reports, and errors."""

import json
import re
from pathlib import Path

import pytest
import torch
from byte_llama import byte_tokenizer, random_words, save_byte_llama
from command_line import as_arguments
from learnable_tables import random_set, table
from transformers import (
    LlamaForCausalLM,
)
from two_ranks import run_on_two_ranks

import mrrope
from mrrope.calibration.learnable_tables import SHARINGS
from mrrope.calibration.report import OTHER_KINDS
from mrrope.cli import main
from mrrope.tables.lookup import load_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradient")
    save_byte_llama(folder / "model", 32, layers=2, heads=4, num_key_value_heads=2, initializer_range=0.5)
    (folder / "text.txt").write_text("\0".join(random_words(30, seed) for seed in range(6)))
    (folder / "few.txt").write_text("\0".join(random_words(30, seed) for seed in (10, 11)))
    (folder / "other.txt").write_text("\0".join(random_words(24, seed) for seed in (7, 8)))
    table().save(folder / "yarn.json")
    random_set(3).save(folder / "set.json")
    random_set(3, query_heads=4).save(folder / "factors.json")
    return folder


def arguments(folder: Path, output: Path, *options: str, **replaced: str) -> list[str]:
    given = {
        "--text": str(folder / "text.txt"),
        "--held-out": str(folder / "other.txt"),
        "--device": "cpu",
        "--scale": "4",
        "--budget": "0.05",
        "--output": str(output),
        **replaced,
    }
    return ["calibrate", str(folder / "model"), *options, *as_arguments({k: v for k, v in given.items() if v})]


@pytest.mark.parametrize("per", [*SHARINGS, None])
def test_the_command_finds_writes_and_reports(folder: Path, tmp_path: Path, per: str | None, capsys) -> None:
    options = {"--per": per, "--other-text": str(folder / "text.txt"), "--start": str(folder / "yarn.json")}
    options["--by"] = None if per in ("layer", "head") else "gradient"
    stem = tmp_path / "out"
    assert main(arguments(folder, stem, **options)) == 0
    printed = capsys.readouterr().out
    assert "held-out  other kinds" in printed
    assert re.search(r"^search by gradient: \d+ steps? in \d+ s$", printed, re.MULTILINE)
    data = json.loads(stem.with_suffix(".json").read_text())
    assert data["complete"]
    assert (data["by"], data["per"]) == ("gradient", per or "model")
    found = data["calibration"]
    assert found["steps"] == len(found["curve"]) > 0
    assert found["evaluations"][0]["step"] == 0
    best = min(found["evaluations"], key=lambda one: one["loss"])
    assert found["chosen"] == ("given" if best["step"] == 0 else f"gradient per {per or 'model'}")
    assert found["seconds"] < 60
    tables = load_tables(stem.with_suffix(".table.json"))
    assert isinstance(tables, mrrope.TableSet if per in ("layer", "head") else mrrope.FrequencyTable)
    assert tables.query_heads == (4 if per == "head" else None)
    assert ("query_factors" in data) == ("query_factors" in found) == (per == "head")
    if per == "head":
        factors = [factor for one in tables for factor in one.query_factors]
        shown = found["query_factors"]
        assert (shown["lowest"], shown["highest"]) == (min(factors), max(factors))
        assert min(factors) <= shown["geometric_mean"] <= max(factors)
        range_shown = rf"{min(factors):.3f} to {max(factors):.3f}, geometric mean \d\.\d{{3}}"
        line = rf"^factors of query heads: {range_shown}, of 2 layers with 4 each$"
        assert re.search(line, printed, re.MULTILINE)
    else:
        assert "factors of query heads" not in printed
    assert set(found["held_out_geometric_means"]) == set(found["other_kinds_geometric_means"])
    assert list(data["results"]["perplexity"])[-2:] == ["truncated", "calibrated"]
    assert list(data["parts"][OTHER_KINDS]["results"]["perplexity"])[-2:] == ["truncated", "calibrated"]
    assert "against truncated" in printed
    # The figures are those of the tables.
    model = mrrope.patch(byte_llama_of(folder), tables)
    tokens = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 7)).input_ids][:128]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    losses = -logits.log_softmax(-1)[torch.arange(127), tokens[1:]]
    row = data["results"]["perplexity"]["calibrated"]["128"]["documents"][0]
    assert row["second_half_loss"] == pytest.approx(losses[63:].mean().item(), rel=1e-4)
    # A finished run reads nothing again.
    before = stem.with_suffix(".journal").read_bytes()
    assert main(arguments(folder, stem, **options)) == 0
    assert stem.with_suffix(".journal").read_bytes() == before


def byte_llama_of(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "model").eval()


def test_without_a_start_the_best_fixed_method_is_it(folder: Path, tmp_path: Path) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head"})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["calibration"]["started_from"] in data["results"]["perplexity"]


def test_the_search_goes_on_from_a_set(folder: Path, tmp_path: Path) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head", "--start": str(folder / "set.json")})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["start"] == str(folder / "set.json")


def calibration_of(stem: Path) -> tuple[mrrope.TableSet, dict]:
    return load_tables(stem.with_suffix(".table.json")), json.loads(stem.with_suffix(".json").read_text())


def test_query_factors_can_be_left_out_and_started_from(folder: Path, tmp_path: Path, capsys) -> None:
    """As a search was that knew none; and one with factors goes on from those of a set."""
    options = {"--per": "head", "--start": str(folder / "yarn.json")}
    assert main(arguments(folder, tmp_path / "without", "--no-query-factors", **options)) == 0
    tables, data = calibration_of(tmp_path / "without")
    assert tables.query_heads is None
    assert "query_factors" not in {*data, *data["calibration"]}
    assert main(arguments(folder, tmp_path / "without", **options)) == 2
    assert "is of a run with another query_factors" in capsys.readouterr().err

    # A few steps move a factor by little: in 3 s, a core that is idle takes enough to move one by a fifth.
    options |= {"--start": str(folder / "factors.json"), "--budget": "0.01"}
    assert main(arguments(folder, tmp_path / "with", "--query-factors", **options)) == 0
    tables, data = calibration_of(tmp_path / "with")
    assert data["query_factors"] is True
    start = [one.query_factors for one in mrrope.TableSet.load(folder / "factors.json")]
    for one, given in zip(tables, start, strict=True):
        assert one.query_factors == pytest.approx(given, rel=0.2)
    assert main(arguments(folder, tmp_path / "third", "--no-query-factors", **options)) == 2
    assert "start must have no query factors for a search without them, got TableSet" in capsys.readouterr().err


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_model_that_takes_no_query_factors_is_told(folder: Path, tmp_path: Path, is_asked_for, monkeypatch, capsys):
    """By the option's name where it is given; else the search goes on without them."""
    reason = "its attention takes queries and keys alike, one by one"
    monkeypatch.setattr("mrrope.calibration.command.why_no_query_factors", lambda *_: reason)
    given = ["--query-factors"] if is_asked_for else []
    options = {"--per": "head", "--start": str(folder / "yarn.json")}
    assert main(arguments(folder, tmp_path / "out", *given, **options)) == (2 if is_asked_for else 0)
    printed = capsys.readouterr().err
    if is_asked_for:
        assert f"--query-factors must be left out for LlamaForCausalLM: {reason}" in printed
    else:
        assert f"mrrope calibrate: no factors of query heads are searched: {reason}" in printed
        assert calibration_of(tmp_path / "out")[0].query_heads is None


@pytest.mark.parametrize(
    ("given", "replaced", "message"),
    [
        (["--query-factors"], {}, "--query-factors goes with --per head, got --per model"),
        (["--query-factors"], {"--per": "layer"}, "--query-factors goes with --per head, got --per layer"),
        (["--no-query-factors"], {"--by": "gradient"}, "--no-query-factors goes with --per head, got --per model"),
    ],
)
def test_query_factors_go_with_tables_per_head(
    folder: Path, tmp_path: Path, given: list[str], replaced: dict[str, str], message: str, capsys
) -> None:
    assert main(arguments(folder, tmp_path / "out", *given, **replaced)) == 2
    assert f"mrrope calibrate: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--per": "token"}, "--per must be model, layer or head, got 'token'"),
        ({"--by": "luck"}, "--by must be search or gradient, got 'luck'"),
        (
            {"--per": "layer", "--by": "search"},
            "--by must be gradient with --per layer, got search, which finds one table for the model",
        ),
        ({"--per": "head", "--sweep": "3"}, "--sweep goes with --by search, got 3"),
        ({"--start": "yarn"}, "--start goes with --by gradient, got yarn"),
        ({"--by": "gradient", "--start": "magic"}, "--start must be one of rope, .*, got 'magic'"),
        ({"--by": "gradient", "--start": "missing.json"}, ".*missing.json"),
        ({"--by": "gradient", "--start": "set.json"}, "start must be one table per model for a search per model"),
        ({"--by": "gradient", "--start": "yarn.json", "--scale": "2"}, "--start must be tables of scale 2, got 4"),
        ({"--by": "gradient", "--budget": "1e-9"}, "--budget must be above 1e-09 minutes"),
        ({"--by": "gradient", "--other-text": "missing.txt"}, "text must be a file or a folder, and there is no"),
        ({"--learning-rate": "0.1"}, "--learning-rate goes with --by gradient, got 0.1"),
        ({"--by": "gradient", "--learning-rate": "0"}, "--learning-rate must be a positive number, got 0"),
        ({"--by": "gradient", "--documents": "1"}, "--documents must be at least 2"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments(folder, tmp_path / "out", **replaced)) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope calibrate: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


def test_a_run_per_head_does_not_take_up_one_per_layer(folder: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "layer"})) == 0
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head"})) == 2
    assert "is of a run with another per" in capsys.readouterr().err


ON_TWO_RANKS = """
import os, sys
from pathlib import Path
import torch
from mrrope.cli import main

folder = Path(sys.argv[1])
code = main((folder / "arguments").read_text().split("\\n"))
torch.save({"code": code}, folder / f"rank{os.environ['RANK']}")
"""


def test_the_command_with_torchrun(folder: Path, tmp_path: Path) -> None:
    options = {"--per": "head", "--other-text": str(folder / "text.txt")}
    options |= {"--start": str(folder / "yarn.json"), "--retrieval": "0"}
    given = arguments(folder, tmp_path / "out", "--text", str(folder / "few.txt"), **options)
    (tmp_path / "arguments").write_text("\n".join(given))
    result = run_on_two_ranks(ON_TWO_RANKS, tmp_path)
    assert [result(f"rank{rank}")["code"] for rank in range(2)] == [0, 0]
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["processes"] == 2
    assert isinstance(load_tables(tmp_path / "out.table.json"), mrrope.TableSet)
    # Each step reads a document per process, each decision all documents.
    lines = [json.loads(line) for line in (tmp_path / "out.journal").read_text().splitlines()[1:]]
    assert all(len(line["documents"]) == 1 for line in lines if line["key"].startswith("step"))
    # Two documents of one text and one of the other decide, dealt to two processes; the texts weigh the same.
    names = [name for name, _ in data["documents"]["decide"]]
    assert names == ["few.txt#2", "text.txt#2", "text.txt#4"]
    model = mrrope.patch(byte_llama_of(folder), table())
    losses = []
    for seed in (11, 1, 3):
        tokens = [0, *byte_tokenizer(adds_bos=False)(random_words(30, seed)).input_ids][:128]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].double()
        read = -logits.log_softmax(-1)[torch.arange(127), tokens[1:]]
        losses.append(sum(read[length // 2 - 1 : length - 1].mean().item() for length in (32, 64, 128)) / 3)
    expected = (losses[0] + (losses[1] + losses[2]) / 2) / 2
    assert data["calibration"]["evaluations"][0]["loss"] == pytest.approx(expected, rel=1e-5)
