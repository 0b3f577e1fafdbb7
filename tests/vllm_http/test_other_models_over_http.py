"""Models without a scale per request through vLLM's HTTP server, and servers that must not start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, prompt_logprobs
from openai import BadRequestError
from tiny_model import METHOD, TOLERANCE, is_greedy, log_probabilities, random_tokens

SHORT = ("--max-num-seqs=4", "--max-num-batched-tokens=256")
PROMPTS = [random_tokens(length, seed=length) for length in (5, 20, 40)]


def answers_one_by_one(server: Server) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities, which two servers compute bit by bit alike: each step has one request."""
    choices = [server.complete(prompt, max_tokens=20, logprobs=1).choices[0] for prompt in PROMPTS]
    return [(choice.token_ids, choice.logprobs.token_logprobs) for choice in choices]


def answers_at_once(server: Server) -> tuple[list[list[int]], list[float]]:
    """Return tokens, and log-probabilities of prompts and answers, whose last bits depend on who shares a step."""
    choices = server.complete(PROMPTS, max_tokens=24, logprobs=1, extra_body={"prompt_logprobs": 0}).choices
    numbers = [number for choice in choices for number in (*prompt_logprobs(choice), *choice.logprobs.token_logprobs)]
    return [choice.token_ids for choice in choices], numbers


def test_a_stock_model_is_served_as_without_plugins(model: Path, start: Callable[..., Server]) -> None:
    servers = [start(model, *SHORT, environment=environment) for environment in ({}, {"VLLM_PLUGINS": ""})]
    with_plugin, without = [answers_one_by_one(server.wait()) for server in servers]
    assert with_plugin == without
    (tokens, numbers), (known_tokens, known_numbers) = [answers_at_once(server) for server in servers]
    assert tokens == known_tokens
    assert numbers == pytest.approx(known_numbers, rel=0, abs=TOLERANCE)
    prompt = PROMPTS[1]
    assert is_greedy(prompt, with_plugin[1][0], scale=1)
    header, _ = [
        server.client.completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=1).headers
        for server in servers
    ]
    assert "x-mrrope-scale" not in header
    for server in servers:
        assert server.end() == 0


def test_a_fixed_scale(model: Path, start: Callable[..., Server]) -> None:
    """Also that ``python -m``, whose module is not imported under its name, is hooked."""
    server = start(model, *SHORT, rope_parameters={"rope_type": METHOD, "factor": 4}, is_module=True).wait()
    prompt = random_tokens(100, seed=0)
    answer = server.client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=1, logprobs=1, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.parse().choices
    known = log_probabilities(prompt, 4)[-1, choice.token_ids[0]]
    assert answer.headers["x-mrrope-scale"] == "4"
    assert abs(known - choice.logprobs.token_logprobs[0]) <= TOLERANCE
    assert server.complete(prompt, scale=4, max_tokens=1).choices[0].token_ids == choice.token_ids
    with pytest.raises(BadRequestError, match="mrrope_scale must be 4, the scale of all requests, got 2"):
        server.complete(prompt, scale=2, max_tokens=1)
    with pytest.raises(BadRequestError, match="maximum context length is 256 tokens"):
        server.complete(random_tokens(300, seed=1), max_tokens=1)


@pytest.mark.parametrize(
    ("rope_parameters", "message"),
    [
        ({"rope_type": "mrrope", "table": "no_such_table"}, "table must be the path of a table's .json, the name of"),
        ({"rope_type": METHOD}, "factor must be given with mrrope_uni"),
    ],
)
def test_a_server_that_must_not_start(
    model: Path, start: Callable[..., Server], rope_parameters: dict[str, Any], message: str
) -> None:
    server = start(model, *SHORT, rope_parameters=rope_parameters)
    assert message in server.wait_for_end()
    assert server.end() == 1
