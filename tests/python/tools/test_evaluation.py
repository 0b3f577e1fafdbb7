"""``mrrope eval``: metrics against models with known likelihoods, and chunked reading against one forward."""

import lzma
import math
from pathlib import Path

import pytest
import torch
from byte_llama import byte_tokenizer
from evaluation_runs import FLOAT32_EPS
from scripted_models import RepeatsLastToken
from tiny_models import tiny_model, tokens
from torch import nn
from transformers import PreTrainedTokenizerFast

import mrrope
from mrrope.evaluation import chunked_reader, documents, perplexity

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


# Documents


@pytest.fixture(scope="module", params=[True, False], ids=["begins texts", "adds nothing"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_tokenizer(adds_bos=request.param)


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
