"""``mrrope calibrate``: runs on tiny models, interrupted and resumed ones, reports, and errors."""

import contextlib
import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_llama import byte_tokenizer, random_words
from calibration_runs import calibration_folder
from command_line import MRROPE, as_arguments
from scripted_models import OutOfMemory
from tiny_models import tiny_model, tokens
from transformers import LlamaForCausalLM

import mrrope
from mrrope.calibration import report
from mrrope.calibration.calibrate import FIXED_METHODS
from mrrope.calibration.command import row_of_truncation, trained_with
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Readings
from mrrope.cli import main
from mrrope.evaluation import model_loading
from mrrope.evaluation.documents import Document
from mrrope.evaluation.perplexity import next_token_losses
from mrrope.evaluation.truncated import TruncatedReader
from mrrope.hf.patch import is_patched

FLOAT32_EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_folder(tmp_path_factory.mktemp("calibration"))


def arguments(folder: Path, output: Path, *options: str, **replaced: str) -> list[str]:
    given = {"--text": str(folder / "text.txt"), "--device": "cpu", "--scale": "4", "--output": str(output), **replaced}
    model = given.pop("model", str(folder / "model"))
    return ["calibrate", model, *options, *as_arguments(given)]


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Path:
    """Return the output of an uninterrupted run with a sweep."""
    assert main(arguments(folder, folder / "whole", "--sweep", "3", **{"--held-out": str(folder / "other.txt")})) == 0
    return folder / "whole"


def readings_in(journal: Path) -> list[str]:
    lines = journal.read_bytes().splitlines(keepends=True)
    return [json.loads(line)["key"] for line in lines[1:] if line.endswith(b"\n")]


def test_the_command_finds_writes_and_reports(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    data = json.loads(unbroken.with_suffix(".json").read_text())
    assert data["complete"]
    assert data["lengths"] == [32, 64, 128]
    table = mrrope.FrequencyTable.load(unbroken.with_suffix(".table.json"))
    found = data["calibration"]
    assert table == mrrope.FrequencyTable.from_dict(found["finalists"][found["chosen"]]["table"])
    assert table.scale == 4.0
    assert found["finalists"][found["chosen"]]["decide_loss"] == min(
        one["decide_loss"] for one in found["finalists"].values()
    )
    keys = readings_in(unbroken.with_suffix(".journal"))
    assert len(keys) == len(set(keys))
    assert unbroken.with_suffix(".perplexity.png").read_bytes().startswith(b"\x89PNG")
    # The held-out perplexities equal those of mrrope eval.
    held_out = {"--text": str(folder / "other.txt"), "--lengths": "32,64,128", "--scale": "4", "--device": "cpu"}
    methods = {"--methods": f"{','.join(FIXED_METHODS)},truncated,{unbroken.with_suffix('.table.json')}"}
    options = {**held_out, **methods, "--output": str(tmp_path / "eval")}
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 0
    expected = json.loads((tmp_path / "eval.json").read_text())["results"]["perplexity"]
    expected[report.CALIBRATED] = expected.pop(str(unbroken.with_suffix(".table.json")))
    assert data["results"]["perplexity"] == expected
    halves = [expected["yarn"][length]["second_half_perplexity"] for length in ("32", "64", "128")]
    assert found["held_out_geometric_means"]["yarn"] == pytest.approx(math.prod(halves) ** (1 / 3))


def test_the_sweep_is_of_the_bounds(folder: Path, unbroken: Path) -> None:
    sweep = json.loads(unbroken.with_suffix(".json").read_text())["sweep"]
    assert unbroken.with_suffix(".sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(sweep["perplexity"]) == len(sweep["d_l"])
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    read = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 7)).input_ids][:128]
    for i, low in enumerate(sweep["d_l"]):
        for j, high in enumerate(sweep["d_h"]):
            if low >= high:
                assert sweep["perplexity"][i][j] is None
                continue
            factor = 1 + sweep["temperature"] * math.log(4)
            options = {"bounds": (low, high), "power": sweep["power"], "attention_factor": factor}
            with mrrope.patched(model, "mrrope_pow", scale=4.0, **options), torch.no_grad():
                logits = model(torch.tensor([read])).logits[0, :-1].double()
            losses = -logits.log_softmax(-1)[torch.arange(127), read[1:]]
            halves = [losses[length // 2 - 1 : length - 1].mean().item() for length in (32, 64, 128)]
            # Losses of about 10 in float32, summed in another order.
            assert math.log(sweep["perplexity"][i][j]) == pytest.approx(sum(halves) / 3, rel=64 * FLOAT32_EPS)


@pytest.fixture
def sigint() -> Iterator[None]:
    """Let processes get SIGINT: a shell that runs the tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT], ids=lambda kill: kill.name)
def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_read_twice(
    folder: Path, unbroken: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    options = arguments(folder, tmp_path / "out", **{"--held-out": str(folder / "other.txt")})
    path = tmp_path / "out.journal"
    whole = readings_in(unbroken.with_suffix(".journal"))
    stderr = (tmp_path / "stderr").open("w+")
    process = subprocess.Popen([*MRROPE, *options], stderr=stderr, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < len(whole) / 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(kill)
    if kill is signal.SIGKILL:
        assert process.wait() == -signal.SIGKILL
    else:
        assert process.wait() == 130
        stderr.seek(0)
        printed = stderr.read()
        assert printed.endswith(f"mrrope calibrate: interrupted; the same command resumes from {path}\n")
        assert "Traceback" not in printed
        assert json.loads((tmp_path / "out.json").read_text())["stopped"] == "interrupted"
    assert len(readings_in(path)) < len(whole)
    assert (tmp_path / "out.table.json").exists()
    assert main(options) == 0
    # Every reading exactly once, in the same order.
    assert readings_in(path) == whole[: len(readings_in(path))]
    # The uninterrupted run ends with 9 readings of the sweep.
    assert len(whole) - 9 <= len(readings_in(path)) <= len(whole)
    found, expected = (
        mrrope.FrequencyTable.load(stem.with_suffix(".table.json")) for stem in (tmp_path / "out", unbroken)
    )
    assert found == expected


def test_a_run_whose_budget_was_spent_goes_on_with_a_larger_one(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    options = {"--held-out": str(folder / "other.txt")}
    assert main(arguments(folder, tmp_path / "out", **options, **{"--budget": "1e-9"})) == 2
    assert len(readings_in(tmp_path / "out.journal")) == 1
    assert main(arguments(folder, tmp_path / "out", **options)) == 0
    keys = readings_in(tmp_path / "out.journal")
    assert keys == readings_in(unbroken.with_suffix(".journal"))[: len(keys)]


@pytest.mark.slow
def test_short_documents_will_do_where_they_are_joined(folder: Path, tmp_path: Path) -> None:
    options = {"--scale": "8", "--documents": "2", "--held-out-documents": "1", "--lengths": "64,256"}
    assert main(arguments(folder, tmp_path / "out", **options)) == 2
    assert main(arguments(folder, tmp_path / "out", "--join", **options)) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    names = {part: [name for name, _ in found] for part, found in data["documents"].items()}
    assert names["search"] == ["text.txt#1 + text.txt#2"]
    assert names["held_out"] == ["text.txt#5 + text.txt#6"]


def test_the_command_on_a_gpu(folder: Path, tmp_path: Path, cuda: str) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--device": cuda})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["dtype"] == "bfloat16"
    assert mrrope.FrequencyTable.load(tmp_path / "out.table.json").rotary_dim == 16


def test_a_finished_run_reads_nothing_again(folder: Path, unbroken: Path, capsys) -> None:
    before = unbroken.with_suffix(".journal").read_bytes()
    options = ("--json", "--sweep", "3")
    assert main(arguments(folder, unbroken, *options, **{"--held-out": str(folder / "other.txt")})) == 0
    assert unbroken.with_suffix(".journal").read_bytes() == before
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(unbroken.with_suffix(".json").read_text())
    assert "resuming with" in printed.err


def test_the_found_table_goes_to_patch_and_export(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    table = str(unbroken.with_suffix(".table.json"))
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert is_patched(mrrope.patch(model, table))
    written = str(tmp_path / "config.json")
    exported = ["export", str(folder / "model"), "--table", table, "--engine", "vllm", "--output", written]
    assert main(exported) == 0
    factors = json.loads(Path(written).read_text())["rope_parameters"]["long_factor"]
    assert factors == pytest.approx(mrrope.FrequencyTable.load(table).cumulative_scale.tolist())


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--scale": "1"}, "--scale must be a number above 1, got 1"),
        ({"--scale": "nan"}, "--scale must be a number above 1, got nan"),
        ({"--budget": "0"}, "--budget must be a positive number of minutes, got 0"),
        ({"--budget": "1e-9"}, "--budget must be above 1e-09 minutes, which did not do for comparing fixed methods"),
        ({"--retrieval": "-1"}, "--retrieval must be a number, 0 or more, got -1"),
        ({"--documents": "1"}, "--documents must be at least 2, one to search and one to decide with, got 1"),
        ({"--held-out-documents": "0"}, "--held-out-documents must be a positive number, got 0"),
        ({"--sweep": "0"}, "--sweep must be a positive number, got 0"),
        ({"--original-max-position": "0"}, "--original-max-position must be 1 or more, got 0"),
        ({"--lengths": "many", "model": "missing.gguf"}, "--lengths must be numbers of tokens, .* got 'many'"),
        ({"--text": "two.txt"}, "text must hold at least 3 documents of 128 tokens, .* has 2; --join puts shorter"),
        ({"--scale": "16"}, "text must hold a document of at least 512 tokens, and the longest of .* 144"),
        ({"--text": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        ({"--held-out": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        (
            {"--text": "missing.txt", "model": "missing.gguf"},
            "text must be a file",
        ),  # checked before the model is loaded
        ({"--output": "no/such/folder/out"}, "--output must be in a folder that exists, and there is no no/such"),
        (
            {"--output": "/proc/self/out", "model": "missing.gguf"},
            "--output must be where files can be written, got /proc/self/out: ",
        ),
        ({"model": "missing.gguf"}, "model must be a file that exists, and there is no missing.gguf"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    (tmp_path / "two.txt").write_text("\0".join(random_words(24, seed) for seed in range(2)))
    monkeypatch.chdir(tmp_path)
    assert main(arguments(folder, tmp_path / "out", **replaced)) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope calibrate: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


def test_an_output_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out.journal").mkdir()
    assert main(arguments(folder, tmp_path / "out")) == 2
    assert re.search(r"^mrrope calibrate: .*out\.journal", capsys.readouterr().err, re.MULTILINE)


def test_only_files_of_the_run_are_said_to_be_written(folder: Path, unbroken: Path, capsys) -> None:
    foreign = unbroken.with_suffix(".notes.txt")
    foreign.write_text("mine")
    options = {"--held-out": str(folder / "other.txt")}
    assert main(arguments(folder, unbroken, "--sweep", "3", **options)) == 0
    printed = capsys.readouterr()
    foreign.unlink()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("written:"))
    files = [Path(name) for name in line.split()[1:]]
    assert sorted(files) == sorted(unbroken.parent.glob("whole.*"))
    # Seven fixed methods, truncation and the calibrated table on two documents.
    assert "the report is outside --budget: 18 readings" in printed.err


def test_a_table_for_another_trained_length_is_used_with_it(folder: Path, tmp_path: Path, capsys) -> None:
    stem, table = tmp_path / "out", str(tmp_path / "out.table.json")
    options = {"--original-max-position": "16", "--lengths": "64", "--budget": "0.01"}
    assert main(arguments(folder, stem, "--join", **options)) == 0
    printed = capsys.readouterr().out
    assert f"mrrope.patch(model, {table!r}, original_max_position=16)" in printed
    options = {"--text": str(folder / "text.txt"), "--lengths": "64", "--device": "cpu", "--documents": "1"}
    options |= {"--methods": f"unpatched,pi,{table}", "--scale": "4", "--output": str(tmp_path / "eval")}
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 2
    assert "original_max_position=16" in capsys.readouterr().err
    assert main(["eval", str(folder / "model"), *as_arguments(options), "--original-max-position", "16"]) == 0
    data = json.loads((tmp_path / "eval.json").read_text())
    assert data["original_max_position"] == 16
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    mrrope.patch(model, table, original_max_position=16)
    tokens = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 0)).input_ids][:64]
    with torch.no_grad():
        losses = -model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)[range(63), tokens[1:]]
    found = data["results"]["perplexity"][table]["64"]["documents"][0]["loss"]
    assert found == pytest.approx(losses.mean().item(), rel=64 * FLOAT32_EPS)


def test_a_table_that_is_worse_than_a_fixed_method_is_said_to_be() -> None:
    def summary(**means: float) -> list[str]:
        return report.summary({"calibration": {"chosen": "yarn", "held_out_geometric_means": means}}).splitlines()[-2:]

    better = summary(rope=5.0, yarn=4.0, calibrated=3.0)
    assert better == ["", "chosen: yarn, -25.0% against yarn"]
    worse = summary(rope=5.0, yarn=6.0, calibrated=5.7)
    assert worse[0] == "chosen: yarn, +14.0% against rope"
    assert worse[1].startswith("this is worse than rope: leave the model unpatched")
    assert "this is worse than yarn: patch with yarn" in summary(rope=5.0, yarn=4.0, calibrated=4.5)[1]


def test_truncation_that_is_better_is_said_to_be() -> None:
    def figures(*perplexities: float) -> dict[str, dict[str, float]]:
        return {
            length: {"second_half_perplexity": one}
            for length, one in zip(("32", "64", "128"), perplexities, strict=True)
        }

    def part(truncated: tuple[float, ...], calibrated: tuple[float, ...]) -> dict[str, Any]:
        return {"results": {"perplexity": {"truncated": figures(*truncated), "calibrated": figures(*calibrated)}}}

    def summary(held_out: dict[str, Any], others: dict[str, Any]) -> list[str]:
        def means(of: dict[str, Any]) -> dict[str, float]:
            by_method = of["results"]["perplexity"].items()
            return {"rope": 9.0} | {
                name: math.prod(one["second_half_perplexity"] for one in figures.values()) ** (1 / 3)
                for name, figures in by_method
            }

        found = {"chosen": "yarn", "held_out_geometric_means": means(held_out)}
        found["other_kinds_geometric_means"] = means(others)
        parts = {report.OTHER_KINDS: others}
        return report.summary({**held_out, "calibration": found, "parts": parts}).partition("chosen: ")[2].splitlines()

    better = part((3.0, 3.0, 3.0), (3.0, 2.0, 2.5))
    at_one_length = part((3.0, 3.0, 3.0), (3.0, 2.0, 3.5))
    worse = part((3.0, 3.0, 3.0), (3.0, 3.0, 4.0))
    assert len(summary(better, better)) == 1
    chosen, *advice = summary(at_one_length, worse)
    assert chosen == (
        "yarn, -69.3% against rope and -8.0% against truncated, "
        "-63.3% against rope and +10.1% against truncated on texts of other kinds"
    )
    assert advice == [
        "truncated is better than the calibrated tables on held-out documents at some lengths (at 128 tokens 3.000 "
        "against 3.500)",
        "truncated is better than the calibrated tables on texts of other kinds: 3.000 against 3.302 (at 128 tokens "
        "3.000 against 4.000). What reads the last native length of tokens with the unpatched model predicts these "
        "texts better",
    ]


@pytest.mark.parametrize("is_plain", [False, True])
def test_truncation_is_of_the_stock_model_or_of_plain_rope(is_plain: bool, tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = model.config.to_dict() | {"max_position_embeddings": 64}
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    extended = type(model)(type(model.config)(**config)).eval()
    extended.load_state_dict(model.state_dict())
    text = Document("a", tokens(1, 100)[0].tolist())
    trained = trained_with(extended, 16 if is_plain else None)
    rows = row_of_truncation(trained, [16, 100], 1, is_plain=is_plain)
    window = 16 if is_plain else 64
    assert (rows["truncated"].native_length, rows["truncated"].opening) == (window, 1)
    assert row_of_truncation(trained, [window], 1, is_plain=is_plain) == {}
    with contextlib.closing(Journal(tmp_path / "journal", {})) as journal:
        readings = Readings(extended, [100], journal, chunk=30)
        (found,) = readings.read(rows["truncated"], text, 100)
    expected_model = model if is_plain else extended
    reader = TruncatedReader(expected_model, native_length=window, opening=1)
    losses = torch.cat(list(next_token_losses(reader, text.tokens)))
    # Losses of about 5 in float32, summed in another order.
    assert found.whole == pytest.approx(losses.mean().item(), rel=64 * FLOAT32_EPS)


def test_another_run_under_the_same_name_is_refused(folder: Path, unbroken: Path, capsys) -> None:
    before = unbroken.with_suffix(".json").read_bytes()
    assert main(arguments(folder, unbroken, **{"--scale": "2"})) == 2
    message = (
        r"^mrrope calibrate: --output must be that of the same run or a new one, and .* another documents, .* scale"
    )
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)
    assert unbroken.with_suffix(".json").read_bytes() == before


def test_the_journal_of_other_weights_is_refused(folder: Path, tmp_path: Path, capsys) -> None:
    options = {"model": str(tmp_path / "model"), "--budget": "1e-9"}
    shutil.copytree(folder / "model", tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for _ in range(2):  # with the same weights it resumes
        assert main(arguments(folder, tmp_path / "out", **options)) == 2
        assert "--budget must be above" in capsys.readouterr().err
    model.model.layers[0].self_attn.o_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path / "model")
    assert main(arguments(folder, tmp_path / "out", **options)) == 2
    assert "is of a run with another weights" in capsys.readouterr().err


def test_the_journal_of_plain_rope_is_not_that_of_the_models_own(folder: Path, tmp_path: Path, capsys) -> None:
    """Of one length: a model whose configuration extends it, and plain RoPE in its place."""
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    options = {"model": str(tmp_path / "model"), "--budget": "1e-9"}
    assert main(arguments(folder, tmp_path / "out", **options)) == 2
    assert "--budget must be above" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "out", **options, **{"--original-max-position": "32"})) == 2
    assert "is of a run with another plain_rope" in capsys.readouterr().err


def test_what_was_read_before_the_memory_was_full_is_kept(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    fails = OutOfMemory(room=100)
    read = model.forward
    model.forward = lambda **given: (fails if int(given["position_ids"].max()) >= 100 else read)(**given)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    assert main(arguments(folder, tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert "mrrope calibrate: out of memory; a smaller --chunk than 4096 or shorter --lengths need less" in printed
    assert f"What was read is in {tmp_path / 'out.journal'}" in printed
    assert len(readings_in(tmp_path / "out.journal")) == len(FIXED_METHODS)  # 64 tokens of one document
    data = json.loads((tmp_path / "out.json").read_text())
    assert not data["complete"]
    assert data["stopped"].startswith("out of memory")
