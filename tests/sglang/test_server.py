"""A scale per request on the real server: log-probabilities, cache, admission, chunks and retraction."""

import json
import re

import pytest
import torch
from reference import TOLERANCE, difference, logprobs, patched, random_tokens
from tiny_server import NATIVE_LENGTH, Server, save_model

import mrrope

METHODS = {2.0: "mrrope_uni", 4.0: "mrrope_pro", 8.0: "yarn_ratio"}
RESERVE = 8
CHUNK = 64
POOL = 1200
"""Tokens of the cache."""


def table(scale: float) -> mrrope.FrequencyTable:
    return mrrope.frequency_table(
        METHODS[scale], rotary_dim=16, base=10_000.0, original_max_position=NATIVE_LENGTH, scale=scale
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def models(folder):
    """The models that the server must equal, by scale."""
    stock = save_model(folder / "model")
    return {1.0: stock} | {scale: patched(stock, table(scale)) for scale in METHODS}


@pytest.fixture(scope="module")
def server(folder, models):
    tables = [table(scale).to_dict() for scale in METHODS]
    overrides = {"rope_parameters": {"rope_type": "mrrope", "table": tables, "reserve": RESERVE}}
    # The schedule takes requests that the pool cannot hold to their ends, and so has to retract some.
    options = (
        f"--enable-metrics --chunked-prefill-size {CHUNK} --max-total-tokens {POOL} --schedule-conservativeness 0.05"
    )
    with Server(folder / "model", folder / "log", *options.split(), overrides=overrides) as server:
        yield server


def named(scale):
    return {"mrrope_scale": scale}


@pytest.mark.parametrize(("length", "scale"), [(40, 1.0), (100, 2.0), (200, 4.0), (400, 8.0)])
def test_a_request_gets_the_smallest_scale_that_covers_it(server, models, length, scale):
    prompt = random_tokens(length)
    (answer,) = server.generate(prompt, scored=True)
    assert difference(answer.prompt_logprobs, logprobs(models[scale], prompt)) < TOLERANCE
    other = models[4.0 if scale == 2.0 else 2.0]
    assert difference(answer.prompt_logprobs, logprobs(other, prompt)) > 0.1


@pytest.mark.parametrize("scale", [1, 2, 4.0, "8"])
def test_a_request_names_its_scale(server, models, scale):
    prompt = random_tokens(50)
    (answer,) = server.generate(prompt, scored=True, custom_params=named(scale))
    assert difference(answer.prompt_logprobs, logprobs(models[float(scale)], prompt)) < TOLERANCE


def test_new_tokens_count(server, models):
    """The table of a request does not change while it grows."""
    prompt = random_tokens(60)
    (answer,) = server.generate(prompt, scored=True, max_new_tokens=30)
    everything = logprobs(models[2.0], [*prompt, *answer.tokens])
    assert difference(torch.cat([answer.prompt_logprobs, answer.logprobs]), everything) < TOLERANCE


def test_requests_of_all_scales_share_a_batch(server, models):
    prompts = [random_tokens(length, seed=length) for length in (30, 100, 200, 400, 35)]
    scales = [1.0, 2.0, 4.0, 8.0, 4.0]
    server.wait()
    before = server.log_end()
    answers = server.generate(*prompts, max_new_tokens=20, custom_params=[None, None, None, None, named(4)])
    for prompt, scale, answer in zip(prompts, scales, answers, strict=True):
        expected = logprobs(models[scale], [*prompt, *answer.tokens])[len(prompt) - 1 :]
        assert difference(answer.logprobs, expected) < TOLERANCE
    assert server.logged(r"Decode batch, #running-req: [2-5]|Prefill batch, #new-seq: [2-5]", before)


def test_a_long_prompt_is_prefilled_in_chunks(server, models):
    prompt = random_tokens(300, seed=3)
    server.wait()
    before = server.log_end()
    (answer,) = server.generate(prompt, scored=True)
    assert difference(answer.prompt_logprobs, logprobs(models[8.0], prompt)) < TOLERANCE
    chunks = [int(size) for size in server.logged(r"Prefill batch.*?#new-token: (\d+)", before)]
    assert chunks[: 300 // CHUNK] == [CHUNK] * (300 // CHUNK)


def test_retracted_requests_keep_their_scales(server, models):
    """Retracted requests are prefilled again, with the tokens that they have generated."""
    server.wait()
    before = server.log_end()
    prompts = [random_tokens(40, seed=10 + i) for i in range(8)]
    scales = [4.0, 8.0] * 4
    custom = [named(scale) for scale in scales]
    answers = server.generate(*prompts, max_new_tokens=200, custom_params=custom)
    assert server.logged("Retract requests", before)
    for prompt, scale, answer in zip(prompts, scales, answers, strict=True):
        assert len(answer.tokens) == 200
        expected = logprobs(models[scale], [*prompt, *answer.tokens])[len(prompt) - 1 :]
        assert difference(answer.logprobs, expected) < TOLERANCE


# The radix cache


def cached(server, prompt, **body):
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, **body.pop("sampling_params", {})}, **body}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]["cached_tokens"]


def test_cached_keys_are_shared_within_a_scale_only(server):
    prompt = random_tokens(50, seed=20)
    for scale in (1, 2, 4):
        assert cached(server, prompt, sampling_params={"custom_params": named(scale)}) == 0
        assert cached(server, prompt, sampling_params={"custom_params": named(scale)}) == len(prompt) - 1
    assert cached(server, prompt) == len(prompt) - 1, "the stock scale, without a salt"


@pytest.mark.parametrize("scale", [1, 2])
def test_an_extra_key_of_the_user_still_counts(server, scale):
    prompt = random_tokens(50, seed=30 + scale)
    params = {"custom_params": named(scale)}
    for extra_key in ("a", "b", "mrrope:1:a"):
        assert cached(server, prompt, sampling_params=params, extra_key=extra_key) == 0
        assert cached(server, prompt, sampling_params=params, extra_key=extra_key) == len(prompt) - 1


# Admission


PATHS = {
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"model": "m", "prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4},
}


def with_custom_params(path, custom_params):
    body = PATHS[path]
    if path == "/generate":
        return body | {"sampling_params": body["sampling_params"] | {"custom_params": custom_params}}
    return body | {"custom_params": custom_params}


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_scale_is_http_400(server, path):
    response = server.post(path, with_custom_params(path, named(3)))
    assert response.status_code == 400
    assert "mrrope_scale must be one of 1, 2, 4, 8, got 3" in response.text
    assert server.post(path, with_custom_params(path, named(8))).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_scale_of_a_stream_is_told(server, path):
    """SGLang validates streams of the OpenAI API before it answers, those of its own after."""
    response = server.post(path, with_custom_params(path, named(3)) | {"stream": True})
    assert response.status_code == (200 if path == "/generate" else 400)
    (body,) = re.findall(r"^(?:data: )?(\{.*\})$", response.text, re.MULTILINE)
    error = json.loads(body)
    assert error.get("error", error)["code"] == 400
    assert "mrrope_scale must be one of 1, 2, 4, 8, got 3" in error.get("error", error)["message"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"custom_params": named("large")}, "mrrope_scale must be one of 1, 2, 4, 8, got 'large'"),
        ({"custom_params": named(True)}, "mrrope_scale must be one of 1, 2, 4, 8, got True"),
        ({"custom_params": named(1)}, "mrrope_scale must be one of 2, 4, 8 for a prompt of 100 tokens and 4 new"),
        ({"custom_params": [4]}, r"custom_params must be an object, got \[4\]"),
        ({"beam_width": 2}, "beam_width must be 1 with rope_parameters' factor 'auto', got 2"),
    ],
)
def test_what_cannot_be_served_is_http_400(server, params, message):
    body = {"input_ids": random_tokens(100), "sampling_params": {"max_new_tokens": 4} | params}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"])


def test_sessions_are_http_400(server):
    body = {"input_ids": [1, 2, 3], "session_params": {"id": "s"}, "sampling_params": {"max_new_tokens": 1}}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert "session_params cannot be served" in response.text


@pytest.mark.parametrize(
    ("length", "custom", "new_tokens"),
    [
        (50, {}, NATIVE_LENGTH - 50),
        (60, {}, 2 * NATIVE_LENGTH - 60),  # RESERVE new tokens do not fit the native length
        (50, named(2), 2 * NATIVE_LENGTH - 50),
        (60, named(1), NATIVE_LENGTH - 60),
    ],
)
def test_new_tokens_are_capped_to_what_the_scale_covers(server, length, custom, new_tokens):
    (answer,) = server.generate(random_tokens(length), max_new_tokens=None, custom_params=custom)
    assert len(answer.tokens) == new_tokens
    assert answer.finish_reason == "length"


def test_users_do_not_choose_a_table_by_its_index(server, models):
    prompt = random_tokens(40)
    (answer,) = server.generate(prompt, scored=True, custom_params={"mrrope_table": 3})
    assert difference(answer.prompt_logprobs, logprobs(models[1.0], prompt)) < TOLERANCE


def test_samples_of_a_request_share_its_scale(server, models):
    prompt = random_tokens(40)
    body = {
        "input_ids": prompt,
        "sampling_params": {"n": 2, "max_new_tokens": 30, "custom_params": named(4)},
        "return_logprob": True,
    }
    answers = server.post("/generate", body).json()
    assert len(answers) == 2
    for answer in answers:
        found, tokens = zip(*(pair[:2] for pair in answer["meta_info"]["output_token_logprobs"]), strict=True)
        expected = logprobs(models[4.0], [*prompt, *tokens])[len(prompt) - 1 :]
        assert difference(torch.tensor(found), expected) < TOLERANCE


def test_requests_are_counted_by_scale(server):
    def counted():
        pairs = re.findall(r'mrrope:requests_total\{.*?scale="(\d+)"\} (\d+)', server.get("/metrics").text)
        return {scale: int(count) for scale, count in pairs}

    server.generate(random_tokens(200))
    before = counted()
    server.generate(random_tokens(200), random_tokens(210))
    assert counted() == before | {"4": before["4"] + 2}
    server.get("/health_generate")
    assert counted() == before | {"4": before["4"] + 2}, "a health check is no request"


def test_the_log_names_the_scales_at_start(server):
    server.generate(random_tokens(10))
    steps = "64 tokens at scale 1, 128 tokens at scale 2, 256 tokens at scale 4, 512 tokens at scale 8"
    log = server.log.read_text()
    announced = log.index(f"mrrope chooses a table for each request: {steps}")
    assert announced < log.index("Application startup complete")
    hook = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
    assert f"Applied 1 hook(s) to {hook} (from: plugin=mrrope" in log, "what test_export.py finds in no other log"
    assert re.search(r"disable_overlap_schedule['\"]?[=:] ?False", log)
