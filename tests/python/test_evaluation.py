"""``mrrope eval``: protocols against models whose likelihoods are known, chunked reading against one pass."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn

import mrrope
from mrrope.evaluation import perplexity, reading

EPSILON = torch.finfo(torch.float32).eps


class FakeModel(nn.Module):
    """Reads as a model of transformers does; what it says next is up to ``next_logits`` of all it has read."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.anchor = nn.Parameter(torch.zeros(()))
        self.lengths_of_calls: list[int] = []

    def next_logits(self, read: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids, position_ids, past_key_values, use_cache, logits_to_keep):
        assert use_cache
        before = past_key_values or []
        read = before + input_ids[0].tolist()
        assert position_ids[0].tolist() == list(range(len(before), len(read)))
        self.lengths_of_calls.append(input_ids.shape[1])
        ends = range(len(before) + 1, len(read) + 1)
        logits = torch.stack([self.next_logits(read[:end]) for end in ends[-logits_to_keep:]])
        return SimpleNamespace(logits=logits[None], past_key_values=read)


class RepeatsItself(FakeModel):
    """Gives the last token probability 1/2, and the rest to all others evenly."""

    def next_logits(self, read: list[int]) -> torch.Tensor:
        probabilities = torch.full((self.vocabulary,), 0.5 / (self.vocabulary - 1))
        probabilities[read[-1]] = 0.5
        return probabilities.log()


# A token repeated costs ln 2, another one ln 8 with 5 tokens: 0.5 / 4 = 1/8.
REPEATED, OTHER = math.log(2), math.log(8)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_losses_are_those_of_the_known_likelihoods(chunk: int) -> None:
    document = [0, 0, 0, 1, 2, 2, 3, 4]
    expected = [REPEATED, REPEATED, OTHER, OTHER, REPEATED, OTHER, OTHER]
    found = torch.cat(list(perplexity.token_losses(RepeatsItself(5), document, chunk=chunk)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=4 * EPSILON, atol=0)


@pytest.mark.parametrize("one_reading", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_figures_of_every_length(chunk: int, one_reading: bool) -> None:
    document = [0, 0, 0, 1, 2, 2, 3, 4]
    by_hand = {
        2: (REPEATED, REPEATED),  # token 1, and the half is the same
        4: ((2 * REPEATED + OTHER) / 3, (REPEATED + OTHER) / 2),  # tokens 2 and 3
        8: ((3 * REPEATED + 4 * OTHER) / 7, (3 * OTHER + REPEATED) / 4),  # tokens 4 to 7
    }
    model = RepeatsItself(5)
    found = list(perplexity.document_losses(model, document, [8, 2, 4, 4], chunk=chunk, one_reading=one_reading))
    assert [figures.length for figures in found] == [2, 4, 8]
    for figures in found:
        assert (figures.whole, figures.second_half) == pytest.approx(by_hand[figures.length], rel=4 * EPSILON)
    assert sum(model.lengths_of_calls) == (7 if one_reading else 1 + 3 + 7)


def test_perplexity_is_the_exponential_of_the_mean_of_document_means() -> None:
    assert perplexity.perplexity([REPEATED, OTHER]) == pytest.approx(4.0)  # the geometric mean of 2 and 8
    assert perplexity.perplexity([1000.0]) == math.inf


def test_short_figures_come_before_the_long_text_is_read() -> None:
    model = RepeatsItself(5)
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
        # Sums of the model's width in float32, in another order.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=64 * EPSILON * logits.abs().max().item())


def test_greedy_answer_is_that_of_one_pass_at_a_time() -> None:
    model = tiny_model("llama")
    prompt = tokens(1, 50)[0].tolist()
    expected: list[int] = []
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(input_ids=torch.tensor([prompt + expected])).logits[0, -1].argmax()))
    assert reading.greedy_answer(model, prompt, 6, chunk=16) == expected
    stop = expected[2]
    assert reading.greedy_answer(model, prompt, 6, chunk=16, end_token=stop) == expected[: expected.index(stop)]
