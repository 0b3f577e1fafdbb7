"""``mrrope export --engine sglang`` on the real server, with the plugin, which leaves it alone, and without."""

import json

import pytest
from reference import difference, logprobs, patched, random_tokens
from tiny_server import NATIVE_LENGTH, Server, save_model

import mrrope

SCALE = 4
# SGLang's cosines are of float32 angles: at position 256 an angle is off by up to 256 * 2**-24 of its radians.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    model = save_model(folder)
    exported = mrrope.export_config(model.config, "mrrope_pro", scale=SCALE, engine="sglang")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | exported))
    return folder, model


@pytest.fixture(scope="module")
def servers(stock):
    folder, _ = stock
    options = ("--max-total-tokens", "1024")
    with (
        Server(folder, folder / "with", *options) as with_plugin,
        Server(folder, folder / "without", *options, plugins="none") as without,
    ):
        yield with_plugin, without


@pytest.mark.parametrize("length", [30, NATIVE_LENGTH * SCALE - 10])
def test_the_exported_configuration_is_right(servers, stock, length):
    prompt = random_tokens(length)
    (answer,) = servers[1].generate(prompt, scored=True)
    expected = logprobs(patched(stock[1], "mrrope_pro", SCALE), prompt)
    assert difference(answer.prompt_logprobs, expected) < TOLERANCE
    assert difference(answer.prompt_logprobs, logprobs(stock[1], prompt)) > 0.1


def test_a_model_without_our_types_is_left_alone(servers):
    prompts = [random_tokens(length, seed=length) for length in (20, 100, 200)]
    for prompt in prompts:
        (found,), (expected,) = (server.generate(prompt, scored=True, max_new_tokens=20) for server in servers)
        assert found.tokens == expected.tokens
        assert difference(found.prompt_logprobs, expected.prompt_logprobs) == 0.0
    for server in servers:  # the hooks of a served model are logged, as test_server.py asserts
        assert "mrrope" not in server.log.read_text().replace(str(server.log.parent), "")
