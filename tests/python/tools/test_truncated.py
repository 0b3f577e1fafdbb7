"""The baseline ``truncated`` against a reference that reads the window of every token by itself."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from scripted_models import CopiesFromContext, RepeatsLastToken
from tiny_models import tiny_model, tokens
from torch import nn

from mrrope.evaluation import perplexity
from mrrope.evaluation.chunked_reader import Reader
from mrrope.evaluation.truncated import TruncatedReader, native_length

FLOAT32_EPS = torch.finfo(torch.float32).eps
NATIVE, SHIFT = 64, 8  # of the tiny models


def window_before(text: list[int], end: int, opening: int) -> list[int]:
    """What the model may see of ``text[:end]``: the opening and the fullest window that begins at a whole shift."""
    moves = max(0, -(-(end - NATIVE) // SHIFT))
    return text[:opening] + text[opening + moves * SHIFT : end]


@torch.no_grad()
def reference_losses(model: nn.Module, text: list[int], opening: int) -> torch.Tensor:
    """The loss of every token but the first, each from a forward pass over its own window."""
    windows = [window_before(text, end, opening) for end in range(1, len(text))]
    assert max(map(len, windows)) == NATIVE
    assert min(map(len, windows[NATIVE:])) == NATIVE - SHIFT + 1  # at least 7/8 full
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
