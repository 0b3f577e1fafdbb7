"""Scales of a method, and one ready table, on the real server; and what an API does that drops ``custom_params``."""

import pytest
from reference import TOLERANCE, difference, logprobs, patched, random_tokens
from tiny_server import NATIVE_LENGTH, Server, save_model

import mrrope

FACTOR = 4
OPTIONS = ("--max-total-tokens", "1024", "--log-level", "debug")
TABLE = mrrope.frequency_table(
    "mrrope_pow", rotary_dim=16, base=10_000.0, original_max_position=NATIVE_LENGTH, scale=2.0, power=0.5
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("method")


@pytest.fixture(scope="module")
def stock(folder):
    return save_model(folder / "model")


@pytest.fixture(scope="module")
def servers(folder, stock):
    auto = {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": FACTOR, "reserve": 8}
    ready = {"rope_type": "mrrope", "table": TABLE.to_dict()}
    with (
        Server(folder / "model", folder / "auto", *OPTIONS, overrides={"rope_parameters": auto}) as of_method,
        Server(folder / "model", folder / "ready", *OPTIONS, overrides={"rope_parameters": ready}) as of_table,
    ):
        yield of_method, of_table


@pytest.mark.parametrize(("length", "scale"), [(40, 1), (100, 2), (200, 4)])
def test_a_method_has_a_table_for_each_scale(servers, stock, length, scale):
    prompt = random_tokens(length)
    (answer,) = servers[0].generate(prompt, scored=True)
    model = stock if scale == 1 else patched(stock, "mrrope_pro", scale)
    assert difference(answer.prompt_logprobs, logprobs(model, prompt)) < TOLERANCE
    other = patched(stock, "mrrope_pro", 2 if scale == 4 else 4)
    assert difference(answer.prompt_logprobs, logprobs(other, prompt)) > 0.1


@pytest.mark.parametrize("length", [20, 2 * NATIVE_LENGTH - 8])
def test_a_ready_table_serves_all_requests(servers, stock, length):
    prompt = random_tokens(length)
    (answer,) = servers[1].generate(prompt, scored=True)
    assert difference(answer.prompt_logprobs, logprobs(patched(stock, TABLE), prompt)) < TOLERANCE
    assert difference(answer.prompt_logprobs, logprobs(stock, prompt)) > 0.1


@pytest.mark.parametrize(("length", "scale"), [(40, 1), (100, 2)])
def test_messages_get_the_scale_of_their_length(servers, length, scale):
    """Of the API at ``/v1/messages``, in which SGLang drops ``custom_params``: a bad scale is no error."""
    server = servers[0]
    messages = [{"role": "user", "content": "a" * length}]
    body = {"model": "m", "max_tokens": 4, "messages": messages, "custom_params": {"mrrope_scale": 3}}
    server.wait()
    before = server.log_end()
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    assert server.logged(r"mrrope: request \S+ at scale (\d+), max_new_tokens 4", before) == [str(scale)]
