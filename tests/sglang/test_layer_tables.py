"""Tables per layer and head on the real server, with a scale per request."""

import pytest
from reference import TOLERANCE, difference, logprobs, patched, random_tokens, shortfall
from tiny_server import GREEDY, NATIVE_LENGTH, Server, save_model

import mrrope

CHUNK = 64


def table(scale, power):
    settings = {"rotary_dim": 16, "base": 10_000.0, "original_max_position": NATIVE_LENGTH}
    return mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings)


def table_set(scale):
    """Return a set in which no two layers or heads are alike, and query heads of one layer have factors."""
    first, second = ([table(scale, power) for power in powers] for powers in ([0.0, 3.0], [1.0, 0.2]))
    return mrrope.TableSet([mrrope.HeadTables(first), mrrope.HeadTables(second, [2.0, 0.5, 1.0, 3.0])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def stock(folder):
    return save_model(folder / "model")


@pytest.fixture(scope="module")
def server(folder, stock):
    tables = [table_set(scale).to_dict() for scale in (2.0, 4.0)]
    overrides = {"rope_parameters": {"rope_type": "mrrope", "table": tables, "reserve": 8}}
    # SGLang mixes decoding into prefills of requests without log-probabilities only.
    options = f"--max-total-tokens 1024 --chunked-prefill-size {CHUNK} --enable-mixed-chunk"
    with Server(folder / "model", folder / "log", *options.split(), overrides=overrides) as server:
        yield server


def test_layers_and_heads_rotate_by_their_own_tables(server, stock):
    prompts = {1.0: random_tokens(40), 2.0: random_tokens(100), 4.0: random_tokens(200)}
    answers = server.generate(*prompts.values(), scored=True)
    for (scale, prompt), answer in zip(prompts.items(), answers, strict=True):
        model = stock if scale == 1.0 else patched(stock, table_set(scale))
        assert difference(answer.prompt_logprobs, logprobs(model, prompt)) < TOLERANCE
        assert difference(answer.prompt_logprobs, logprobs(patched(stock, table(4.0, 0.5)), prompt)) > 0.1


def test_a_step_of_prompts_and_decoding_has_the_tables_of_both(server, stock):
    """The short requests decode beside the chunks of the long prompt."""
    prompts = {1.0: random_tokens(20, seed=5), 2.0: random_tokens(90, seed=6), 4.0: random_tokens(230, seed=7)}
    body = {"input_ids": list(prompts.values()), "sampling_params": GREEDY | {"max_new_tokens": 12}}
    server.wait()
    before = server.log_end()
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    # Tokens of running requests are taken from a chunk only where they are decoded with it.
    steps = server.logged(r"Prefill batch.*?#new-token: (\d+).*?#running-req: (\d+)", before)
    assert {(CHUNK - running, running) for running in (1, 2)} & {tuple(map(int, step)) for step in steps}, steps
    for (scale, prompt), answer in zip(prompts.items(), response.json(), strict=True):
        model = stock if scale == 1.0 else patched(stock, table_set(scale))
        assert shortfall(model, prompt, answer["output_ids"]) < TOLERANCE
        assert shortfall(patched(stock, table(4.0, 0.5)), prompt, answer["output_ids"]) > 0.1
