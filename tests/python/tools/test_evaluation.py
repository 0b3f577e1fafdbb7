"""``mrrope eval``: metrics against models with known likelihoods, and chunked reading against one forward."""

import json
import lzma
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2
import torch
from byte_llama import byte_tokenizer, random_words, save_byte_llama
from command_line import as_arguments
from markers import takes_minutes
from matplotlib.figure import Figure
from scripted_models import CopiesFromContext, OutOfMemory, RepeatsLastToken, ScriptedModel
from tiny_models import tiny_model, tokens
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import mrrope
from mrrope.cli import main
from mrrope.evaluation import chunked_reader, documents, model_loading, perplexity, report
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.evaluate import Evaluation, is_out_of_memory
from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.results import Results
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

FLOAT32_EPS = torch.finfo(torch.float32).eps


# Losses of RepeatsLastToken with 5 tokens: ln 2 for a repeated token, ln 8 for another (0.5 / 4 = 1/8).
REPEATED, OTHER = math.log(2), math.log(8)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_losses_are_those_of_the_known_likelihoods(chunk: int) -> None:
    document = [0, 0, 0, 1, 2, 2, 3, 4]
    expected = [REPEATED, REPEATED, OTHER, OTHER, REPEATED, OTHER, OTHER]
    found = torch.cat(list(perplexity.token_losses(RepeatsLastToken(5), document, chunk=chunk)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=4 * FLOAT32_EPS, atol=0)


@pytest.mark.parametrize("one_reading", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_figures_of_every_length(chunk: int, one_reading: bool) -> None:
    document = [0, 0, 0, 1, 2, 2, 3, 4]
    by_hand = {
        2: (REPEATED, REPEATED),  # token 1, which is also the second half
        4: ((2 * REPEATED + OTHER) / 3, (REPEATED + OTHER) / 2),  # tokens 2 and 3
        8: ((3 * REPEATED + 4 * OTHER) / 7, (3 * OTHER + REPEATED) / 4),  # tokens 4 to 7
    }
    model = RepeatsLastToken(5)
    found = list(perplexity.document_losses(model, document, [8, 2, 4, 4], chunk=chunk, one_reading=one_reading))
    assert [figures.length for figures in found] == [2, 4, 8]
    for figures in found:
        assert (figures.whole, figures.second_half) == pytest.approx(by_hand[figures.length], rel=4 * FLOAT32_EPS)
    assert sum(model.lengths_of_calls) == (7 if one_reading else 1 + 3 + 7)


def test_perplexity_is_the_exponential_of_the_mean_of_document_means() -> None:
    assert perplexity.perplexity([REPEATED, OTHER]) == pytest.approx(4.0)  # the geometric mean of 2 and 8
    assert perplexity.perplexity([1000.0]) == math.inf


def test_short_figures_come_before_the_long_text_is_read() -> None:
    model = RepeatsLastToken(5)
    first = next(perplexity.document_losses(model, [0] * 64, [4, 64], chunk=8))
    assert first.length == 4
    assert model.lengths_of_calls == [8]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2"])
@pytest.mark.parametrize("method", [None, "mrrope_pro"])
def test_chunks_give_what_one_pass_gives(model_type: str, method: str | None) -> None:
    model = tiny_model(model_type)
    if method:
        mrrope.patch(model, method, scale=4.0, original_max_position=16)
    text = tokens(1, 96)[0].tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0, :-1].double()
    expected = -logits.log_softmax(-1)[torch.arange(95), text[1:]]
    for chunk in (7, 32, 96):
        found = torch.cat(list(perplexity.token_losses(model, text, chunk=chunk)))
        # float32 sums over the model's width, in another order.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=64 * FLOAT32_EPS * logits.abs().max().item())


def test_the_length_of_a_text_is_known_from_its_first_chunk_on() -> None:
    """With scale="auto" the reader announces the length, so that no chunk changes the scale."""
    model = mrrope.patch(tiny_model("llama"), "mrrope_pro", scale="auto", max_scale=4.0)
    text = tokens(1, 96)[0].tolist()  # the tiny model's native length is 64
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0, :-1].double()
    expected = -logits.log_softmax(-1)[torch.arange(95), text[1:]]
    found = torch.cat(list(perplexity.token_losses(model, text, chunk=20)))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=64 * FLOAT32_EPS * logits.abs().max().item())


def test_greedy_answer_is_that_of_one_pass_at_a_time() -> None:
    model = tiny_model("llama")
    prompt = tokens(1, 50)[0].tolist()
    expected: list[int] = []
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(input_ids=torch.tensor([prompt + expected])).logits[0, -1].argmax()))
    assert chunked_reader.greedy_answer(model, prompt, 6, chunk=16) == expected
    read: list[int] = []
    chunked_reader.greedy_answer(model, prompt, 6, chunk=16, progress=read.append)
    assert read == [16, 16, 16, 2]
    stop = expected[2]
    assert chunked_reader.greedy_answer(model, prompt, 6, chunk=16, end_token=stop) == expected[: expected.index(stop)]


def test_answers_side_by_side_are_those_one_by_one() -> None:
    model = tiny_model("llama").double()
    prompts = [row.tolist() for row in tokens(5, 50)]
    prompts = [prompts[0][:48], *prompts[1:3], prompts[3][:48], prompts[4]]
    counts = [6, 2, 5, 4, 3]
    options = {"chunk": 100, "end_token": chunked_reader.greedy_answer(model, prompts[2], 5)[1]}
    expected = [
        chunked_reader.greedy_answer(model, prompt, count, **options)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    assert len(expected[2]) <= 1
    batches: list[int] = []
    found = chunked_reader.greedy_answers(model, prompts, counts, **options, progress=batches.append)
    assert found == expected
    # Two prompts of 48 tokens; three of 50, two and then one.
    assert batches == [96, 100, 50]


def test_one_text_in_one_chunk_is_read_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask would rule out the attention kernels that read 128K tokens in seconds."""
    given: list[tuple] = []
    attention = nn.functional.scaled_dot_product_attention

    def watched(query, *arguments, attn_mask=None, is_causal=False, **options):
        given.append((query.shape[2], attn_mask is None, is_causal))
        return attention(query, *arguments, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    chunked_reader.greedy_answers(tiny_model("llama"), tokens(3, 50).tolist(), [2] * 3, chunk=150)
    assert set(given) == {(50, True, True), (1, True, False)}


# Retrieval tasks


@pytest.fixture(scope="module", params=[True, False], ids=["begins texts", "adds nothing"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_tokenizer(adds_bos=request.param)


@pytest.fixture
def haystack(tokenizer: PreTrainedTokenizerFast) -> Haystack:
    return Haystack(
        tokenizer, [documents.Document(f"{seed}", tokenizer(random_words(400, seed)).input_ids) for seed in range(3)]
    )


def test_copying_model_copies() -> None:
    assert chunked_reader.greedy_answer(CopiesFromContext(), [5, 6, 7, 8, 9, 5, 6], 3) == [7, 8, 9]
    assert chunked_reader.greedy_answer(CopiesFromContext(window=6), [5, 6, 7, 8, 9, 4, 5, 6], 1) == [1]


class TracksVariables(ScriptedModel):
    """Solves the tracking task."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def next_logits(self, read: list[int]) -> torch.Tensor:
        text = self.tokenizer.decode(read)
        assigned = dict(re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", text))
        if (question := re.search(r"variables that are assigned the value (\d+) are VAR(.*)$", text)) is None:
            return torch.zeros(self.vocabulary)  # before the question
        value, said = question.groups()

        def held(name: str) -> str:
            return held(assigned[name]) if name in assigned else name

        answer = " " + ", ".join(name for name in assigned if held(name) == value) + "</s>"
        token = self.tokenizer(answer[len(said) :], add_special_tokens=False).input_ids[0]
        return self.always(token)


class AnswersNothing(ScriptedModel):
    """Answers with tildes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.tilde = tokenizer("~", add_special_tokens=False).input_ids[0]

    def next_logits(self, read: list[int]) -> torch.Tensor:
        return self.always(self.tilde)


def answers(model: nn.Module, haystack: Haystack, task: str, length: int, trials: int) -> dict:
    evaluation = Evaluation(model, haystack.tokenizer, [], [], Results(Path(), {}), trials=trials, chunk=300)
    return evaluation.answers(task, Method("unpatched"), haystack, length, lambda _: None)


@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_can_do_the_task_gets_all_and_one_that_cannot_nothing(task: str, haystack: Haystack) -> None:
    able = TracksVariables(haystack.tokenizer) if task == "tracking" else CopiesFromContext()
    assert answers(able, haystack, task, 800, 5)["score"] == 1.0
    assert answers(AnswersNothing(haystack.tokenizer), haystack, task, 800, 5)["score"] == 0.0


def test_needle_grid_shows_how_far_a_model_sees(haystack: Haystack) -> None:
    found = answers(CopiesFromContext(window=500), haystack, "needle", 1000, 5)["trials"]
    assert [trial["depth"] for trial in found] == [0, 0.25, 0.5, 0.75, 1]
    # Depths are fractions of the filler text, about 850 tokens; needle and question take the rest.
    assert [trial["score"] for trial in found] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_of_the_length_asked_and_the_same_every_time(task: str, haystack: Haystack) -> None:
    trials = TASKS[task](haystack, 900, 4)
    assert [trial.prompt for trial in trials] == [trial.prompt for trial in TASKS[task](haystack, 900, 4)]
    assert len({tuple(trial.prompt) for trial in trials}) == 4
    for trial in trials:
        assert trial.prompt[: len(haystack.opening)] == haystack.opening
        assert haystack.tokenizer.bos_token_id not in trial.prompt[len(haystack.opening) :]
        if task == "tiled_copy":  # the answer counts towards the length, and tiles have whole tokens
            assert 900 - 8 <= len(trial.prompt) + trial.answer_tokens <= 900
        else:
            assert len(trial.prompt) == 900


def test_hidden_sentences_stand_at_their_depths(haystack: Haystack) -> None:
    sentences = [(0.5, "second"), (0.0, "first"), (1.0, "third")]
    prompt = haystack.tokenizer.decode(haystack.prompt(0, 200, sentences, "where?"), skip_special_tokens=True)
    before, between, after, end = re.split("\nfirst\n|\nsecond\n|\nthird\n", prompt)
    assert (before, end) == ("", "\nwhere?")
    assert abs(len(between) - len(after)) <= 1
    assert random_words(400).startswith(between + after)


def test_multikey_asks_for_every_key_in_turn(haystack: Haystack) -> None:
    trials = TASKS["multikey"](haystack, 900, 8)
    assert [trial.depth for trial in trials] == [(key + 0.5) / 8 for key in range(8)]
    for trial in trials:
        name = re.search(rf"The pass key of (\w+) is {trial.expected}\.", text_of(haystack, trial)).group(1)
        assert text_of(haystack, trial).endswith(f"The pass key of {name} is")
        assert len(set(re.findall(r"is (\d{5})\.", text_of(haystack, trial)))) == 8


def text_of(haystack: Haystack, trial) -> str:
    return haystack.tokenizer.decode(trial.prompt)


def test_tasks_without_room_say_how_much_they_need(haystack: Haystack) -> None:
    with pytest.raises(ValueError, match=r"lengths must be \d+ tokens or more .* got 50"):
        TASKS["passkey"](haystack, 50, 1)
    with pytest.raises(ValueError, match="lengths must be above 256 tokens for tiled_copy, got 200"):
        TASKS["tiled_copy"](haystack, 200, 3)


# Documents


def test_documents_of_files_folders_and_archives(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"zero\0one\0 \n"))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.md").write_text("drei ü")
    everything = [("a.txt.xz#1", "zero"), ("a.txt.xz#2", "one"), ("b.txt", "two"), ("c.md", "drei ü")]
    assert list(documents.read_texts(tmp_path)) == everything
    assert list(documents.read_texts(tmp_path / "b.txt")) == [("b.txt", "two")]


def test_documents_long_enough_are_cut_to_the_length(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "all.txt").write_text("\0".join(["a" * 20, "b" * 99, "c" * 30, "d" * 300]))
    extra = len(documents.opening_tokens(tokenizer))
    found = documents.long_documents(tmp_path / "all.txt", tokenizer, 30 + extra)
    assert [document.name for document in found] == ["all.txt#2", "all.txt#3", "all.txt#4"]
    assert [tokenizer.decode(document.tokens, skip_special_tokens=True) for document in found] == [
        "b" * 30,
        "c" * 30,
        "d" * 30,
    ]
    assert len(documents.long_documents(tmp_path / "all.txt", tokenizer, 30, limit=2)) == 2
    with pytest.raises(
        ValueError, match=rf"at least 1000 tokens, and the longest of .*all.txt is 'all.txt#4': {300 + extra}"
    ):
        documents.long_documents(tmp_path / "all.txt", tokenizer, 1000)


def test_bad_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"text must be a file or a folder, and there is no .*missing"):
        list(documents.read_texts(tmp_path / "missing"))
    with pytest.raises(ValueError, match="is empty"):
        list(documents.read_texts(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "not.xz").write_bytes(b"not")
    for name in ("bytes", "not.xz"):
        with pytest.raises(ValueError, match=f"text must be UTF-8, plain or in .xz, and .*{name} is not"):
            list(documents.read_texts(tmp_path / name))


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model, a text and a table."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_byte_llama(folder / "model", 64, layers=2, heads=2, initializer_range=0.2)
    (folder / "text.txt").write_text("\0".join(random_words(120, seed) for seed in range(3)))
    table = mrrope.frequency_table("mrrope_uni", rotary_dim=16, base=1e4, original_max_position=64, scale=8.0)
    table.save(folder / "table.json")
    return folder


def evaluate(folder: Path, *options: str, **replaced: str) -> int:
    given = {"--text": str(folder / "text.txt"), "--device": "cpu", "--lengths": "64,600", "--chunk": "100", **replaced}
    given = {"--output": str(folder / "out"), **given}
    model = given.pop("model", str(folder / "model"))
    return main(["eval", model, *options, *as_arguments(given)])


@pytest.mark.parametrize(
    ("longest", "more", "scale"),
    [(64, {}, 2.0), (128, {}, 2.0), (129, {}, 4.0), (600, {}, 16.0), (200, {"--original-max-position": "16"}, 16.0)],
)
def test_without_a_scale_it_covers_the_longest_length(
    folder: Path, tmp_path: Path, longest: int, more: dict[str, str], scale: float, capsys
) -> None:
    given = {"--methods": "unpatched,yarn", "--lengths": f"16,{longest}", "--output": str(tmp_path / "out"), **more}
    assert evaluate(folder, **given, **{"--documents": "1"}) == 0
    native = more.get("--original-max-position", "64")
    said = f"mrrope eval: --scale {scale:g} extends {native} tokens over the longest of --lengths"
    assert said in capsys.readouterr().err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["scale"] == scale
    found = data["results"]["perplexity"]["yarn"][str(longest)]["documents"][0]["loss"]
    assert evaluate(folder, **given, **{"--documents": "1", "--scale": str(scale)}) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["results"]["perplexity"]["yarn"][str(longest)]["documents"][0]["loss"] == found


def test_ready_tables_have_their_own_scale(folder: Path, tmp_path: Path, capsys) -> None:
    methods = f"unpatched,rope,{folder / 'table.json'}"
    given = {"--methods": methods, "--lengths": "16", "--output": str(tmp_path / "out"), "--documents": "1"}
    assert evaluate(folder, **given) == 0
    assert "--scale" not in capsys.readouterr().err
    assert "scale" not in json.loads((tmp_path / "out.json").read_text())


def losses_by_hand(folder: Path, document: str, length: int, method: str | None, **options) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    if method:
        mrrope.patch(model, method, **options)
    read = [0, *(byte_tokenizer(adds_bos=False)(document).input_ids)][:length]
    with torch.no_grad():
        logits = model(torch.tensor([read])).logits[0, :-1].double()
    return -logits.log_softmax(-1)[torch.arange(length - 1), read[1:]]


def test_the_command_measures_what_one_pass_gives(folder: Path, tmp_path: Path, capsys) -> None:
    table = str(folder / "table.json")
    methods = f"unpatched,mrrope_pro,{table}"
    options = {"--methods": methods, "--scale": "4", "--output": str(tmp_path / "out"), "--documents": "2"}
    assert evaluate(folder, "--json", **options) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["documents"] == ["text.txt#1", "text.txt#2"]
    assert (data["scale"], data["dtype"], data["device"]) == (4.0, "float32", "cpu")
    assert data["results"].keys() == {"perplexity"}
    assert list(data["results"]["perplexity"]) == methods.split(",")
    by_hand = {"unpatched": {}, "mrrope_pro": {"scale": 4.0}, table: {}}
    for method, settings in by_hand.items():
        for length in (64, 600):
            figures = data["results"]["perplexity"][method][str(length)]
            name = None if method == "unpatched" else method
            losses = [losses_by_hand(folder, random_words(120, seed), length, name, **settings) for seed in (0, 1)]
            wholes = [one.mean().item() for one in losses]
            halves = [one[length // 2 - 1 :].mean().item() for one in losses]
            # Means of float32 losses of about 6.
            assert [one["loss"] for one in figures["documents"]] == pytest.approx(wholes, rel=64 * FLOAT32_EPS)
            assert [one["second_half_loss"] for one in figures["documents"]] == pytest.approx(
                halves, rel=64 * FLOAT32_EPS
            )
            assert figures["perplexity"] == pytest.approx(math.exp(sum(wholes) / 2), rel=500 * FLOAT32_EPS)
            assert figures["second_half_perplexity"] == pytest.approx(math.exp(sum(halves) / 2), rel=500 * FLOAT32_EPS)


@pytest.mark.slow
def test_the_command_prints_tables_and_draws(folder: Path, tmp_path: Path, capsys) -> None:
    tasks = "perplexity,passkey,needle,multikey,tracking,tiled_copy"
    options = {"--methods": "rope,yarn", "--scale": "4", "--output": str(tmp_path / "out"), "--documents": "1"}
    assert evaluate(folder, **{**options, "--tasks": tasks, "--trials": "2", "--lengths": "500,600"}) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "out.json").read_text())
    assert list(data["results"]) == tasks.split(",")
    for task in tasks.split(","):
        assert (tmp_path / f"out.{task}.png").read_bytes().startswith(b"\x89PNG")
        for method in ("rope", "yarn"):
            assert list(data["results"][task][method]) == ["500", "600"]
    row = "".join(f"{data['results']['perplexity']['yarn'][length]['perplexity']:10.3f}" for length in ("500", "600"))
    assert f"yarn  {row}\n" in printed
    assert "needle\n             500       600\nrope       0.000     0.000\n" in printed


@pytest.mark.parametrize(
    ("explosions", "is_cut"), [([], False), ([[3.4, 33.8], [19.7, 20.4]], True), ([[3.4, 2405.0]], True)]
)
def test_methods_that_fail_leave_the_picture_to_the_others(explosions: list[list[float]], is_cut: bool) -> None:
    axes = Figure().subplots()
    lines = [*explosions, [3.6, 3.9], [3.4, 3.7], [3.5, 3.75]]
    for line in lines:
        axes.plot(line)
    report.cut_off_explosions(axes, lines)
    low, high = axes.get_ylim()
    assert low < 3.4 < 3.9 < high < 6
    assert ("cut off" in axes.get_title()) == is_cut


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"--tasks": "perplexity,typing"},
            "--tasks must be of perplexity, .* or tasks of lm-evaluation-harness.*, got '.*,typing'",
        ),
        (
            {"--methods": "rope,rupe"},
            "methods must be unpatched, truncated, rope, .* got 'rupe': the nearest is 'rope'",
        ),
        ({"--methods": "missing.json"}, "methods must give a table, and missing.json does not: .*No such file"),
        ({"--methods": "mrrope_pow"}, "methods must give a table, and mrrope_pow does not: .*power"),
        ({"--methods": ","}, "methods must be one or more, with commas between them, got none"),
        ({"--scale": "much"}, "--scale must be a number, 1 or more, or auto, got 'much'"),
        ({"--scale": "0.5"}, "--scale must be a number, 1 or more, or auto, got '0.5'"),
        ({"--scale": "inf"}, "--scale must be a number, 1 or more, or auto, got 'inf'"),
        ({"--max-scale": "8"}, "--max-scale goes with --scale auto, got no --scale"),
        ({"--scale": "auto", "--max-scale": "1"}, "--max-scale must be a number above 1, got 1"),
        ({"--lengths": "64,many"}, "--lengths must be numbers of tokens, .* got '64,many'"),
        ({"--lengths": "1"}, "--lengths must be numbers of tokens, 2 or more, .* got '1'"),
        ({"--text": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        ({"--trials": "0"}, "--trials must be a positive number, got 0"),
        ({"--chunk": "-1"}, "--chunk must be a positive number, got -1"),
        ({"--documents": "0"}, "--documents must be a positive number, got 0"),
        (
            {"--output": "no/such/folder/out"},
            "--output must be in a folder that exists, and there is no no/such/folder",
        ),
        ({"--output": "/proc/self/out"}, "--output must be where files can be written, got /proc/self/out: "),
        ({"--original-max-position": "0"}, "--original-max-position must be 1 or more, got 0"),
        ({"--dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"--device": "abacus"}, "device must be one that torch has here, got 'abacus'"),
        ({"model": "missing.gguf"}, "model must be a file that exists, and there is no missing.gguf"),
        ({"model": "./missing"}, "model must be a folder, .* and there is no folder missing"),
        ({"model": "/no/such/folder"}, "model must be a folder, .* and there is no folder /no/such/folder"),
        ({"model": "models/of/mine"}, "model must be a folder, .* and there is no folder models/of/mine"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    folder: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("a model is loaded"))
    assert evaluate(folder, **replaced) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope eval: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--lengths": "64,5000"}, "text must hold a document of at least 5000 tokens, and the longest of .*: 720"),
        (
            {"--methods": "{folder}/wide.json"},
            "methods must go with the model, and .*wide.json does not: .*rotary_dim 16",
        ),
    ],
)
def test_what_does_not_go_with_the_model_is_named(folder: Path, replaced: dict[str, str], message: str, capsys) -> None:
    mrrope.frequency_table("rope", rotary_dim=32, base=1e4, original_max_position=64).save(folder / "wide.json")
    assert evaluate(folder, **{option: value.format(folder=folder) for option, value in replaced.items()}) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope eval: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("name", "short"),
    [("Qwen/Qwen2.5-3B", "Qwen2.5-3B"), (Path("a/b.Q4_1.gguf"), "b.Q4_1"), ("folder/tiny/", "tiny")],
)
def test_short_names_of_models(name: str | Path, short: str) -> None:
    assert model_loading.short_name(name) == short


def test_models_that_cannot_be_loaded_are_named(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "abacus"}')
    (tmp_path / "empty").mkdir()
    expected = {
        "broken.gguf": "model .*broken.gguf cannot be loaded: ",
        "weights.bin": "model must be a folder, a name on the hub or a .gguf file, got the file .*weights.bin",
        "unknown": "model .*unknown cannot be loaded: ",
        "empty": "model must be a folder with a config.json, and .*empty has none",
    }
    for name, message in expected.items():
        assert evaluate(folder, model=str(tmp_path / name)) == 2
        assert re.search(f"^mrrope eval: {message}", capsys.readouterr().err, re.MULTILINE)


def test_a_missing_folder_that_may_be_a_name_on_the_hub(folder: Path, monkeypatch, capsys) -> None:
    def refuse(*_, **__):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    assert evaluate(folder, model="models/mine") == 2
    said = "mrrope eval: model models/mine, which is no folder here, cannot be loaded: We couldn't connect to the hub"
    assert said in capsys.readouterr().err


def test_what_transformers_says_of_a_model_is_not_cut_off_after_a_line(folder: Path, monkeypatch, capsys) -> None:
    def refuse(*_, **__):
        raise ValueError("one of these is missing:\n(1) this\n(2) that\n" + "more " * 100)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    assert evaluate(folder) == 2
    printed = capsys.readouterr().err
    assert re.search(r"cannot be loaded: one of these is missing: \(1\) this \(2\) that (more )+\.\.\.$", printed)
    assert len(printed) < 1000


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({"--methods": "unpatched,rope,yarn", "--scale": "1"}, "rope, yarn"),
        ({"--methods": "rope,yarn", "--scale": "1.0"}, "rope, yarn"),
        ({"--methods": "rope,yarn", "--scale": "2"}, None),
        ({"--methods": "unpatched,rope"}, None),
        ({"--methods": "rope,{folder}/table.json"}, None),
    ],
)
def test_methods_that_cannot_differ_are_said_to_be_alike(
    folder: Path, tmp_path: Path, options: dict[str, str], alike: str | None, capsys
) -> None:
    given = {"--output": str(tmp_path / "out"), "--lengths": "16", "--documents": "1"}
    given |= {option: value.format(folder=folder) for option, value in options.items()}
    assert evaluate(folder, **given) == 0
    said = f"mrrope eval: {alike} are the unpatched model at --scale 1; they differ at a larger --scale"
    assert (said in capsys.readouterr().err) == (alike is not None)
    measured = json.loads((tmp_path / "out.json").read_text())["results"]["perplexity"]
    losses = {name: figures["16"]["documents"][0]["loss"] for name, figures in measured.items()}
    if alike:
        assert max(losses.values()) == pytest.approx(min(losses.values()), rel=64 * FLOAT32_EPS)


@pytest.mark.parametrize("tasks", ["perplexity", "perplexity,passkey"])
def test_what_was_measured_before_the_memory_was_full_is_kept(
    folder: Path, tmp_path: Path, tasks: str, monkeypatch, capsys
) -> None:
    model = OutOfMemory(room=400)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    options = {"--methods": "unpatched", "--tasks": tasks, "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options) == 2
    printed = capsys.readouterr()
    path = tmp_path / "out.json"
    assert (
        "out of memory in perplexity with unpatched: of the lengths [64, 600] 1 were read; a smaller --chunk than 100"
        in printed.err
    )
    assert f"What was measured is in {path}" in printed.err
    data = json.loads(path.read_text())
    assert not data["complete"]
    assert data["stopped"] in printed.err
    assert list(data["results"]["perplexity"]["unpatched"]) == ["64"]
    assert "perplexity of the second half" in printed.out
    assert (tmp_path / "out.perplexity.png").exists()


def test_what_was_measured_before_an_interrupt_is_kept(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    class Interrupted(OutOfMemory):
        def forward(self, input_ids, position_ids, **options):
            try:
                return super().forward(input_ids, position_ids, **options)
            except torch.OutOfMemoryError:
                raise KeyboardInterrupt from None

    model = Interrupted(room=400)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    assert evaluate(folder, **{"--methods": "unpatched", "--output": str(tmp_path / "out")}) == 130
    printed = capsys.readouterr()
    assert f"mrrope eval: interrupted; what was measured is in {tmp_path / 'out.json'}\n" in printed.err
    assert "Traceback" not in printed.err
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["complete"], data["stopped"]) == (False, "interrupted")
    assert list(data["results"]["perplexity"]["unpatched"]) == ["64"]
    assert "perplexity of the second half" in printed.out


# 600 tokens of each of 3 documents are 6 chunks of 100, of which the first covers 64; or windows of 64, moved by 8.
@pytest.mark.parametrize(("second", "calls_per_document"), [("yarn", 6), ("truncated", 1 + 67)])
def test_figures_of_fewer_documents_are_marked(
    second: str, calls_per_document: int, folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """An interrupt in the second document of the second method, between its two lengths."""

    calls, forward = [], LlamaForCausalLM.forward

    def interrupted(self, *arguments, **options):
        if len(calls) == 3 * 6 + calls_per_document + 1:
            raise KeyboardInterrupt
        calls.append(None)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)
    labels: list[str] = []
    legend = Figure.legend
    monkeypatch.setattr(
        Figure,
        "legend",
        lambda self, handles, names, **more: labels.extend(names) or legend(self, handles, names, **more),
    )
    options = {"--methods": f"unpatched,{second}", "--scale": "4", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options) == 130
    figures = json.loads((tmp_path / "out.json").read_text())["results"]["perplexity"][second]
    assert [len(figures[length]["documents"]) for length in ("64", "600")] == [2, 1]
    block = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "*" not in block[2]
    assert re.fullmatch(rf"{second} +[\d.]+\* +[\d.]+\*", block[3])
    assert block[4:] == [
        f"* {second} at 64: 2 of 3 documents; not to be compared",
        f"* {second} at 600: 1 of 3 documents; not to be compared",
    ]
    assert labels == ["unpatched", f"{second} (1 of 3 documents)"]


def test_the_machines_own_memory_counts_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")
    assert is_out_of_memory(caught.value)
    # The message of other builds of torch.
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1152921504606846976 bytes."
    assert is_out_of_memory(RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] err == 0. {words} Error code 12"))


def test_other_errors_of_the_model_are_not_taken_for_memory(folder: Path, tmp_path: Path, monkeypatch) -> None:
    class Broken(OutOfMemory):
        def forward(self, *_, **__):
            raise RuntimeError("shapes do not match")

    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (Broken(0), byte_tokenizer(adds_bos=True)))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        evaluate(folder, **{"--methods": "unpatched", "--output": str(tmp_path / "out")})


def test_missing_packages_are_named(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert evaluate(folder) == 2
    assert "mrrope eval: this needs the package matplotlib: pip install 'mrrope[eval]'" in capsys.readouterr().err


def test_every_length_is_read_by_itself_where_the_scale_follows_it(folder: Path, tmp_path: Path) -> None:
    model = RepeatsLastToken()
    document = documents.Document("one", [0] * 64)
    evaluation = Evaluation(model, None, [document], [16, 64], Results(tmp_path / "out.json", {}))
    for scale, expected in (("auto", [15, 63]), (4.0, [63])):
        method = Method("yarn", (("scale", scale),))
        model.lengths_of_calls.clear()
        evaluation.measure_perplexity(method, lambda _: None)
        assert model.lengths_of_calls == expected
        assert evaluation.tokens_of("perplexity", method) == sum(expected)


# lm-evaluation-harness, and a fake of it


@pytest.fixture
def fake_harness(monkeypatch) -> list[dict]:
    """Install a fake lm_eval with a few tasks, one of them without data; return the list of its calls.

    As in the real one, a limit leaves only the prompts of the first length.
    """
    calls = []
    ruler = {64: 0.25, 600: 0.75}
    longbench2 = {"alias": "longbench2", "acc,none": 0.3, "acc_stderr,none": 0.1, "sample_len": 7}

    def ruler_results(length):
        measured = {f"{length},none": ruler[length], f"{length}_stderr,none": 0.1, "8192,none": -1}
        return {
            "ruler": {"alias": "ruler", "4096,none": 0.5, "4096_stderr,none": "N/A", "sample_len": 7},
            "ruler_vt": {"alias": " - ruler_vt", **measured},
        }

    def simple_evaluate(reader, tasks, limit, metadata, bootstrap_iters):
        if tasks == ["offline"]:
            raise ConnectionError("no route to the hub")
        assert isinstance(AutoTokenizer.from_pretrained(metadata["tokenizer"]), PreTrainedTokenizerFast)
        patched = any(isinstance(module, TableRotaryEmbedding) for module in reader.pretrained.modules())
        calls.append({"patched": patched, "limit": limit, "lengths": metadata["max_seq_lengths"]})
        calls[-1]["max_length"] = reader.max_length
        is_ruler = tasks == ["ruler"]
        return {"results": ruler_results(metadata["max_seq_lengths"][0]) if is_ruler else {"longbench2": longbench2}}

    class FakeModel(SimpleNamespace):
        def tok_encode(self, text):
            return self.tokenizer(text).input_ids

    class TaskManager:
        all_tasks = ("offline", "ruler", "ruler_vt", "longbench2")

    modules = {
        "lm_eval": SimpleNamespace(simple_evaluate=simple_evaluate),
        "lm_eval.tasks": SimpleNamespace(TaskManager=TaskManager),
        "lm_eval.models": SimpleNamespace(),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=FakeModel),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_tasks_of_the_harness_run_on_the_patched_model(folder: Path, tmp_path: Path, fake_harness: list[dict]) -> None:
    options = {"--methods": "unpatched,yarn,truncated", "--output": str(tmp_path / "out"), "--trials": "3"}
    assert evaluate(folder, **{**options, "--tasks": "ruler,longbench2"}) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["ruler_vt"]["yarn"] == {"64": {"score": 0.25}, "600": {"score": 0.75}}
    assert found["longbench2"]["yarn"] == {"600": {"score": 0.3, "metrics": {"acc": 0.3}}}
    assert "ruler" not in found  # it has no results for these lengths
    # RULER runs once per length, LongBench once.
    rows = [(False, 600), (True, 600), (False, 64)]  # truncated has the native length
    assert fake_harness == [
        {"patched": patched, "limit": 3, "lengths": lengths, "max_length": longest}
        for patched, longest in rows
        for lengths in ([64], [600], [64])
    ]


def test_a_task_without_data_does_not_keep_the_others_from_being_measured(
    folder: Path, tmp_path: Path, fake_harness: list[dict], capsys
) -> None:
    options = {"--methods": "rope,yarn", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **{**options, "--tasks": "offline,longbench2"}) == 2
    message = "offline of lm-evaluation-harness needs data that is not on this machine"
    assert re.search(f"^mrrope eval: {message} .* no route to the hub", capsys.readouterr().err, re.MULTILINE)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["stopped"].startswith(message)
    assert list(data["results"]["longbench2"]) == ["rope", "yarn"]


def test_without_the_harness_its_package_is_named(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(folder, **{"--tasks": "ruler"}) == 2
    assert "this needs the package lm_eval: pip install 'mrrope[harness]'" in capsys.readouterr().err


CHOICE_TASK = """\
task: mrrope_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@takes_minutes
def test_the_real_harness_reads_by_the_patched_model(folder: Path, tmp_path: Path) -> None:
    """Run a task whose correct answers are those that the patched model finds likelier, and one of RULER's."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm_eval[ruler]'")
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    tokenizer = byte_tokenizer(adds_bos=True)

    def likelihood(text: str, choice: str) -> float:
        read, following = tokenizer(text).input_ids, tokenizer(f" {choice}", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([read + following])).logits[0].double()
        steps = logits[len(read) - 1 : -1].log_softmax(-1)
        return steps[torch.arange(len(following)), following].sum().item()

    questions = []
    for seed in range(12):
        text, choices = random_words(30, seed), [random_words(1, 100 + seed), random_words(1, 200 + seed)]
        answer = max((0, 1), key=lambda which: likelihood(text, choices[which]))
        questions.append({"text": text, "choices": choices, "answer": answer})
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, questions)))
    task = tmp_path / "choice.yaml"
    task.write_text(CHOICE_TASK.format(data=tmp_path / "questions.json"))
    (tmp_path / "text.txt").write_text(random_words(240))

    options = {"--text": str(tmp_path / "text.txt"), "--lengths": "600,1200", "--trials": "12", "--scale": "4"}
    options |= {"--methods": "unpatched,mrrope_pro", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options, **{"--tasks": f"{task},niah_single_1"}) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["mrrope_choice"]["mrrope_pro"] == {"1200": {"score": 1.0, "metrics": {"acc": 1.0}}}
    assert found["mrrope_choice"]["unpatched"]["1200"]["score"] < 1
    for method in ("unpatched", "mrrope_pro"):
        assert list(found["niah_single_1"][method]) == ["600", "1200"]


# Models in GGUF, and attention backends


def test_a_gguf_file_is_read(tmp_path: Path) -> None:
    model, tokenizer = model_loading.load(smollm2.gguf_file(), device="cpu")
    assert (model.dtype, model.config.model_type) == (torch.float32, "llama")
    (tmp_path / "text.txt").write_text(smollm2.real_text())
    (document,) = documents.long_documents(tmp_path / "text.txt", tokenizer, 512)
    (figures,) = perplexity.document_losses(model, document.tokens, [512], chunk=200)
    # A trained model; uniform guessing has a loss of ln 49152 = 10.8.
    assert figures.whole < 5
    assert figures.second_half < 5


@pytest.mark.parametrize(
    ("tokens", "first", "on_gpu", "capability", "prefers"),
    [
        (8192, 0, True, 9, True),
        (8191, 0, True, 9, False),
        (8192, 1, True, 9, False),
        (8192, 0, True, 8, False),
        (8192, 0, False, 9, False),
    ],
)
def test_long_texts_read_whole_go_to_the_faster_attention(
    tokens: int, first: int, on_gpu: bool, capability: int, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other backends stay enabled: cuDNN does not take every head size."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    rows = SimpleNamespace(shape=(1, tokens), is_cuda=on_gpu, device="cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with chunked_reader.fast_attention(rows, first):
            assert torch.backends.cuda.cudnn_sdp_enabled() == prefers
            assert torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
