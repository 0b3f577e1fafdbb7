"""``rope_parameters`` of mrrope in vLLM's configuration: overrides, functions, files, lengths, and quiet validation."""

import copy
import functools
import json
import logging
import pickle
import warnings
from pathlib import Path

import huggingface_hub
import pytest
import transformers
import vllm.config.model
import vllm.transformers_utils.config
from running_version import VERSION
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2VLConfig,
    Qwen3Config,
)
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

import mrrope
from mrrope.export.hf_config import export_config
from mrrope.serving.rope_settings import KEY, ServedRope, served_rope
from mrrope.vllm import config_look
from mrrope.vllm.hooks import WRAPPED

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
PRO = {"rope_type": "mrrope_pro", "factor": 16}
AUTO = {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 50_000.0}


def saved(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def llama(folder: Path, rope_parameters: dict = PLAIN, **more: object) -> str:
    parameters = json.loads(json.dumps(rope_parameters))
    sizes = SIZES | {"architectures": ["LlamaForCausalLM"], **more}
    return saved(LlamaConfig(**sizes, rope_parameters=parameters), folder)


def llama_of_file(folder: Path, rope_parameters: dict, name: str = "rope_parameters", **more: object) -> str:
    """Save a config.json that no version of transformers has validated."""
    path = Path(llama(folder, **more)) / "config.json"
    data = json.loads(path.read_text())
    del data["rope_parameters"]
    path.write_text(json.dumps(data | {name: rope_parameters}))
    return str(folder)


def configured(model: str, **arguments: object) -> ModelConfig:
    return EngineArgs(model=model, skip_tokenizer_init=True, **arguments).create_model_config()


@pytest.fixture
def quiet(caplog, monkeypatch):
    """Fail on any warning of transformers, vLLM or mrrope."""
    for name in ("transformers", "vllm"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in caught if "mrrope" in warning.filename + str(warning.message)] == []


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.usefixtures("quiet")
def test_an_override_keeps_the_models_own_rope(tmp_path, name, type_key):
    config = configured(llama(tmp_path, LLAMA3), hf_overrides={name: {type_key: "mrrope_pro", "factor": 4}})
    parameters = config.hf_config.rope_parameters
    assert parameters["rope_theta"] == 500_000.0
    assert parameters[KEY]["native"] == LLAMA3
    assert config.max_model_len == 4 * 8192
    assert config.hf_text_config is config.hf_config
    assert served_rope(config.hf_config).max_length == 4 * 8192


@pytest.mark.usefixtures("quiet")
def test_the_engine_is_configured(tmp_path):
    arguments = EngineArgs(
        model=llama(tmp_path), hf_overrides={"rope_parameters": AUTO}, skip_tokenizer_init=True, enforce_eager=True
    )
    config = arguments.create_engine_config()
    assert config.model_config.max_model_len == 8 * 8192
    assert served_rope(config.model_config.hf_config).is_auto
    sent = pickle.loads(pickle.dumps(config)).model_config
    assert sent.hf_config.rope_parameters == config.model_config.hf_config.rope_parameters
    assert sent.compute_hash() == config.model_config.compute_hash()


@pytest.mark.usefixtures("quiet")
def test_a_configuration_is_copied_and_saved(tmp_path):
    config = configured(llama(tmp_path), hf_overrides={"rope_parameters": PRO})
    hf_config = config.hf_config
    parameters = copy.deepcopy(hf_config.rope_parameters)
    assert copy.deepcopy(hf_config).rope_parameters == parameters
    assert json.loads(hf_config.to_json_string())["rope_parameters"] == parameters
    assert type(hf_config)(**hf_config.to_dict()).rope_parameters == parameters  # validates
    stock = configured(llama(tmp_path))
    assert config.compute_hash() != stock.compute_hash()
    again = configured(saved(hf_config, tmp_path / "again"))
    assert again.hf_config.rope_parameters == parameters
    assert again.max_model_len == config.max_model_len == 16 * 8192


def test_max_model_len_of_the_user(tmp_path):
    folder, overrides = llama(tmp_path), {"rope_parameters": PRO}
    assert configured(folder, hf_overrides=overrides, max_model_len=20_000).max_model_len == 20_000
    assert configured(folder, hf_overrides=overrides, max_model_len=131_072).max_model_len == 131_072
    with pytest.raises(ValueError, match=r"max_model_len \(131073\) is greater than .* \(rope_parameters=131072"):
        configured(folder, hf_overrides=overrides, max_model_len=131_073)


def test_other_models_are_as_in_stock_vllm(tmp_path, monkeypatch):
    assert configured(llama(tmp_path)).max_model_len == 8192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 50_000.0}
    config = configured(llama(tmp_path), hf_overrides={"rope_parameters": yarn})
    assert config.hf_config.rope_parameters == yarn
    stock = getattr(vllm.config.model._get_and_verify_max_len, WRAPPED)
    monkeypatch.setattr(vllm.config.model, "_get_and_verify_max_len", stock)
    unhooked = configured(llama(tmp_path), hf_overrides={"rope_parameters": yarn})
    # Since 0.30, max_position_embeddings is the extended length already.
    assert config.max_model_len == unhooked.max_model_len == (8192 if VERSION >= (0, 30) else 4 * 8192)
    assert served_rope(config.hf_config) is None


@pytest.mark.usefixtures("quiet")
def test_other_overrides_are_applied_too(tmp_path):
    overrides = {"rope_parameters": PRO, "max_position_embeddings": 4096, "some_dict": {"a": {"b": 1}}}
    before = copy.deepcopy(overrides)
    config = configured(llama(tmp_path), hf_overrides=overrides)
    assert overrides == before
    assert config.hf_config.some_dict == {"a": {"b": 1}}
    assert config.max_model_len == 16 * 4096


def replace(config):
    config.rope_parameters = {"rope_type": "mrrope_pro", "factor": 4}
    return config


def update(config):
    if hasattr(config, "rope_parameters"):  # vLLM tries the function on a dummy
        config.rope_parameters.update(rope_type="mrrope_pro", factor=4)
    return config


def on_another_object(config):
    config = copy.deepcopy(config)
    config.rope_scaling = {"type": "mrrope_pro", "factor": 4}
    return config


@pytest.mark.parametrize("function", [replace, update, on_another_object])
@pytest.mark.parametrize("native", [PLAIN, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.usefixtures("quiet")
def test_a_function_sets_parameters(tmp_path, function, native):
    config = configured(llama(tmp_path, native), hf_overrides=function)
    assert config.hf_config.rope_parameters[KEY]["native"] == native
    assert config.hf_config.rope_parameters["rope_theta"] == native["rope_theta"]
    assert config.max_model_len == 4 * 8192


@pytest.mark.usefixtures("quiet")
def test_a_function_sets_parameters_that_the_class_of_a_configuration_would_refuse(tmp_path):
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 2048, "factor": 4.0}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = SIZES | {"original_max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    hf_config = Phi3Config(**sizes, architectures=["Phi3ForCausalLM"], rope_parameters=dict(longrope))
    config = configured(saved(hf_config, tmp_path), hf_overrides=replace)
    assert config.max_model_len == 4 * 8192
    assert config.hf_config.rope_parameters[KEY]["native"].items() >= longrope.items()


@pytest.mark.usefixtures("quiet")
def test_a_function_that_sets_nothing_of_mrrope(tmp_path):
    config = configured(llama(tmp_path, LLAMA3), hf_overrides=lambda config: config)
    assert config.hf_config.rope_parameters == LLAMA3
    assert config.max_model_len == 8192


@pytest.mark.usefixtures("quiet")
def test_an_exported_file_is_not_extended_twice(tmp_path):
    plain = llama(tmp_path)
    exported = export_config(plain, "mrrope_pro", scale=4.0, engine="transformers")
    assert exported["max_position_embeddings"] == 4 * 8192
    (tmp_path / "config.json").write_text(json.dumps(exported))
    config = configured(plain)
    served = served_rope(config.hf_config)
    assert (config.max_model_len, served.native_length) == (4 * 8192, 8192)
    expected = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=50_000.0, original_max_position=8192, scale=4.0)
    assert served.ladder(16).tables == (expected,)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("parameters", [PRO, AUTO | {"max_factor": 16}, {"type": "mrrope_uni", "factor": 16}])
@pytest.mark.usefixtures("quiet")
def test_a_file_names_a_type(tmp_path, name, parameters):
    folder = llama_of_file(tmp_path, parameters | {"rope_theta": 50_000.0}, name)
    config = configured(folder)
    assert config.max_model_len == 16 * 8192
    assert config.hf_config.rope_parameters["rope_theta"] == 50_000.0
    assert config.hf_config.rope_parameters[KEY]["native"] == PLAIN


@pytest.mark.usefixtures("quiet")
def test_a_file_names_a_type_of_vllm_with_keys_of_mrrope(tmp_path):
    folder = llama_of_file(tmp_path, {"rope_type": "yarn", "factor": "auto", "rope_theta": 50_000.0, "reserve": 5})
    served = served_rope(configured(folder).hf_config)
    assert (served.request.method, served.is_auto, served.reserve) == ("yarn", True, 5)
    assert served.max_length == 16 * 8192


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_that_comes_while_vllm_reads_it(tmp_path, monkeypatch, fails):
    folder = llama_of_file(tmp_path, PRO | {"rope_theta": 50_000.0})
    look, looks = config_look.file_mentions_mrrope, []
    monkeypatch.setattr(
        config_look, "file_mentions_mrrope", lambda *where: looks.append(where) or (len(looks) > 1 and look(*where))
    )
    original = getattr(vllm.transformers_utils.config.get_config, WRAPPED)

    def load(*args, **kwargs):
        if fails and len(looks) == 1:
            raise KeyError("factor")
        return original(*args, **kwargs)

    config = config_look.get_config(load, folder, trust_remote_code=False)
    assert KEY in config.rope_parameters
    assert len(looks) == 1 + fails


def test_an_error_of_vllm_stays_its_own(tmp_path):
    def load(*args, **kwargs):
        calls.append(args)
        raise OSError("of vLLM")

    calls = []
    with pytest.raises(OSError, match="of vLLM"):
        config_look.get_config(load, llama(tmp_path), False, None)
    assert len(calls) == 1


def test_a_file_in_the_cache_of_the_hub_is_looked_at(tmp_path, monkeypatch):
    repository = tmp_path / "models--some--model"
    for commit, parameters in (("a" * 40, PRO | {"rope_theta": 50_000.0}), ("b" * 40, PLAIN)):
        llama_of_file(repository / "snapshots" / commit, parameters)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert config_look.file_mentions_mrrope("some/model", None)
    assert not config_look.file_mentions_mrrope("some/model", "b" * 40)
    for name in ("some/other", "no name", tmp_path, tmp_path / "no.gguf"):
        assert not config_look.file_mentions_mrrope(name, None)


@pytest.mark.usefixtures("quiet")
def test_a_file_names_a_table_beside_it(tmp_path):
    table = mrrope.frequency_table(
        "mrrope_pow", rotary_dim=16, base=50_000.0, original_max_position=8192, scale=4.0, power=0.5
    )
    table.save(tmp_path / "table.json")
    folder = llama_of_file(tmp_path, {"rope_type": "mrrope", "table": "table.json", "rope_theta": 50_000.0})
    config = configured(folder)
    assert served_rope(config.hf_config).ladder(16).tables == (table,)
    assert config.max_model_len == 4 * 8192


# --- tables per layer and head ---


def table_set(layers: int = 2, key_heads: int = 2, base: float = 50_000.0, scale: float = 4.0) -> mrrope.TableSet:
    """Return a set in which no two heads are alike."""
    settings = {"rotary_dim": 16, "base": base, "original_max_position": 8192, "scale": scale}
    return mrrope.TableSet(
        mrrope.HeadTables(
            mrrope.frequency_table("mrrope_pow", power=0.1 * layer + head, **settings) for head in range(key_heads)
        )
        for layer in range(layers)
    )


@pytest.mark.usefixtures("quiet")
def test_a_set_as_an_override(tmp_path):
    table_set().save(tmp_path / "set.json")
    overrides = {"rope_type": "mrrope", "table": str(tmp_path / "set.json")}
    config = configured(llama(tmp_path), hf_overrides={"rope_parameters": overrides})
    assert served_rope(config.hf_config).ladder(16).tables == (table_set(),)
    assert config.max_model_len == 4 * 8192


@pytest.mark.usefixtures("quiet")
def test_a_file_names_a_set_beside_it(tmp_path):
    table_set().save(tmp_path / "set.json")
    folder = llama_of_file(tmp_path, {"rope_type": "mrrope", "table": "set.json", "rope_theta": 50_000.0})
    config = configured(folder)
    assert served_rope(config.hf_config).ladder(16).tables == (table_set(),)
    assert config.max_model_len == 4 * 8192


@pytest.mark.usefixtures("quiet")
def test_an_exported_set_is_served(tmp_path):
    plain = llama(tmp_path)
    exported = export_config(plain, table_set(), engine="transformers")
    (tmp_path / "config.json").write_text(json.dumps(exported))
    config = configured(plain)
    served = served_rope(config.hf_config)
    assert served.ladder(16).tables == (table_set(),)
    assert (config.max_model_len, served.native_length) == (4 * 8192, 8192)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (table_set(layers=3), "rope_parameters do not fit the model: .* set for the 2 layers of llama, got one for 3"),
        (table_set(key_heads=4), "for the 2 key heads of llama in layer 0, got tables for 4: TableSet"),
        (table_set(key_heads=4)[0], "for the 2 key heads of llama in layer 0, got tables for 4: HeadTables"),
        (table_set(base=1e4), "do not fit the model: .* for the model's base 50000, got TableSet"),
    ],
    ids=["layers", "heads of a set", "heads", "base"],
)
def test_tables_of_another_model_are_refused(tmp_path, tables, message):
    parameters = {"rope_type": "mrrope", "table": tables.to_dict()}
    for given in (parameters, parameters | {"table": [table_set(scale=2.0).to_dict(), tables.to_dict()]}):
        with pytest.raises(ValueError, match=message):
            configured(llama(tmp_path / "model"), hf_overrides={"rope_parameters": given})
    folder = llama_of_file(tmp_path / "of_file", parameters | {"rope_theta": 50_000.0})
    with pytest.raises(ValueError, match=message):
        configured(folder)


def test_an_override_extends_a_file_and_says_so(tmp_path, caplog, monkeypatch):
    of_file = {"rope_type": "mrrope_pro", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 5e4}
    folder = llama_of_file(tmp_path, of_file)
    monkeypatch.setattr(logger := logging.getLogger("vllm.mrrope"), "handlers", [*logger.handlers, caplog.handler])
    config = configured(folder, hf_overrides={"rope_parameters": {"rope_type": "mrrope_pro", "factor": 2}})
    assert config.max_model_len == 2 * 8192
    assert "llama is extended by its configuration already (mrrope_pro with factor 4): " in caplog.text
    assert "the 8192 tokens" in caplog.text
    restarted = PRO | {"original_max_position_embeddings": 2048}
    assert configured(folder, hf_overrides={"rope_parameters": restarted}).max_model_len == 16 * 2048


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_parameters": PRO | {"fator": 4}}, "got 'fator'"),
        ({"rope_parameters": {"rope_type": "mrrope_pro"}}, "factor must be given"),
        ({"rope_parameters": {"rope_type": "mrrope_prof", "factor": 4}}, "must be 'mrrope' or a .* got 'mrrope_prof'"),
        (
            {"rope_parameters": PRO, "rope_scaling": PRO},
            "must set rope_parameters once, got hf_overrides.rope_parameters",
        ),
        (
            {"text_config": {"rope_parameters": PRO}},
            "hf_overrides.text_config.rope_parameters must be that of the text",
        ),
        ({"rope_parameters": {"full_attention": PRO}}, "must be one dict for llama, .* got full_attention"),
        ({"rope_parameters": {"full": PRO}}, "must be one dict for llama, .* got full"),
    ],
)
def test_bad_overrides_are_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        configured(llama(tmp_path), hf_overrides=overrides)


def test_a_model_without_rope_is_refused(tmp_path):
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64}
    folder = saved(OPTConfig(**sizes, word_embed_proj_dim=64, architectures=["OPTForCausalLM"]), tmp_path)
    with pytest.raises(ValueError, match="must come with rope_theta for opt, whose configuration has no RoPE"):
        configured(folder, hf_overrides={"rope_parameters": PRO})


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="factor must be a number from 1 on"):
        configured(llama_of_file(tmp_path, PRO | {"factor": 0.5, "rope_theta": 5e4}))


@pytest.mark.usefixtures("quiet")
def test_qwen3(tmp_path):
    config = Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"], rope_parameters=dict(PLAIN))
    config = configured(saved(config, tmp_path), hf_overrides={"rope_parameters": AUTO})
    assert config.max_model_len == 8 * 8192
    assert config.hf_config.rope_parameters["rope_theta"] == 50_000.0


TEXT_ONLY = ["LlamaForCausalLM"]
"""An architecture for configurations of multi-modal models, whose own need torchvision to be inspected."""

GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def gemma_text(**more: object) -> Gemma3TextConfig:
    layer_types = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **SIZES, sliding_window=512, layer_types=layer_types, rope_parameters=copy.deepcopy(GEMMA), **more
    )


@pytest.mark.parametrize("overrides", [PRO, {"full_attention": PRO}], ids=["flat", "by layer type"])
@pytest.mark.parametrize("kind", ["text", "multi-modal"])
@pytest.mark.usefixtures("quiet")
def test_gemma3_is_extended_in_its_global_layers(tmp_path, overrides, kind):
    if kind == "text":
        hf_config = gemma_text(architectures=["Gemma3ForCausalLM"])
    else:
        hf_config = Gemma3Config(text_config=gemma_text(), architectures=TEXT_ONLY)
    config = configured(saved(hf_config, tmp_path), hf_overrides={"rope_parameters": overrides})
    parameters = config.hf_text_config.rope_parameters
    assert parameters["sliding_attention"] == GEMMA["sliding_attention"]
    assert parameters["full_attention"]["rope_theta"] == 1e6
    assert parameters["full_attention"][KEY]["native"] == GEMMA["full_attention"]
    assert config.max_model_len == 16 * 8192
    assert served_rope(config.hf_config).max_length == 16 * 8192


def test_sets_of_gemma3_count_all_layers(tmp_path):
    folder = saved(gemma_text(architectures=["Gemma3ForCausalLM"]), tmp_path)
    fitting, short = ({"rope_type": "mrrope", "table": table_set(n, base=1e6).to_dict()} for n in (2, 1))
    configured(folder, hf_overrides={"rope_parameters": fitting})
    with pytest.raises(ValueError, match="must be a set for the 2 layers of gemma3_text, got one for 1"):
        configured(folder, hf_overrides={"rope_parameters": short})


def test_layer_types_of_gemma3(tmp_path):
    folder = saved(gemma_text(architectures=["Gemma3ForCausalLM"]), tmp_path)
    configure = functools.partial(configured, folder)
    fixed = configure(hf_overrides={"rope_parameters": {"sliding_attention": PRO, "full_attention": PRO}})
    assert ServedRope.of(fixed.hf_config.rope_parameters["sliding_attention"]).max_length == 16 * 8192
    with pytest.raises(ValueError, match="must be a number for sliding_attention, which sees a window, got 'auto'"):
        configure(hf_overrides={"rope_parameters": {"sliding_attention": AUTO, "full_attention": AUTO}})
    for unknown in ("chunked_attention", "ful_attention"):
        with pytest.raises(ValueError, match=f"of the layer types .* of gemma3_text, got {unknown}"):
            configure(hf_overrides={"rope_parameters": {unknown: PRO}})
    with pytest.raises(ValueError, match=r"layers of gemma3_text that see the whole text .* got {'sliding_attention'"):
        configure(hf_overrides={"rope_parameters": {"sliding_attention": PRO}})
    path = tmp_path / "config.json"
    stock = path.read_text()
    own = PRO | {"rope_theta": 1e4, "original_max_position_embeddings": 8192}
    path.write_text(json.dumps(json.loads(stock) | {"rope_parameters": GEMMA | {"sliding_attention": own}}))
    with pytest.raises(ValueError, match=r"layers of gemma3_text that see the whole text .* got {'full_attention'"):
        configure()
    path.write_text(stock)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e4}
    mixed = configure(hf_overrides={"rope_parameters": {"full_attention": PRO, "sliding_attention": yarn}})
    assert mixed.hf_config.rope_parameters["sliding_attention"] == yarn


MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    "overrides",
    [{"rope_parameters": PRO}, {"text_config": {"rope_scaling": PRO}}, replace],
    ids=["flat", "nested", "function"],
)
@pytest.mark.usefixtures("quiet")
def test_qwen2_vl(tmp_path, overrides):
    text = SIZES | {"rope_parameters": dict(MROPE), "bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    hf_config = Qwen2VLConfig(text_config=text, vision_config=vision, architectures=TEXT_ONLY)
    folder = saved(hf_config, tmp_path)
    stock = configured(folder)
    config = configured(folder, hf_overrides=overrides)
    parameters = config.hf_text_config.rope_parameters
    assert parameters["mrope_section"] == [2, 3, 3]
    assert parameters["rope_theta"] == 1e6
    assert parameters[KEY]["native"] == stock.hf_text_config.rope_parameters
    assert config.uses_mrope
    assert config.max_model_len == (4 if overrides is replace else 16) * 8192
    assert config.hf_config.vision_config.to_dict() == stock.hf_config.vision_config.to_dict()


def test_only_the_text_model_is_extended_and_once(tmp_path):
    hf_config = Gemma3Config(text_config=gemma_text(), architectures=TEXT_ONLY)
    both = {"rope_parameters": PRO, "text_config": {"rope_scaling": PRO}}
    with pytest.raises(ValueError, match=r"got hf_overrides.rope_parameters and hf_overrides.text_config.rope_scaling"):
        configured(saved(hf_config, tmp_path), hf_overrides=both)
    with pytest.raises(ValueError, match=r"hf_overrides.vision_config.rope_parameters must be that of the text model"):
        configured(saved(hf_config, tmp_path), hf_overrides={"vision_config": {"rope_parameters": PRO}})


@pytest.mark.usefixtures("quiet")
def test_a_drafter_keeps_its_own_rope(tmp_path):
    target, drafter = llama(tmp_path / "target"), llama(tmp_path / "drafter", LLAMA3)
    arguments = EngineArgs(
        model=target,
        hf_overrides={"rope_parameters": PRO},
        skip_tokenizer_init=True,
        max_model_len=4096,
        speculative_config={"model": drafter, "num_speculative_tokens": 2, "method": "draft_model"},
    )
    model_config = arguments.create_model_config()
    speculative = SpeculativeConfig(
        target_model_config=model_config, target_parallel_config=ParallelConfig(), **arguments.speculative_config
    )
    assert speculative.draft_model_config.hf_config.rope_parameters == LLAMA3
    assert served_rope(model_config.hf_config).max_length == 16 * 8192
