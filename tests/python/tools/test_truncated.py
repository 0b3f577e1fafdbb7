"""The baseline ``truncated`` against a reference that reads the window of every token by itself."""

import json
import math
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import auto_scale_study
import pytest
import torch
from byte_llama import byte_llama, byte_tokenizer, random_words
from command_line import as_arguments
from scripted_models import CopiesFromContext, RepeatsLastToken
from tiny_models import tiny_model, tokens
from torch import nn
from transformers import LlamaForCausalLM

import mrrope
from mrrope.cli import main
from mrrope.evaluation import lm_eval_harness, perplexity
from mrrope.evaluation.chunked_reader import Reader
from mrrope.evaluation.compared_methods import methods_named
from mrrope.evaluation.documents import Document
from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.evaluation.truncated import TRUNCATED, TruncatedReader, native_length
from mrrope.reporting import plotting
from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS

FLOAT32_EPS = torch.finfo(torch.float32).eps
NATIVE, SHIFT = 64, 8  # of the tiny models


def window_before(text: list[int], end: int, opening: int, native: int = NATIVE) -> list[int]:
    """What the model may see of ``text[:end]``: the opening and the fullest window that begins at a whole shift."""
    shift = native // 8
    start = max(0, -(-(end - native) // shift)) * shift
    return text[:opening] + text[opening + start : end]


@torch.no_grad()
def reference_losses(model: nn.Module, text: list[int], opening: int, native: int = NATIVE) -> torch.Tensor:
    """The loss of every token but the first, each from a forward pass over its own window."""
    windows = [window_before(text, end, opening, native) for end in range(1, len(text))]
    assert max(map(len, windows)) == native
    assert min(map(len, windows[native:])) == native - native // 8 + 1  # at least 7/8 full
    assert min(map(len, windows[native:])) >= 7 * native / 8
    logits = torch.stack([model(input_ids=torch.tensor([one])).logits[0, -1] for one in windows]).double()
    return -logits.log_softmax(-1)[torch.arange(len(windows)), torch.tensor(text[1:])]


def losses_read(reader: Reader, text: list[int]) -> torch.Tensor:
    return torch.cat(list(perplexity.next_token_losses(reader, text)))


@pytest.mark.parametrize("opening", [0, 1])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_losses_are_those_of_every_tokens_own_window(model_type: str, opening: int) -> None:
    model = tiny_model(model_type)
    assert native_length(model) == NATIVE
    text = tokens(1, 150, seed=3)[0].tolist()
    expected = reference_losses(model, text, opening)
    for chunk in (5, 24, NATIVE, 1000):
        read: list[int] = []
        options = {"native_length": NATIVE, "opening": opening, "chunk": chunk, "progress": read.append}
        found = losses_read(TruncatedReader(model, **options), text)
        # float32 sums over the model's width, in another order; logits are below 100.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=6400 * FLOAT32_EPS)
        assert sum(read) == len(text) - 1
        assert max(read) <= chunk


def test_a_native_length_that_is_no_multiple_of_8_moves_by_less() -> None:
    model, text = tiny_model("llama"), tokens(1, 150, seed=3)[0].tolist()
    found = losses_read(TruncatedReader(model, native_length=71, opening=1, chunk=20), text)
    torch.testing.assert_close(found.double(), reference_losses(model, text, 1, 71), rtol=0, atol=6400 * FLOAT32_EPS)


def test_up_to_the_native_length_it_is_the_stock_models_own_reading() -> None:
    model, text = tiny_model("llama"), tokens(1, NATIVE + 1)[0].tolist()
    found = losses_read(TruncatedReader(model, native_length=NATIVE, chunk=20), text)
    assert found.equal(losses_read(Reader(model, chunk=20), text))


def test_a_text_can_be_read_in_parts() -> None:
    model, text = tiny_model("llama"), tokens(1, 150)[0].tolist()
    whole = losses_read(TruncatedReader(model, native_length=NATIVE, opening=1), text)
    reader = TruncatedReader(model, native_length=NATIVE, opening=1)
    parts = [losses_read(reader, text[:end]) for end in (2, 31, 65, 66, 100, 150)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=6400 * FLOAT32_EPS)
    assert reader.position == 149


def test_a_batch_is_read_as_text_by_text() -> None:
    model, texts = tiny_model("llama"), tokens(3, 100)
    batch = TruncatedReader(model, native_length=NATIVE, opening=1, chunk=3 * 30)
    found = torch.cat(list(batch.read_rows(texts)), dim=1)
    for text, logits in zip(texts, found, strict=True):
        alone = TruncatedReader(model, native_length=NATIVE, opening=1, chunk=30)
        torch.testing.assert_close(logits, torch.cat(list(alone.read(text.tolist()))), rtol=0, atol=6400 * FLOAT32_EPS)


def test_no_window_is_read_twice_and_only_one_cache_is_held() -> None:
    class Cache(list):
        """A cache that can be counted."""

    caches: weakref.WeakSet[Cache] = weakref.WeakSet()
    Cache.__hash__ = object.__hash__  # type: ignore[method-assign]

    class Watched(RepeatsLastToken):
        most_caches = 0

        def forward(self, past_key_values, **call):
            output = super().forward(past_key_values=past_key_values, **call)
            cache = Cache(output.past_key_values)
            caches.add(cache)
            self.most_caches = max(self.most_caches, len(caches))
            return SimpleNamespace(logits=output.logits, past_key_values=cache)

    model = Watched(5)
    losses_read(TruncatedReader(model, native_length=NATIVE, chunk=NATIVE), [0] * 101)
    # 100 tokens: 64 of the first window, then four more windows of 8 new tokens, and of 4 in the last.
    assert model.lengths_of_calls == [64, 64, 64, 64, 64, 60]
    assert model.most_caches <= 2  # the one before and the one after a forward pass


@pytest.mark.parametrize("count", [1, 6, 20])
@pytest.mark.parametrize("length", [20, 60, NATIVE, 65, 150])
@pytest.mark.parametrize("opening", [0, 1])
def test_answers_follow_the_last_native_length_of_the_prompt(length: int, count: int, opening: int) -> None:
    model = tiny_model("llama").double()
    prompt = tokens(1, length, seed=length)[0].tolist()
    window = prompt if length <= NATIVE else prompt[:opening] + prompt[opening - NATIVE :]
    expected: list[int] = []
    with torch.no_grad():
        while len(expected) < count:
            if len(window) > NATIVE + SHIFT:
                window = window[:opening] + window[opening + 2 * SHIFT :]  # 7/8 and the token that found no room
            expected.append(int(model(input_ids=torch.tensor([window])).logits[0, -1].argmax()))
            window = [*window, expected[-1]]
    read: list[int] = []
    reader = TruncatedReader(model, native_length=NATIVE, opening=opening, chunk=24, progress=read.append)
    assert reader.answer(prompt, count) == expected
    assert sum(read) == length
    if length <= NATIVE and count <= SHIFT:
        assert Reader(model, chunk=24).answer(prompt, count) == expected
    # The same prompt after some of it was read as text, with and without a fork.
    for first in (10, NATIVE, NATIVE + SHIFT, 100):
        if first < length:
            reader = TruncatedReader(model, native_length=NATIVE, opening=opening, chunk=24)
            for _ in reader.read(prompt[:first]):
                pass
            assert reader.fork().answer(prompt[first:], count) == expected
            assert reader.answer(prompt[first:], count) == expected


def test_a_fork_leaves_the_reader_as_it_was() -> None:
    model, text = tiny_model("llama"), tokens(1, 150)[0].tolist()
    whole = losses_read(TruncatedReader(model, native_length=NATIVE), text)
    reader = TruncatedReader(model, native_length=NATIVE)
    parts = []
    for end in (40, 70, 150):
        parts.append(losses_read(reader, text[:end]))
        reader.fork().answer(text[:30], 4)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=6400 * FLOAT32_EPS)


def test_what_left_the_window_cannot_be_copied() -> None:
    prompt = [5, 6, 7, 8, *range(100, 100 + NATIVE), 5, 6]
    assert Reader(CopiesFromContext()).answer(prompt, 2) == [7, 8]
    assert TruncatedReader(CopiesFromContext(), native_length=NATIVE).answer(prompt, 1) == [1]
    assert TruncatedReader(CopiesFromContext(), native_length=NATIVE).answer([*prompt, 7, 8, 5, 6], 2) == [7, 8]


def test_a_prompt_is_read_once() -> None:
    """Retrieval costs one window for a prompt, however long it is."""
    model = RepeatsLastToken(5)
    TruncatedReader(model, native_length=NATIVE, chunk=1000).answer([1] * 500, 3)
    assert model.lengths_of_calls == [NATIVE, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"native_length": 7}, r"native_length must be 8 tokens or more, got 7"),
        ({"native_length": 64, "opening": 56}, r"opening must be a number of tokens below 56, .* got 56"),
        ({"native_length": 64, "chunk": 0}, r"chunk must be a positive number of tokens, got 0"),
    ],
)
def test_bad_arguments(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TruncatedReader(RepeatsLastToken(5), **options)


# mrrope eval


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model of native length 128, the same extended by YaRN, and a text."""
    folder = tmp_path_factory.mktemp("truncated")
    model = byte_llama(128, layers=2, heads=2, initializer_range=0.2)
    for name in ("model", "extended"):
        model.save_pretrained(folder / name)
        byte_tokenizer(adds_bos=True).save_pretrained(folder / name)
    config = json.loads((folder / "model" / "config.json").read_text())
    config["max_position_embeddings"] = 512
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    (folder / "extended" / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("\0".join(random_words(80, seed) for seed in range(2)))
    return folder


def evaluated(folder: Path, output: Path, model: str = "model", **replaced: str) -> dict:
    options = {"--text": str(folder / "text.txt"), "--device": "cpu", "--chunk": "50", "--output": str(output)}
    assert main(["eval", str(folder / model), *as_arguments({**options, **replaced})]) == 0
    return json.loads(output.with_suffix(".json").read_text())


def expected_figures(folder: Path, length: int, native: int) -> tuple[float, float]:
    """Both perplexities of the documents' first tokens."""
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    texts = [byte_tokenizer(adds_bos=True)(random_words(80, seed)).input_ids[:length] for seed in (0, 1)]
    losses = [reference_losses(model, text, 1, native) for text in texts]
    halves = [one[length // 2 - 1 :].mean().item() for one in losses]
    return math.exp(sum(one.mean().item() for one in losses) / 2), math.exp(sum(halves) / 2)


def test_eval_reports_a_row(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--lengths": "64,128,300", "--methods": "unpatched,truncated"}
    data = evaluated(folder, tmp_path / "out", **options)
    found = data["results"]["perplexity"]
    assert data["methods"] == list(found) == ["unpatched", "truncated"]
    for length in ("64", "128"):
        assert found["truncated"][length]["perplexity"] == pytest.approx(found["unpatched"][length]["perplexity"])
    figures = found["truncated"]["300"]
    # Means of float32 losses of about 6.
    expected = pytest.approx(expected_figures(folder, 300, 128), rel=500 * FLOAT32_EPS)
    assert (figures["perplexity"], figures["second_half_perplexity"]) == expected
    assert re.search(rf"^truncated .* {figures['perplexity']:.3f}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("lengths", "more", "is_there"),
    [("128", {}, False), ("64,129", {}, True), ("64,128", {"--original-max-position": "64"}, True)],
)
def test_it_is_compared_by_default_past_the_native_length(
    lengths: str, more: dict[str, str], is_there: bool, folder: Path, tmp_path: Path
) -> None:
    options = {"--lengths": lengths, "--scale": "4", "--documents": "1", **more}
    data = evaluated(folder, tmp_path / "out", **options)
    expected = ["rope", "yarn", "mrrope_uni", "mrrope_pro", *(["truncated"] if is_there else [])]
    assert data["methods"] == list(data["results"]["perplexity"]) == expected


def test_a_stated_native_length_means_plain_rope(folder: Path, tmp_path: Path) -> None:
    """Windows of the native length of a model whose configuration extends it already."""
    options = {"--lengths": "300", "--methods": "truncated"}
    plain = {"--original-max-position": "128"}
    stated = evaluated(folder, tmp_path / "stated", "extended", **options, **plain)["results"]["perplexity"]
    figures = stated["truncated"]["300"]
    expected = pytest.approx(expected_figures(folder, 300, 128), rel=500 * FLOAT32_EPS)
    assert (figures["perplexity"], figures["second_half_perplexity"]) == expected
    # Without it, the model reads 512 tokens by its own YaRN.
    both = evaluated(folder, tmp_path / "own", "extended", **{**options, "--methods": "unpatched,truncated"})["results"]
    own = {method: by_length["300"]["perplexity"] for method, by_length in both["perplexity"].items()}
    assert own["truncated"] == pytest.approx(own["unpatched"])
    assert own["truncated"] != pytest.approx(figures["perplexity"], rel=1e-4)


def test_the_study_of_automatic_scales_has_the_row(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    documents = [byte_tokenizer(adds_bos=True)(random_words(80, seed)).input_ids for seed in (0, 1)]
    row = auto_scale_study.all_lengths(model, documents, [128, 300], 1)["truncated"]
    expected = pytest.approx(expected_figures(folder, 300, 128), rel=500 * FLOAT32_EPS)
    assert (row[300]["whole"], row[300]["second half"]) == expected


def test_retrieval_reads_the_end_of_the_prompt(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_read: list[int] = []
    forward = LlamaForCausalLM.forward

    def watched(self, input_ids, **options):
        lengths_read.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    options = {"--methods": "unpatched,truncated", "--tasks": "passkey", "--lengths": "128,300", "--trials": "3"}
    found = evaluated(folder, tmp_path / "out", **{**options, "--chunk": "1000"})["results"]["passkey"]
    prefills = [count for count in lengths_read if count > 1]
    # Batches of three prompts; those of the native length are the stock model's, which are not read again.
    assert prefills == [128, 300, 128]
    assert found["truncated"]["128"] == found["unpatched"]["128"]
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder / "model").eval(), byte_tokenizer(adds_bos=True)
    documents = [Document(str(seed), tokenizer(random_words(80, seed)).input_ids[:300]) for seed in (0, 1)]
    trials = TASKS["passkey"](Haystack(tokenizer, documents), 300, 3)
    for trial, answered in zip(trials, found["truncated"]["300"]["trials"], strict=True):
        window = trial.prompt[:1] + trial.prompt[-127:]
        answer = Reader(model).answer(window, trial.answer_tokens, end_token=tokenizer.eos_token_id)
        assert answered["answer"] == tokenizer.decode(answer)


def test_a_model_without_a_native_length_is_refused() -> None:
    model = byte_llama(128)
    vars(model.config)["max_position_embeddings"] = None  # its setter refuses
    with pytest.raises(ValueError, match=r"truncated must have a native length, .* states none"):
        native_length(model)


def test_it_is_the_name_of_no_table() -> None:
    assert TRUNCATED not in (*METHODS, *shipped.names(), *shipped.ladders())
    model = tiny_model("llama")
    message = "method must be one of rope, .* got 'truncated', which is the row of mrrope eval for the stock model over"
    with pytest.raises(ValueError, match=message):
        mrrope.patch(model, "truncated", scale=4.0)
    assert not mrrope.is_patched(model)
    with pytest.raises(ValueError, match=r"methods must be unpatched, truncated, rope, .* got 'truncate'"):
        methods_named(["truncate"])
    assert plotting.line(TRUNCATED)["color"] not in {
        colour for name, (colour, _) in plotting.STYLES.items() if name != TRUNCATED
    }


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_harness_begins_a_cut_prompt_with_the_opening(adds_bos: bool) -> None:
    """The harness cuts prompts from the left, and the opening with it."""
    model, tokenizer = byte_llama(128).eval(), byte_tokenizer(adds_bos=adds_bos)
    prompt = tokenizer(random_words(80)).input_ids
    cut, whole = torch.tensor([prompt[-64:]]), torch.tensor([prompt[:64]])
    kept = torch.tensor([[0, *prompt[-63:]]]) if adds_bos else cut
    reader = SimpleNamespace(tok_encode=lambda text: tokenizer(text).input_ids)
    call = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(rows, **call)[0, 64:] for rows in (kept, whole)]
    logits = model(kept).logits
    with lm_eval_harness.keeping_opening(model, tokenizer, reader):
        assert [model.generate(rows, **call)[0, 64:].tolist() for rows in (cut, whole)] == [
            one.tolist() for one in expected
        ]
        assert model(cut).logits.equal(logits)
        assert model(input_ids=cut).logits.equal(logits)
    assert cut[0].tolist() == prompt[-64:]
    if adds_bos:
        assert not model(cut).logits.equal(logits)
