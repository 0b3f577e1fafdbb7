"""Requests that outgrow their scale under asynchronous scheduling, beside the patched transformers model."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_server import Server
from test_auto_scale_over_http import BLOCKS, LENGTH, SCALES, is_idle
from tiny_model import AUTO, is_greedy, parts_by_scale, random_tokens


@pytest.fixture(scope="module")
def server(model: Path, start: Callable[..., Server]) -> Server:
    options = ("--max-num-seqs=8", "--max-num-batched-tokens=96", f"--num-gpu-blocks-override={BLOCKS}")
    path = [str(Path(__file__).parent / "async_on_cpu"), os.environ.get("PYTHONPATH")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    server = start(model, *options, "--async-scheduling", rope_parameters=AUTO, environment=environment).wait()
    assert "Asynchronous scheduling is enabled" in server.log.read_text()
    return server


def grown(server: Server) -> list[float]:
    """Return the requests that grew to each scale."""
    name = "mrrope:grown_requests_total"
    return [server.metric(name, model_name="tiny", scale=str(scale)) for scale in SCALES]


def test_an_answer_grows(server: Server) -> None:
    """Alone, so that nothing is scheduled while its last step at a scale is in flight; and by prefills of chunks."""
    before, preemptions = grown(server), server.metric("vllm:num_preemptions_total")
    prompt = random_tokens(20, seed=1)
    (choice,) = server.complete(prompt, max_tokens=LENGTH - 20).choices
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == LENGTH - 20
    parts = parts_by_scale(prompt, choice.token_ids, scale=1)
    assert [scale for scale, _, _ in parts] == list(SCALES)
    for scale, text, new in parts:
        assert is_greedy(text, new, scale)
    assert server.metric("vllm:num_preemptions_total") == preemptions + len(SCALES) - 1
    assert grown(server) == [*before[:-1], before[-1] + 1]


def test_answers_grow_while_others_are_preempted_and_aborted(server: Server) -> None:
    before = grown(server)
    prompts = [random_tokens(length, seed=length) for length in (20, 100, 200)]
    stream = iter(server.complete(random_tokens(30, seed=9), max_tokens=LENGTH - 30, stream=True))
    with ThreadPoolExecutor(len(prompts)) as threads:
        tasks = [threads.submit(server.complete, prompt, max_tokens=LENGTH - len(prompt)) for prompt in prompts]
        for _ in range(100):
            next(stream)
        stream.close()
        choices = [task.result().choices[0] for task in tasks]
    for prompt, choice, first in zip(prompts, choices, (1, 4, 4), strict=True):
        assert len(prompt) + len(choice.token_ids) == LENGTH
        for scale, text, new in parts_by_scale(prompt, choice.token_ids, first):
            assert is_greedy(text, new, scale)
    assert is_idle(server)
    # The stream, too, which was closed past its first scale.
    assert sum(grown(server)) == sum(before) + len(prompts) + 1
