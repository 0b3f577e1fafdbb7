"""A fixed factor on the real server, of a ``config.json`` and of a model that norms q and k."""

import json

import pytest
from reference import TOLERANCE, difference, logprobs, patched, random_tokens
from tiny_server import NATIVE_LENGTH, Server, save_model
from transformers import Qwen3Config

FACTOR = 4


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixed")
    return folder, save_model(folder, Qwen3Config)


@pytest.fixture(scope="module")
def server(stock):
    folder, _ = stock
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": "mrrope_pro",
        "factor": FACTOR,
        "original_max_position_embeddings": NATIVE_LENGTH,
    }
    config["max_position_embeddings"] = NATIVE_LENGTH * FACTOR
    (folder / "config.json").write_text(json.dumps(config))
    with Server(folder, folder / "log", "--max-total-tokens", "1024") as server:
        yield server


@pytest.mark.parametrize("length", [20, 200])
def test_all_requests_have_the_scale(server, stock, length):
    prompt = random_tokens(length)
    (answer,) = server.generate(prompt, scored=True)
    expected = logprobs(patched(stock[1], "mrrope_pro", FACTOR), prompt)
    assert difference(answer.prompt_logprobs, expected) < TOLERANCE
    assert difference(answer.prompt_logprobs, logprobs(stock[1], prompt)) > 0.1


def test_the_context_is_what_the_table_covers(server):
    too_long = {"input_ids": random_tokens(NATIVE_LENGTH * FACTOR), "sampling_params": {"max_new_tokens": 1}}
    response = server.post("/generate", too_long)
    assert response.status_code == 400
    assert f"context length ({NATIVE_LENGTH * FACTOR} tokens)" in response.text
    assert server.generate(random_tokens(NATIVE_LENGTH * FACTOR - 10), max_new_tokens=1)


def test_another_scale_is_http_400(server):
    body = {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"mrrope_scale": 2}}}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert "mrrope_scale must be 4, the scale of all requests, got 2" in response.text
    assert server.generate([1, 2, 3], custom_params={"mrrope_scale": 4})
