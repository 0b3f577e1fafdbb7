"""The scripts in studies/: compared tables, evolutionary search, resumed runs, and small trained models."""

import json
import math
import random
import re
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import compared_tables
import evolutionary_search
import measurements
import method_study
import pytest
import small_model_study
import small_model_training
import study_tables
import torch
from byte_llama import byte_llama, byte_tokenizer, random_words, save_byte_llama
from command_line import as_arguments
from planted_tables import SMOLLM2, distance, sigmoid_table
from transformers import LlamaForCausalLM

import mrrope
from mrrope.calibration.calibrate import FIXED_METHODS
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Rung
from mrrope.calibration.search import BudgetSpentError
from mrrope.cli import main
from mrrope.evaluation import model_loading
from mrrope.evaluation.documents import Document
from mrrope.evaluation.results import Results
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.reporting import plotting
from mrrope.tables.lookup import NativeRope

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_transformers")]

# Compared tables


@pytest.mark.parametrize(("rotary_dim", "scale"), [(64, 16.0), (128, 2.0), (32, 5.0)])
def test_su_is_the_formula(rotary_dim: int, scale: float) -> None:
    table = compared_tables.tables_to_compare(NativeRope(rotary_dim, 1e5, 8192), scale)["su"]
    pairs = rotary_dim // 2
    a = math.log(scale) / pairs**0.625
    expected = [math.exp(a * m**0.625) for m in range(1, pairs + 1)]
    # float64 powers and logarithms, each within about one rounding.
    torch.testing.assert_close(
        table.cumulative_scale, torch.tensor(expected, dtype=torch.float64), rtol=16 * 2**-52, atol=0
    )
    inv_freq = [1e5 ** (-i / pairs) / s for i, s in enumerate(expected)]
    torch.testing.assert_close(table.inv_freq, torch.tensor(inv_freq, dtype=torch.float64), rtol=64 * 2**-52, atol=0)
    assert table.attention_factor == 1.0


def test_contenders_are_all_different_and_of_one_scale() -> None:
    tables = compared_tables.tables_to_compare(NativeRope(64, 1e5, 8192), 16.0)
    assert {*FIXED_METHODS, "mrrope_pow 0.5", "mrrope_pow 2", "su"} == set(tables)
    assert {table.scale for table in tables.values()} == {16.0}
    assert len({tuple(table.inv_freq.tolist()) for table in tables.values()}) == len(tables)
    assert tables["mrrope_pow 2"] == mrrope.frequency_table("mrrope_pow", power=2.0, **SMOLLM2)


# Evolutionary search


def genes_and_seeds() -> tuple[evolutionary_search.TableGenes, list]:
    tables = compared_tables.tables_to_compare(NativeRope(64, 1e5, 8192), 16.0)
    genes = evolutionary_search.TableGenes(tables["rope"])
    return genes, [genes.point(table) for table in tables.values()]


def test_genes_keep_a_table_and_its_order() -> None:
    genes, seeds = genes_and_seeds()
    for table, point in zip(
        compared_tables.tables_to_compare(NativeRope(64, 1e5, 8192), 16.0).values(), seeds, strict=True
    ):
        again = genes.table(point)
        torch.testing.assert_close(again.cumulative_scale, table.cumulative_scale, rtol=1e-8, atol=0)
        assert again.attention_factor == pytest.approx(table.attention_factor, rel=1e-8)
    children = genes.children(seeds, random.Random(0))
    assert len(set(children)) == evolutionary_search.CHILDREN
    assert not set(children) & set(seeds)
    for child in children:
        assert all(low <= high for low, high in pairwise(child[:-1]))
        assert child[0] >= 0
        assert child[-2] <= math.log(32) + 1e-9


@pytest.mark.parametrize("rungs", [1, 3])
def test_evolution_nears_a_planted_table_within_its_budget(rungs: int) -> None:
    genes, seeds = genes_and_seeds()
    planted, budget = sigmoid_table(), 1500
    asked: dict = {}

    def loss(point, rung) -> float:
        if (point, rung) not in asked:
            if len(asked) == budget:
                raise BudgetSpentError
            asked[point, rung] = distance(genes.table(point), planted) + (rungs - 1 - rung) * 1e-3 * hash(point) % 1e-3
        return asked[point, rung]

    best_losses: list[float] = []
    found = evolutionary_search.evolve(genes, seeds, loss, rungs, improved=lambda _, best: best_losses.append(best))
    assert len(asked) == budget
    # The result is the best point of the last rung, and the best loss never rises.
    assert best_losses == sorted(best_losses, reverse=True)
    assert loss(found, rungs - 1) == min(value for (_, rung), value in asked.items() if rung == rungs - 1)
    best_seed = min(distance(genes.table(seed), planted) for seed in seeds)
    assert distance(genes.table(found), planted) < best_seed / 3


def test_evolution_without_enough_for_the_first_generation_says_so() -> None:
    def spent(*_: object) -> float:
        raise BudgetSpentError

    with pytest.raises(BudgetSpentError):
        evolutionary_search.evolve(*genes_and_seeds(), spent, 3)


def test_rationed_readings_are_no_more_than_the_ration(tmp_path: Path) -> None:
    document = Document("one", list(range(128)))
    readings = evolutionary_search.TokenLimitedReadings(
        byte_llama(64, initializer_range=0.5),
        [64, 128],
        Journal(tmp_path / "journal", {}),
        chunk=128,
        max_tokens=64 + 128 + 100,
    )
    tables = [
        mrrope.frequency_table("mrrope_uni", rotary_dim=32, base=1e4, original_max_position=64, scale=scale)
        for scale in (2.0, 3.0, 4.0)
    ]
    readings.loss(tables[0], Rung([document], 64))
    readings.loss(tables[1], Rung([document], 128))
    readings.loss(tables[1], Rung([document], 64))  # known: costs nothing
    with pytest.raises(BudgetSpentError):
        readings.loss(tables[2], Rung([document], 128))
    readings.loss(tables[2], Rung([document], 64))
    assert (readings.tokens, readings.count) == (256, 3)
    readings.journal.close()


# One model at several scales


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model, texts, and its calibration at scale 2."""
    folder = tmp_path_factory.mktemp("study")
    save_byte_llama(folder / "model", 512, initializer_range=0.5)
    (folder / "search.txt").write_text("\0".join(random_words(200, seed) for seed in range(4)))
    (folder / "eval.txt").write_text("\0".join(random_words(200, seed) for seed in (7, 8, 9)))
    options = {
        "--text": "search.txt",
        "--held-out": "eval.txt",
        "--scale": "2",
        "--budget": "0.1",
        "--documents": "4",
        "--held-out-documents": "2",
        "--device": "cpu",
        "--output": "calibration_2x",
    }
    options |= {name: str(folder / options[name]) for name in ("--text", "--held-out", "--output")}
    assert main(["calibrate", str(folder / "model"), *as_arguments(options)]) == 0
    return folder


class TokenCounter:
    """Counts the tokens that a model reads, without generated ones."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, _: object, __: object, options: dict) -> None:
        self.tokens += options["input_ids"].numel() if options["input_ids"].shape[1] > 1 else 0


def run_study(folder: Path, output: Path, *more: str) -> tuple[dict, int]:
    """Return the results of a run and the number of tokens that it read."""
    arguments = [str(folder / "model"), str(folder / "search.txt"), str(folder / "eval.txt"), "--output", str(output)]
    arguments += ["--calibrations", str(folder / "calibration_2x.json"), "--evolve", "2", "--scales", "2"]
    arguments += ["--documents", "2", "--trials", "3", "--other-trials", "1", "--chunk", "4096", *more]
    model, tokenizer = model_loading.load(folder / "model", device="cpu")
    counter = TokenCounter(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = method_study.run(
            method_study.parser().parse_args(arguments), model, method_study.CachingTokenizer(tokenizer)
        )
    assert json.loads(results.path.read_text()) == results.data
    return results.data, counter.tokens


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[dict, Path]:
    """Return the results of a run that was stopped and resumed."""
    output = folder / "study"
    stopped, read = run_study(folder, output, "--minutes", "0")
    assert (stopped["complete"], stopped["stopped"]) == (False, "0 minutes were over")
    # The results of the calibration are included already.
    assert {*FIXED_METHODS} <= set(stopped["parts"]["2"]["results"]["perplexity"])
    assert read == 0
    data, read = run_study(folder, output)
    assert data["complete"]
    assert read > 0
    return data, output


def test_the_study_has_every_task_with_every_method(folder: Path, whole: tuple[dict, Path]) -> None:
    data, output = whole
    methods = {*FIXED_METHODS, "mrrope_pow 0.5", "mrrope_pow 2", "su", "calibrated", "evolved", "truncated"}
    results = data["parts"]["2"]["results"]
    assert set(results) == {"perplexity", *TASKS}
    for task, by_method in results.items():
        assert set(by_method) == methods
        for method, by_length in by_method.items():
            assert sorted(by_length) == ["1024", "512"]
            for figures in by_length.values() if task != "perplexity" else ():
                few = 2 if method in ("rope", "pi") else 3
                assert len(figures["trials"]) == (few if task == "passkey" else 1)
    for picture in ("perplexity", "tasks"):
        assert output.with_name(f"study_2x.{picture}.png").read_bytes().startswith(b"\x89PNG")
    calibration = json.loads((folder / "calibration_2x.json").read_text())["results"]["perplexity"]
    ours = data["parts"]["2"]["results"]["perplexity"]
    assert {method: ours[method] for method in calibration} == calibration


def test_evolution_reads_no_more_than_the_calibration_and_is_no_worse_than_its_seeds(
    folder: Path, whole: tuple[dict, Path]
) -> None:
    found = whole[0]["parts"]["2"]["evolution"]
    lines = (folder / "calibration_2x.journal").read_text().splitlines()[1:]
    count = json.loads((folder / "calibration_2x.json").read_text())["calibration"]["readings"]
    lengths = [int(json.loads(line)["key"].split()[-1]) for line in lines]
    assert found["tokens_allowed"] == sum(lengths[:count])
    assert count < len(lengths)
    assert found["tokens"] <= found["tokens_allowed"] < found["tokens"] + 1024 + 1
    losses = [loss for _, loss in found["history"]]
    assert losses == sorted(losses, reverse=True)
    assert found["search_loss"] <= losses[0]


def test_a_study_that_is_complete_reads_nothing_again(folder: Path, whole: tuple[dict, Path]) -> None:
    data, output = whole
    assert run_study(folder, output) == (data, 0)


def test_as_many_documents_are_read_as_asked_for(folder: Path, tmp_path: Path) -> None:
    """The calibration reported on fewer documents, so its results are not reused."""
    data, _ = run_study(folder, tmp_path / "study", "--documents", "3", "--minutes", "0")
    assert len(data["parts"]["2"]["documents"]) == 3
    assert not data["parts"]["2"]["results"]


def test_evolution_at_a_scale_that_is_not_run_study(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--evolve must be among --scales, \[2.0\], got \[4.0\]"):
        run_study(folder, tmp_path / "study", "--evolve", "4")


def test_long_texts_are_encoded_once() -> None:
    asked: list[str] = []
    plain = byte_tokenizer(adds_bos=True)

    class Watched:
        bos_token_id = 7

        def __call__(self, text: str, **options: bool):
            asked.append(text)
            return plain(text, **options)

    tokenizer = method_study.CachingTokenizer(Watched())
    long, short = "ab" * method_study.LONG_TEXT, "ab"
    for text in (long, short) * 2:
        assert tokenizer(text).input_ids == plain(text).input_ids
        assert tokenizer(text, add_special_tokens=False).input_ids == plain(text).input_ids[1:]
    assert (asked.count(long), asked.count(short)) == (2, 4)
    assert tokenizer.bos_token_id == 7


def test_results_of_something_else_are_not_gone_on_with(folder: Path, whole: tuple[dict, Path]) -> None:
    about = {"weights": whole[0]["weights"], "torch": "other", "model": "other"}
    with pytest.raises(ValueError, match=r"--output must be .*study\.json is of a run with another model, torch$"):
        Results.resumed(whole[1].with_suffix(".json"), about)


def test_rows_of_the_picture_of_table_sets_can_be_told_apart() -> None:
    """Rows without a style would get matplotlib's colours, two of which are near those of fixed methods."""
    rows = measurements.result(study_tables.table_sets_file(16))["results"]["perplexity"]
    styles = [plotting.line(row) for row in rows]
    assert all("color" in style for style in styles), list(rows)
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == len(rows)


def test_tables_show_what_the_study_found(whole: tuple[dict, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "RESULTS", whole[1].parent)
    results = whole[0]["parts"]["2"]["results"]
    text = study_tables.study_perplexity(2)
    assert text[0] == "|  | 0.5K | 1K | geo. mean |"
    cells = {row.split(" | ")[0].strip("| `"): row.strip("| ").split(" | ")[1:] for row in text[2:15]}
    halves = {
        method: [by_length[length]["second_half_perplexity"] for length in ("512", "1024")]
        for method, by_length in results["perplexity"].items()
    }
    assert set(cells) == set(halves)
    for column, values in enumerate(
        [
            {method: one[0] for method, one in halves.items()},
            {method: one[1] for method, one in halves.items()},
            {method: math.sqrt(one[0] * one[1]) for method, one in halves.items()},
        ]
    ):
        for method, value in values.items():
            shown = f"{float(f'{value:.2g}'):.0f}" if value >= 1000 else f"{value:.0f}"  # thousands to two digits
            expected = f"**{shown}**" if value == min(values.values()) else shown
            assert cells[method][column] == expected
    assert text[-1] == "![Perplexity by length at scale 2](../benchmarks/results/study_2x.perplexity.png)"
    text = study_tables.study_tasks(2)
    assert text[0].startswith("|  | passkey 0.5K | passkey 1K | ")
    assert "| prompts | 3 | 3 | 1 | 1 |" in text[-3]
    (calibrated, evolved) = study_tables.study_evolution()[2:]
    assert f"{whole[0]['parts']['2']['evolution']['search_loss']:.4f}" in evolved
    assert calibrated.startswith("| 2 | `calibrated` |")
    assert (
        study_tables.study_perplexity(4)
        == study_tables.study_tasks(4)
        == study_tables.small_training()
        == ["Not measured yet."]
    )


# Small models


def test_keys_are_told_once_and_asked_for_twice() -> None:
    chance = torch.Generator().manual_seed(0)
    text = torch.full((5000,), ord("x"), dtype=torch.uint8)
    recipe = small_model_training.Recipe(1, rows=400, keyed=0.75, repeated=0.0)
    rows = small_model_training.batch(text, 256, recipe, chance)
    pattern = re.compile(
        r"x*\nThe pass key is ([1-9]\d{4})\. Remember it\. \1 is the pass key\.\n"
        r"x*\nWhat is the pass key\? The pass key is \1\.\nx*\nWhat is the pass key\? The pass key is \1\.\n"
    )
    texts = [small_model_training.ByteTokenizer().decode(row) for row in rows.tolist()]
    keys = [match[1] for one in texts[:300] if (match := pattern.fullmatch(one))]
    assert len(keys) == 300
    assert len(set(keys)) > 290
    assert texts[300:] == ["x" * 256] * 100
    told = [one.index("\nThe pass key") for one in texts[:300]]
    room = 256 - len(small_model_training.SENTENCE) - 2 * len(small_model_training.QUESTION)
    # Keys occur at all places, from the first to the last.
    assert (min(told), max(told)) == (0, room)
    with pytest.raises(ValueError, match=r"trained_length must be at least \d+ for keys to be hidden, got 100"):
        small_model_training.batch(text, 100, recipe, chance)


def test_some_rows_repeat_themselves() -> None:
    text = torch.arange(1 << 14).remainder(251).to(torch.uint8)
    recipe = small_model_training.Recipe(1, rows=40, keyed=0.0, repeated=0.5)
    rows = small_model_training.batch(text, 240, recipe, torch.Generator().manual_seed(0)).tolist()
    repeats = [row.index(row[0], 1) if row[0] in row[1:] else None for row in rows]
    assert repeats[:20] == [None] * 20
    for row, after in zip(rows[20:], repeats[20:], strict=True):
        assert 240 // 8 <= after <= 120
        assert row[after:] == row[:-after]
        assert [(byte - row[0]) % 251 for byte in row[:after]] == list(range(after))
    assert len(set(repeats[20:])) > 10


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    recipe = small_model_training.Recipe(10, peak=1e-3, warm_up=0.1)
    assert recipe.learning_rate(0) == 0
    assert recipe.learning_rate(0.05) == pytest.approx(5e-4)
    assert recipe.learning_rate(0.5) == pytest.approx(5e-4)
    assert recipe.learning_rate(1) == recipe.learning_rate(1.2) == pytest.approx(0, abs=1e-18)


def test_the_usual_shape_has_25_million_parameters() -> None:
    for head_dim in (64, 128):
        with torch.device("meta"):
            model = small_model_training.Shape(head_dim).model(0)
        assert 24e6 < sum(weights.numel() for weights in model.parameters()) < 27e6
        assert model.model.layers[0].self_attn.head_dim == head_dim


def run_small_models(folder: Path, output: Path, *more: str) -> dict:
    """Return the results of a run with tiny models."""
    shape = {"hidden": 32, "intermediate": 32, "layers": 1, "trained_length": 192}
    arguments = [str(folder / "train.txt"), str(folder / "held_out.txt"), "--models", str(folder / "models")]
    arguments += ["--output", str(output), "--shape", json.dumps(shape), "--recipe", '{"rows": 4, "compiled": false}']
    arguments += ["--head-dims", "16", "--seeds", "0", "1", "--minutes-per-model", "0.02", "--scales", "2", "4"]
    arguments += ["--documents", "2", "--trials", "2", "--calibrate", "4", "--calibration-seconds", "4", *more]
    results = small_model_study.run(small_model_study.parser().parse_args(arguments))
    assert json.loads(results.path.read_text()) == results.data
    return results.data


@pytest.fixture
def small_texts(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text("\0".join(random_words(100, seed) for seed in range(8)))
    (tmp_path / "held_out.txt").write_text("\0".join(random_words(200, 100 + seed) for seed in range(7)))
    return tmp_path


def test_small_models_are_trained_judged_and_gone_on_with(small_texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run_small_models(small_texts, small_texts / "small", "--minutes", "0", "--enough", "0")
    assert (stopped["complete"], stopped.get("parts", {})) == (False, {})
    data = run_small_models(small_texts, small_texts / "small", "--enough", "0")
    assert data["complete"]
    assert set(data["parts"]) == {"head16_seed0", "head16_seed1"}
    methods = {*FIXED_METHODS, "mrrope_pow 0.5", "mrrope_pow 2", "su", "truncated"}
    for part in data["parts"].values():
        assert part["judged"]
        assert part["training"]["tokens"] == part["training"]["steps"] * 4 * 192
        assert set(part["results"]) == {f"{task} {scale}" for task in ("perplexity", "passkey") for scale in (2, 4)}
        assert set(part["results"]["passkey 2"]) == methods
        assert set(part["results"]["perplexity 4"]) == {*methods, "calibrated"}
        assert list(part["results"]["perplexity 4"]["su"]) == ["192", "384", "768"]
    # By hand, from both seeds at the longest length.
    figures = [data["parts"][f"head16_seed{seed}"]["results"]["perplexity 4"]["su"]["768"] for seed in (0, 1)]
    halves = [figure["second_half_perplexity"] for figure in figures]
    assert small_model_study.over_seeds(data, 16, 4.0, "perplexity", "su") == halves
    cell = data["summary"]["16"]["perplexity"]["su"]["4"]
    assert cell["mean"] == pytest.approx(sum(halves) / 2, rel=1e-15)
    assert (cell["lowest"], cell["highest"], cell["models"]) == (min(halves), max(halves), 2)
    assert f"{cell['mean']:>8.2f}{min(halves):>8.2f}{max(halves):>8.2f}" in small_model_study.table(data)
    assert list(data["summary"]["16"]["passkey"]["calibrated"]) == ["4"]
    assert (small_texts / "small.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(measurements, "RESULTS", small_texts)
    monkeypatch.setattr(study_tables, "SMALL_MODELS", "small.json")
    spread = f"{cell['mean']:.2f} ({min(halves):.2f} to {max(halves):.2f})"
    (row,) = (row for row in study_tables.small_models("perplexity", 16) if row.startswith("| `su` |"))
    assert row.endswith(f"| {spread} |")
    assert len(study_tables.small_training()) == 2 + 2
    # A second run trains and measures nothing.
    monkeypatch.setattr(small_model_training, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(small_model_study.Examined, "perplexities", lambda *_: pytest.fail("measured again"))
    assert run_small_models(small_texts, small_texts / "small", "--enough", "0") == data


def test_a_model_that_is_trained_anew_loses_its_figures(small_texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (small_texts, small_texts / "small", "--enough", "0", "--calibrate")
    before = run_small_models(*options)
    shutil.rmtree(small_texts / "models" / "head16_seed0")
    monkeypatch.setattr(small_model_study, "measure", lambda *_: None)
    data = run_small_models(*options)
    old, new = (found["parts"]["head16_seed0"] for found in (before, data))
    assert new["training"] != old["training"]
    assert old["results"]
    assert new["results"] == {}
    assert data["parts"]["head16_seed1"] == before["parts"]["head16_seed1"]
    assert [found["summary"]["16"]["passkey"]["su"]["4"]["models"] for found in (before, data)] == [2, 1]


def test_a_model_that_finds_too_few_keys_is_not_judged(small_texts: Path) -> None:
    data = run_small_models(small_texts, small_texts / "small", "--seeds", "0")
    (part,) = data["parts"].values()
    assert part["passkey"] < 0.95
    assert (part["judged"], part["results"]) == (False, {})
    assert data["summary"]["16"]["passkey"] == {}


def test_training_makes_the_loss_small() -> None:
    text = torch.tensor(list(b"abcdefgh" * 500), dtype=torch.uint8)
    model = small_model_training.Shape(16, hidden=32, intermediate=32, layers=1, trained_length=160).model(0)
    record = small_model_training.train(
        model, text, small_model_training.Recipe(5, rows=4, peak=1e-2, keyed=0.0, repeated=0.0), 0
    )
    losses = [loss for _, loss in record["losses"]]
    assert losses[0] > 4
    assert losses[-1] < losses[0] / 3
    assert 5 <= record["seconds"] < 60
