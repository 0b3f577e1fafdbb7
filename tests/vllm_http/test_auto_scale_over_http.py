"""A scale per request through vLLM's HTTP server, beside the patched transformers model."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import ANSWER_TIMEOUT, Server, prompt_logprobs
from openai import APIError, BadRequestError
from tiny_model import AUTO, TOLERANCE, is_greedy, of_next_tokens, parts_by_scale, random_tokens

SCALES = (1, 2, 4, 8, 16)
BLOCK = 32
BLOCKS = 40
"""Of the KV cache: one request of the whole context length takes 32."""
IDLE_TIMEOUT = 60


@pytest.fixture(scope="module")
def server(model: Path, start: Callable[..., Server]) -> Server:
    options = ("--max-num-seqs=8", "--max-num-batched-tokens=256", f"--num-gpu-blocks-override={BLOCKS}")
    return start(model, *options, "--enable-prompt-tokens-details", rope_parameters=AUTO).wait()


def largest_error(prompt: Sequence[int], choice: Any, scale: float) -> float:
    known = of_next_tokens(prompt, scale)
    return float((known - known.new_tensor(prompt_logprobs(choice))).abs().max())


def scale_of(server: Server, prompt: Any, **parameters: Any) -> str | None:
    """Return the header of an answer."""
    body = {"max_tokens": 1} | parameters
    answer = server.client.completions.with_raw_response.create(model="tiny", prompt=prompt, **body)
    return answer.headers.get("x-mrrope-scale")


def is_idle(server: Server) -> bool:
    """Whether the engine holds neither a request nor a block, soon."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + IDLE_TIMEOUT
    while any(server.metric(name) > 0 for name in names):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(("length", "max_tokens", "scale"), [(10, 54, 1), (10, 55, 2), (200, 56, 4), (60, 900, 16)])
def test_the_smallest_scale_that_covers_a_request(server: Server, length: int, max_tokens: int, scale: int) -> None:
    prompt = random_tokens(length, seed=length)
    before = server.metric("mrrope:requests_total", model_name="tiny", scale=str(scale))
    every_token = {"stop_token_ids": list(range(258))}
    assert scale_of(server, prompt, max_tokens=max_tokens, extra_body=every_token) == str(scale)
    assert server.metric("mrrope:requests_total", model_name="tiny", scale=str(scale)) == before + 1


@pytest.mark.parametrize("scale", SCALES)
def test_prompt_log_probabilities(server: Server, scale: int) -> None:
    prompt = random_tokens(63 * scale, seed=scale)
    (choice,) = server.complete(prompt, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices
    assert largest_error(prompt, choice, scale) <= TOLERANCE


@pytest.mark.parametrize("scale", SCALES[1:])
def test_a_named_scale(server: Server, scale: int) -> None:
    prompt = random_tokens(40, seed=1)
    (choice,) = server.complete(prompt, scale=scale, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices
    assert largest_error(prompt, choice, scale) <= TOLERANCE < largest_error(prompt, choice, 1)


def test_answers_are_greedy(server: Server) -> None:
    prompt = random_tokens(30, seed=2)
    (choice,) = server.complete(prompt, max_tokens=90).choices
    assert len(choice.token_ids) == 90
    assert choice.finish_reason == "length"
    assert is_greedy(prompt, choice.token_ids, scale=2)


def test_text_and_chat(server: Server) -> None:
    text = "Two roads diverged in a yellow wood"
    tokens = [0, *_bytes_as_tokens(server, text)]
    (choice,) = server.complete(text, max_tokens=8).choices
    assert is_greedy(tokens, choice.token_ids, scale=1)
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        max_tokens=40,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert len(answer.prompt_token_ids) in (len(text) + 1, len(text) + 2)  # the template's line end, and perhaps <s>
    assert is_greedy(answer.prompt_token_ids, answer.choices[0].token_ids, scale=2)


def _bytes_as_tokens(server: Server, text: str) -> list[int]:
    body = json.dumps({"model": "tiny", "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{server.url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as answer:
        return json.load(answer)["tokens"]


def test_a_stream(server: Server) -> None:
    prompt = random_tokens(100, seed=3)
    with server.client.completions.with_streaming_response.create(
        model="tiny", prompt=prompt, max_tokens=1, stream=True
    ) as answer:
        assert answer.headers["x-mrrope-scale"] == "2"
        answer.read()
    chunks = list(server.complete(prompt, max_tokens=20, stream=True))
    answer = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
    assert len(answer) == 20
    assert is_greedy(prompt, answer, scale=2)


def test_samples_share_a_scale(server: Server) -> None:
    prompt = random_tokens(100, seed=4)
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = server.client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, n=3, max_tokens=100, logprobs=0, extra_body=body
    )
    choices = answer.parse().choices
    assert answer.headers["x-mrrope-scale"] == "4"
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        known = of_next_tokens([*prompt, *choice.token_ids], 4)[len(prompt) - 1 :]
        assert (known - known.new_tensor(choice.logprobs.token_logprobs)).abs().max() <= TOLERANCE


def test_several_prompts(server: Server) -> None:
    prompts = [random_tokens(length, seed=length) for length in (20, 100, 300)]
    assert scale_of(server, prompts) == "1, 2, 8"
    assert scale_of(server, 11 * prompts) == "1, 2, 8"
    choices = server.complete(prompts, max_tokens=10).choices
    for prompt, choice, scale in zip(prompts, choices, (1, 2, 8), strict=True):
        assert is_greedy(prompt, choice.token_ids, scale)


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_beam_search(server: Server, path: str) -> None:
    """Every beam of every step is a request of the engine: they are one of the user's at each scale."""
    body = {"n": 3, "max_tokens": 20, "extra_body": {"use_beam_search": True, "ignore_eos": True}}
    if path == "chat":
        create = server.client.chat.completions.with_raw_response.create
        body["messages"] = [{"role": "user", "content": 55 * "a"}]
    else:
        create = server.client.completions.with_raw_response.create
        body["prompt"] = random_tokens(55, seed=11)

    def counted() -> list[float]:
        return [server.metric("mrrope:requests_total", scale=str(scale)) for scale in SCALES]

    before = counted()
    answer = create(model="tiny", **body)
    assert answer.headers["x-mrrope-scale"] == "1, 2"
    assert len(answer.parse().choices) == 3
    assert [new - old for new, old in zip(counted(), before, strict=True)] == [1, 1, 0, 0, 0]
    body["extra_body"]["vllm_xargs"] = {"mrrope_scale": 4}
    with pytest.raises(BadRequestError, match="mrrope_scale must not be given with use_beam_search"):
        create(model="tiny", **body)
    assert is_idle(server)


@pytest.mark.parametrize("scale", [3, "a", 1, True])
def test_a_scale_that_cannot_serve(server: Server, scale: Any) -> None:
    prompt, message = random_tokens(100, seed=5), r"mrrope_scale must be one of .*2, 4, 8, 16"
    with pytest.raises(BadRequestError, match=message) as refused:
        server.complete(prompt, scale=scale, max_tokens=10)
    assert refused.value.status_code == 400
    with pytest.raises(APIError, match=message):
        list(server.complete(prompt, scale=scale, max_tokens=10, stream=True))
    assert is_idle(server)
    assert "Exception in ASGI application" not in server.log.read_text()  # after which the connection ends


def test_messages_refuse_a_scale(server: Server) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}

    def status(**more: Any) -> tuple[int, str]:
        data = json.dumps({**body, **more}).encode()
        request = urllib.request.Request(f"{server.url}/v1/messages", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert status()[0] == 200
    code, message = status(vllm_xargs={"mrrope_scale": 4})
    assert code == 400
    assert "/v1/messages" in message


def test_requests_at_once(server: Server) -> None:
    cases = [(20, 30, 1), (90, 30, 2), (200, 30, 4), (500, 10, 8), (40, 20, 1), (130, 60, 4)]
    prompts = [random_tokens(length, seed=100 + length) for length, _, _ in cases]

    def ask(case: int) -> Any:
        return server.complete(prompts[case], max_tokens=cases[case][1]).choices[0]

    with ThreadPoolExecutor(len(cases)) as threads:
        choices = list(threads.map(ask, range(len(cases))))
    for prompt, choice, (_, max_tokens, scale) in zip(prompts, choices, cases, strict=True):
        assert len(choice.token_ids) == max_tokens
        assert is_greedy(prompt, choice.token_ids, scale)


def test_prefixes_are_cached_per_scale(server: Server) -> None:
    prompt = random_tokens(100, seed=6)

    def cached(scale: int) -> int:
        answer = server.complete(prompt, scale=scale, max_tokens=1, extra_body={"prompt_logprobs": None})
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    shared = len(prompt) // BLOCK * BLOCK
    assert [cached(scale) for scale in (2, 4, 2, 4, 8)] == [0, 0, shared, shared, 0]


def test_an_aborted_stream(server: Server) -> None:
    prompt = random_tokens(100, seed=7)
    generated = server.metric("vllm:generation_tokens_total")
    stream = server.complete(prompt, max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    assert is_idle(server)
    assert server.metric("vllm:generation_tokens_total") - generated < 900
    test_answers_are_greedy(server)


def test_preempted_requests(server: Server) -> None:
    """Four requests that end with 16 blocks each, where there are 39."""
    prompts = [random_tokens(300, seed=200 + case) for case in range(4)]
    preemptions = server.metric("vllm:num_preemptions_total")
    choices = server.complete(prompts, max_tokens=200).choices
    assert server.metric("vllm:num_preemptions_total") > preemptions
    for prompt, choice in zip(prompts, choices, strict=True):
        assert len(choice.token_ids) == 200
        assert is_greedy(prompt, choice.token_ids, scale=8)
    assert is_idle(server)


# Requests that outgrow their scale

LENGTH = 1024
"""Of the longest request; one without max_tokens, past the end of text, writes up to it."""


def test_an_answer_grows(server: Server) -> None:
    preemptions = server.metric("vllm:num_preemptions_total")
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Two roads diverged"}],
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    prompt, (choice,) = answer.prompt_token_ids, answer.choices
    assert choice.finish_reason == "length"
    assert len(prompt) + len(choice.token_ids) == LENGTH
    assert server.metric("vllm:num_preemptions_total") == preemptions + len(SCALES) - 1
    parts = parts_by_scale(prompt, choice.token_ids, scale=1)
    assert [scale for scale, _, _ in parts] == list(SCALES)
    for scale, before, new in parts:
        assert is_greedy(before, new, scale)
    # A request that continues the text writes the same.
    for _, before, new in parts[1:3]:
        assert server.complete(before, max_tokens=len(new)).choices[0].token_ids == new


def test_answers_grow_while_others_are_preempted(server: Server) -> None:
    prompts = [random_tokens(length, seed=300 + length) for length in (20, 400)]
    with ThreadPoolExecutor(2) as threads:
        tasks = [threads.submit(server.complete, prompt, max_tokens=LENGTH - len(prompt)) for prompt in prompts]
        choices = [task.result().choices[0] for task in tasks]
    for prompt, choice, first in zip(prompts, choices, (1, 8), strict=True):
        assert len(prompt) + len(choice.token_ids) == LENGTH
        for scale, before, new in parts_by_scale(prompt, choice.token_ids, first):
            assert is_greedy(before, new, scale)
    assert is_idle(server)


def test_samples_grow(server: Server) -> None:
    prompt = random_tokens(20, seed=8)
    choices = server.complete(
        prompt, max_tokens=LENGTH - 20, n=3, temperature=1, logprobs=0, extra_body={"stop_token_ids": [7]}
    ).choices
    assert max(len(choice.token_ids) for choice in choices) > 150  # others may end earlier
    for choice in choices:
        known = [
            of_next_tokens([*before, *new], scale)[len(before) - 1 :]
            for scale, before, new in parts_by_scale(prompt, choice.token_ids, scale=1)
        ]
        written = choice.logprobs.token_logprobs
        assert (torch.cat(known) - torch.tensor(written)).abs().max() <= TOLERANCE


def test_a_grown_answer_is_cached_at_its_scale(server: Server) -> None:
    prompt = random_tokens(20, seed=9)
    (choice,) = server.complete(prompt, max_tokens=LENGTH - 20).choices
    text = [*prompt, *choice.token_ids[:400]]
    # The last scale first, of which all blocks are still there; those of the scales before it may be.
    for scale in reversed(SCALES[-2:]):
        answer = server.complete(text, scale=scale, max_tokens=20)
        details = answer.usage.prompt_tokens_details
        assert is_greedy(text, answer.choices[0].token_ids, scale)
        if scale == SCALES[-1]:
            assert details.cached_tokens == len(text) // BLOCK * BLOCK


def test_a_named_scale_does_not_grow(server: Server) -> None:
    prompt = random_tokens(20, seed=10)
    (choice,) = server.complete(prompt, scale=2, max_tokens=LENGTH - 20).choices
    assert choice.finish_reason == "length"
    assert len(prompt) + len(choice.token_ids) == 128
    assert is_greedy(prompt, choice.token_ids, scale=2)
