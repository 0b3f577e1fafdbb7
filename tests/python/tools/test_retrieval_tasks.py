"""Retrieval tasks: prompts, depths and scores, on models whose answers are known."""

import re
from pathlib import Path

import pytest
import torch
from byte_llama import byte_tokenizer, random_words
from scripted_models import CopiesFromContext, ScriptedModel
from torch import nn
from transformers import PreTrainedTokenizerFast

from mrrope.evaluation import chunked_reader, documents
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.evaluate import Evaluation
from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.results import Results
from mrrope.evaluation.retrieval_tasks import TASKS


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
