"""A ladder of table sets through vLLM's HTTP server, beside the patched transformers model; and a restart."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, prompt_logprobs
from tiny_model import TOLERANCE, is_greedy, of_next_tokens, random_tokens, table_set

SCALES = (1, 2, 4)
BLOCK = 32


@pytest.fixture(scope="module")
def start_ladder(
    model: Path, start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Server]:
    """Starts a server of the sets, whose files are beside no model."""
    folder = tmp_path_factory.mktemp("sets")
    for scale in SCALES[1:]:
        table_set(scale).save(folder / f"{scale}x.json")
    paths = [str(folder / f"{scale}x.json") for scale in SCALES[1:]]
    options = ("--max-num-seqs=4", "--max-num-batched-tokens=128", "--enable-prompt-tokens-details")
    parameters = {"rope_type": "mrrope", "table": paths, "reserve": 32}
    return lambda: start(model, *options, rope_parameters=parameters)


@pytest.fixture(scope="module")
def server(start_ladder: Callable[[], Server]) -> Server:
    return start_ladder().wait()


@pytest.mark.parametrize("scale", SCALES)
def test_log_probabilities_are_those_of_the_set_of_a_scale(server: Server, scale: int) -> None:
    prompt = random_tokens(63 * scale, seed=scale)
    (choice,) = server.complete(prompt, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices

    def error(*, has_sets: bool) -> float:
        known = of_next_tokens(prompt, scale, has_sets=has_sets)
        return float((known - known.new_tensor(prompt_logprobs(choice))).abs().max())

    assert error(has_sets=True) <= TOLERANCE
    assert scale == 1 or error(has_sets=False) > 100 * TOLERANCE


def test_requests_of_all_scales_at_once(server: Server) -> None:
    prompts = [random_tokens(length, seed=20 + length) for length in (20, 80, 180, 30)]

    def ask(prompt: list[int]) -> Any:
        return server.complete(prompt, max_tokens=20).choices[0]

    with ThreadPoolExecutor(len(prompts)) as threads:
        choices = list(threads.map(ask, prompts))
    for prompt, choice, scale in zip(prompts, choices, (1, 2, 4, 1), strict=True):
        assert len(choice.token_ids) == 20
        assert is_greedy(prompt, choice.token_ids, scale, has_sets=True)


def test_a_restarted_server_answers_alike_from_an_empty_cache(
    server: Server, start_ladder: Callable[[], Server]
) -> None:
    prompts = [random_tokens(length, seed=40 + length) for length in (40, 100, 200)]

    def answers(server: Server) -> tuple[list[Any], list[int]]:
        """Return what a server computes, each step for one request, and the tokens that it finds in its cache."""
        found = [server.complete(prompt, max_tokens=10, logprobs=1) for prompt in prompts]
        choices = [answer.choices[0] for answer in found]
        details = [answer.usage.prompt_tokens_details for answer in found]
        cached = [0 if detail is None else detail.cached_tokens or 0 for detail in details]
        return [(choice.token_ids, choice.logprobs.token_logprobs) for choice in choices], cached

    before, empty = answers(server)
    _, full = answers(server)
    assert server.end() == 0
    after, empty_again = answers(start_ladder().wait())
    assert after == before
    assert empty == empty_again == [0, 0, 0]
    assert full == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
