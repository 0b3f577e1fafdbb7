"""The contenders of benchmarks/serving.py: vLLM configures all of them alike but for RoPE."""

import json

import pytest
import serving
from vllm.engine.arg_utils import EngineArgs

from mrrope.serving.rope_settings import served_rope


@pytest.mark.parametrize("shape", serving.SHAPES)
@pytest.mark.parametrize("contender", serving.CONTENDERS)
def test_the_configuration_of_a_contender(tmp_path, shape, contender):
    settings = serving.SHAPES[shape]
    (tmp_path / "config.json").write_text(json.dumps(serving.config_of(settings, layers=1)))
    arguments = serving.engine_arguments(contender, settings)
    config = EngineArgs(str(tmp_path), **arguments).create_engine_config()
    assert config.model_config.max_model_len == serving.MAX_LENGTH
    served = served_rope(config.model_config.hf_config)
    if not contender.startswith("mrrope"):
        assert served is None
        return
    assert served.is_auto == (contender == "mrrope auto")
    assert served.native["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    assert (served.native_length, served.max_length) == (serving.NATIVE_LENGTH, serving.MAX_LENGTH)


def test_a_batch_and_all_its_steps_fit_the_cache():
    steps = serving.DECODE_STEPS * (serving.DECODE_ROUNDS + serving.WARM_UP_ROUNDS) + serving.DECODE_STEPS
    tokens = max(serving.DECODE_BATCHES) * (serving.CONTEXT + steps)
    for shape in serving.SHAPES.values():
        bytes_per_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        assert max(tokens, serving.MAX_LENGTH) * bytes_per_token < serving.KV_CACHE_BYTES
