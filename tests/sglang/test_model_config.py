"""Configurations: overrides and files are merged with the model's own parameters; refusals at start."""

import json

import pytest
import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.model_config import ModelConfig, ModelImpl
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs
from tiny_server import NATIVE_LENGTH, save_model
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import mrrope
from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.sglang.model_runner import require_own_implementation

UNI = {"rope_type": "mrrope_uni", "factor": 4}
AUTO = {"rope_type": "mrrope_uni", "factor": "auto", "max_factor": 4}
BASE = 50_000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, rope_parameters={"rope_type": "default", "rope_theta": BASE})
    return folder


def configured(folder, overrides=None, **options):
    """Return the ModelConfig that a server creates."""
    arguments = ServerArgs(
        model_path=str(folder), device="cpu", json_model_override_args=json.dumps(overrides or {}), **options
    )
    return ModelConfig.from_server_args(arguments)


def rope_of(config):
    """Return the rope layer that SGLang's Llama builds."""
    parameters = config.hf_text_config.rope_parameters
    return get_rope(16, 16, config.hf_text_config.max_position_embeddings, parameters["rope_theta"], True, parameters)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("given", "length"), [(UNI, 256), (AUTO, 256), (AUTO | {"max_factor": 8}, 512)])
def test_an_override_keeps_the_base_and_extends_the_context(folder, name, given, length):
    config = configured(folder, {name: given})
    assert config.context_len == length
    assert config.hf_text_config.rope_parameters["rope_theta"] == BASE
    assert config.hf_text_config.max_position_embeddings == NATIVE_LENGTH


def test_a_context_length_of_the_user_is_checked_against_the_tables(folder):
    assert configured(folder, {"rope_parameters": UNI}, context_length=200).context_len == 200
    with pytest.raises(ValueError, match=r"context_length \(300\) is greater than the derived context_length \(256\)"):
        configured(folder, {"rope_parameters": UNI}, context_length=300)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_type": "pi", "factor": 2},
        {"rope_type": "mrrope_pro", "factor": 4, "beta_fast": 16},
        {"rope_type": "mrrope_pow", "factor": 4, "power": 0.5},
        {"rope_type": "mrrope", "method": "yarn", "factor": 8},
    ],
)
def test_the_layer_has_the_table_of_a_patched_model(folder, given):
    layer = rope_of(configured(folder, {"rope_parameters": given}))
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    options = {"beta": given["beta_fast"]} if "beta_fast" in given else {}
    options |= {"power": given["power"]} if "power" in given else {}
    mrrope.patch(model, given.get("method", given["rope_type"]), scale=float(given["factor"]), **options)
    (expected,) = mrrope.patch_of(model).tables
    (table,) = layer.ladder.tables
    assert torch.equal(table.turns, expected.turns)
    assert table.attention_factor == expected.attention_factor


def test_the_layer_has_the_tables_of_a_patched_model_with_a_scale_per_sequence(folder):
    layer = rope_of(configured(folder, {"rope_parameters": AUTO}))
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    mrrope.patch(model, "mrrope_uni", scale="auto", max_scale=4.0)
    expected = mrrope.patch_of(model).tables
    assert [table.scale for table in layer.ladder.tables] == [1.0, 2.0, 4.0]
    for table, other in zip(layer.ladder.tables, expected, strict=True):
        assert torch.equal(table.turns, other.turns)
        assert table.attention_factor == other.attention_factor


def test_a_ready_table_is_read_from_the_folder_of_a_file(folder, tmp_path):
    own = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=BASE, original_max_position=64, scale=2.0)
    own.save(tmp_path / "own.json")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "mrrope", "table": "own.json", "rope_theta": BASE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = configured(tmp_path)
    assert found.context_len == 128
    assert torch.equal(rope_of(found).ladder.tables[0].turns, own.turns)


def test_a_file_states_the_extended_length_and_an_override_replaces_it(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 256
    config["rope_parameters"] |= UNI | {"original_max_position_embeddings": NATIVE_LENGTH}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert configured(tmp_path).context_len == 256
    over = {"rope_parameters": AUTO | {"original_max_position_embeddings": NATIVE_LENGTH}}
    assert configured(tmp_path, over).context_len == 256


def test_other_overrides_are_kept_and_stock_configurations_stay(folder):
    config = configured(folder, {"rope_parameters": UNI, "rms_norm_eps": 0.5})
    assert config.hf_text_config.rms_norm_eps == 0.5
    stock = configured(folder)  # SGLang caches configurations
    assert stock.context_len == NATIVE_LENGTH
    assert not isinstance(rope_of(stock), ServedRotaryEmbedding)
    yarn = configured(folder, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}})
    assert not isinstance(rope_of(yarn), ServedRotaryEmbedding)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_parameters": UNI | {"factor": 0.5}}, "factor must be a number from 1 on"),
        ({"rope_parameters": UNI | {"fast": 1}}, "rope_parameters must have the keys .* got 'fast'"),
        ({"rope_parameters": {"rope_type": "mrrope_best", "factor": 2}}, "rope_type must be 'mrrope' or a method"),
        ({"rope_parameters": UNI, "rope_scaling": UNI}, "json_model_override_args must set rope_parameters once"),
        ({"vision_config": {"rope_parameters": UNI}}, "must be that of the text model to name a type of mrrope"),
    ],
)
def test_bad_parameters_are_refused_at_start(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        configured(folder, overrides)


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    """A model of which SGLang takes another part for the text model than transformers does."""
    folder = tmp_path_factory.mktemp("internvl")
    parameters = {"rope_type": "default", "rope_theta": BASE}
    text = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": NATIVE_LENGTH}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "llm_config": text | sizes | {"rope_parameters": parameters, "model_type": "qwen2"},
        "vision_config": {"architectures": ["InternVisionModel"], "model_type": "intern_vit_6b"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_the_part_that_sglang_takes_for_the_text_model_is_extended(internvl, nested):
    given = {"rope_parameters": UNI}
    config = configured(internvl, {"llm_config": given} if nested else given)
    assert config.hf_text_config is config.hf_config.llm_config
    assert config.context_len == 256
    layer = rope_of(config)
    assert [table.scale for table in layer.ladder.tables] == [4.0]
    assert layer.base == BASE
    assert configured(internvl).context_len == NATIVE_LENGTH


def test_a_file_names_mrrope_in_the_part_that_sglang_takes_for_the_text_model(internvl, tmp_path):
    config = json.loads((internvl / "config.json").read_text())
    config["llm_config"]["max_position_embeddings"] = 256
    config["llm_config"]["rope_parameters"] |= UNI | {"original_max_position_embeddings": NATIVE_LENGTH}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = configured(tmp_path)
    assert found.context_len == 256
    assert isinstance(rope_of(found), ServedRotaryEmbedding)


def test_a_text_model_within_that_of_sglang_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"text_config": {}, "architectures": ["LlavaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must be for a model with one text configuration, got llama"):
        configured(tmp_path, {"rope_parameters": UNI})


def test_a_file_that_extends_windows_only_is_refused_at_start(tmp_path):
    plain = {"rope_type": "default", "rope_theta": BASE}
    parameters = {"full_attention": plain, "sliding_attention": plain}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "num_hidden_layers": 2}
    config = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], rope_parameters=parameters, **layers)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["rope_parameters"]["sliding_attention"] |= UNI
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"layers of gemma3_text that see the whole text \(of full_attention, sliding"):
        configured(tmp_path)


ALWAYS = [
    ({"model_impl": "transformers"}, "model_impl must not be 'transformers'"),
    ({"tokenizer_worker_num": 2}, "tokenizer_worker_num must be 1, got 2"),
    ({"enable_nvidia_megakernel": True}, "enable_nvidia_megakernel must be off"),
    ({"weight_cache_mode": "client"}, "weight_cache_mode must be 'off', got 'client'"),
    ({"load_format": "layered"}, "load_format must not be 'layered'"),
    ({"use_ray": True}, "use_ray must be off"),
]
OF_AUTO = [
    ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm must be None, got 'NGRAM'"),
    ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm must be None, got 'EAGLE'"),
    ({"disaggregation_mode": "prefill"}, "disaggregation_mode must be 'null', got 'prefill'"),
    ({"disaggregation_mode": "decode"}, "disaggregation_mode must be 'null', got 'decode'"),
    ({"language_only": True}, "encoder_transfer_backend must be 'zmq_to_tokenizer' with language_only, got 'auto'"),
    ({"enable_lmcache": True}, "enable_lmcache must be off, got True"),
    ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap must be off"),
    ({"enable_pdmux": True}, "enable_pdmux must be off"),
    ({"enable_prefill_cp": True}, "enable_prefill_cp must be off"),
    ({"grpc_mode": True}, "grpc_mode must be off"),
    ({"is_embedding": True}, "is_embedding must be off"),
]


@pytest.mark.parametrize(("options", "message"), ALWAYS + OF_AUTO)
def test_options_that_cannot_be_served_are_refused_at_start(folder, options, message):
    with pytest.raises(ValueError, match=f"rope_parameters of mrrope with the following cannot be served: {message}"):
        configured(folder, {"rope_parameters": AUTO}, **options)
    assert configured(folder, **options)


def test_options_that_sglang_resolves_are_refused_too(folder):
    arguments = ServerArgs(
        model_path=str(folder), device="cpu", json_model_override_args=json.dumps({"rope_parameters": AUTO})
    )
    declare_resolution(arguments, "a handler of SGLang", speculative_algorithm="NGRAM")
    with pytest.raises(ValueError, match="speculative_algorithm must be None, got 'NGRAM'"):
        ModelConfig.from_server_args(arguments)


def test_latent_attention_is_refused_at_start(tmp_path):
    DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got deepseek_v3 with multi-head latent attention"):
        configured(tmp_path, {"rope_parameters": UNI})


@pytest.mark.parametrize("value", ["1", "yes"])
def test_the_rust_front_end_is_refused_at_start(folder, monkeypatch, value):
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER must be off"):
        configured(folder, {"rope_parameters": AUTO})
    assert configured(folder, {"rope_parameters": UNI})


def test_a_model_that_transformers_runs_is_refused_at_start(folder):
    config = configured(folder, {"rope_parameters": UNI})
    config._resolved_model_impl = ModelImpl.SGLANG  # as SGLang notes it where it loads a model
    require_own_implementation(config)
    config._resolved_model_impl = ModelImpl.TRANSFORMERS
    with pytest.raises(ValueError, match="got LlamaForCausalLM with model_impl 'transformers': that backend rotates"):
        require_own_implementation(config)


SERVED = [
    {"hicache_storage_backend": "file"},
    {"language_only": True, "encoder_transfer_backend": "zmq_to_tokenizer"},
]


@pytest.mark.parametrize("options", SERVED)
def test_a_scale_per_request_serves_the_rest(folder, options):
    assert configured(folder, {"rope_parameters": AUTO}, **options)


def test_a_draft_model_beside_a_set_is_refused_at_start(folder):
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=BASE, original_max_position=64, scale=2.0)
    for tables in (mrrope.TableSet([table] * 2), mrrope.HeadTables([table] * 2)):
        overrides = {"rope_parameters": {"rope_type": "mrrope", "table": tables.to_dict()}}
        with pytest.raises(ValueError, match="must be None or 'NGRAM' with tables per layer or head, got 'EAGLE'"):
            configured(folder, overrides, speculative_algorithm="EAGLE")
        assert configured(folder, overrides, speculative_algorithm="NGRAM")


@pytest.mark.parametrize(("options", "message"), ALWAYS)
def test_a_fixed_factor_refuses_less(folder, options, message):
    with pytest.raises(ValueError, match=message):
        configured(folder, {"rope_parameters": UNI}, **options)


@pytest.mark.parametrize("options", [options for options, _ in OF_AUTO])
def test_a_fixed_factor_serves_the_rest(folder, options):
    assert configured(folder, {"rope_parameters": UNI}, **options)
