"""Exported configurations: transformers' own longrope gives the patched model's logits; limits of engines raise."""

import copy
import itertools
import json
import math
import re
import warnings

import pytest
import torch

import mrrope
from mrrope import cli
from mrrope.export import hf_config
from mrrope.serving.rope_request import RopeRequest
from mrrope.tables.lookup import tables_from_dict

transformers = pytest.importorskip("transformers")
from layer_tables import random_set  # noqa: E402
from tiny_models import TINY_SIZES  # noqa: E402

pytestmark = pytest.mark.usefixtures("rope_types")

ORIGINAL, SCALE = 64, 4.0
TINY = TINY_SIZES | {"max_position_embeddings": ORIGINAL}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}


def tiny(model_type: str, **more: object):
    return transformers.CONFIG_MAPPING[model_type](**TINY, **copy.deepcopy(BASE), **more)


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def logits(model, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(length)[None] % 40).logits


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {},
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": ORIGINAL},
    "stablelm": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize(
    ("model_type", "engine"),
    [
        (model_type, engine)
        for model_type, engine in itertools.product(FAMILIES, ("transformers", "transformers-longrope", "vllm"))
    ],
)
def test_the_logits_of_the_patched_model(model_type, engine):
    """Below and past the original length, where transformers switches from the short factors to the long ones."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny(model_type, **FAMILIES[model_type])).eval()
    exported = mrrope.export_config(model, "mrrope_pro", scale=SCALE, engine=engine)
    config = type(model.config).from_dict(json.loads(json.dumps(exported)))
    assert config.max_position_embeddings == SCALE * ORIGINAL
    again = transformers.AutoModelForCausalLM.from_config(config).eval()
    again.load_state_dict(model.state_dict())
    for length in (20, 150):
        own = logits(model, length)
        with mrrope.patched(model, "mrrope_pro", scale=SCALE):
            patched = logits(model, length)
        assert not torch.allclose(own, patched, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits(again, length), patched, rtol=1e-5, atol=1e-5)


class EngineLongrope:
    """Phi3LongRoPEScaledRotaryEmbedding of vLLM and SGLang in float64."""

    def __init__(self, config: dict, parameters: dict, head_dim: int, *, switches_by_position: bool) -> None:
        self.original = parameters["original_max_position_embeddings"]
        self.switches_by_position = switches_by_position
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        plain = parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        halves = []
        for kind, length in (("short", self.original), ("long", config["max_position_embeddings"])):
            factors = torch.tensor(parameters[f"{kind}_factor"], dtype=torch.float64)
            angles = torch.arange(length, dtype=torch.float64)[:, None] / (factors * plain)
            halves.append(torch.cat([angles.cos(), angles.sin()], -1) * parameters[f"{kind}_mscale"])
        self.cache = torch.cat(halves)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        is_long = bool((positions > self.original).any()) if self.switches_by_position else True
        return self.cache[positions + (self.original if is_long else 0)]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("method", ["mrrope_pro", "mrrope_uni", "yarn_ratio", "ntk"])
def test_the_engines_arithmetic_gives_the_table(engine, method):
    exported = mrrope.export_config(tiny("llama"), method, scale=SCALE, engine=engine)
    table = mrrope.frequency_table(method, rotary_dim=32, base=50_000.0, original_max_position=ORIGINAL, scale=SCALE)
    read = exported["rope_parameters"]
    assert read["rope_type"] == "longrope"
    assert read["factor"] == SCALE
    assert read["short_factor"] == read["long_factor"] == table.cumulative_scale.tolist()
    assert read["attention_factor"] == read["short_mscale"] == read["long_mscale"] == table.attention_factor
    # transformers 4, and engines based on it, read the same from other keys.
    assert exported["rope_theta"] == read["rope_theta"] == 50_000.0
    assert exported["rope_scaling"] == {key: value for key, value in read.items() if key != "rope_theta"}

    rope = EngineLongrope(exported, read, 32, switches_by_position=engine == "sglang")
    for positions in (torch.arange(30), torch.arange(256), torch.tensor([ORIGINAL]), torch.tensor([ORIGINAL - 1])):
        angles = positions.double()[:, None] * table.inv_freq
        expected = table.attention_factor * torch.cat([angles.cos(), angles.sin()], -1)
        torch.testing.assert_close(rope(positions), expected, rtol=1e-9, atol=1e-9)


def test_every_form_of_config_gives_the_same(folder):
    config = tiny("llama")
    model = transformers.AutoModelForCausalLM.from_config(config)
    exports = [
        mrrope.export_config(form, "mrrope_pro", scale=SCALE)
        for form in (
            config,
            model,
            folder,
            str(folder / "config.json"),
            json.loads((folder / "config.json").read_text()),
        )
    ]
    for exported in exports:
        again = transformers.LlamaConfig.from_dict(copy.deepcopy(exported))
        first = transformers.LlamaConfig.from_dict(copy.deepcopy(exports[0]))
        assert again.rope_parameters == first.rope_parameters
        assert again.to_diff_dict().keys() == first.to_diff_dict().keys()


def test_arguments_are_not_modified(folder):
    config = tiny("llama")
    data, before = config.to_dict(), copy.deepcopy(config.to_dict())
    mrrope.export_config(data, "mrrope_pro", scale=SCALE)
    mrrope.export_config(config, "mrrope_pro", scale=SCALE)
    assert data == config.to_dict() == before


def test_keys_that_are_not_rope_stay(folder):
    data = json.loads((folder / "config.json").read_text()) | {"house_rule": [1, 2], "torch_dtype": "bfloat16"}
    exported = mrrope.export_config(data, "mrrope_pro", scale=SCALE)
    changed = {key for key in exported if exported[key] != data.get(key)}
    assert changed == {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    assert data.keys() <= exported.keys()


def test_an_extended_model_is_extended_further():
    """Llama 3.1 keeps its trained scales, and is extended from its native length."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16, "rope_theta": 50_000.0}
    config = transformers.LlamaConfig(**TINY | {"max_position_embeddings": 128}, rope_parameters=scaling)
    exported = mrrope.export_config(config, "pi", scale=4.0)
    frequencies = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)[0].double()
    plain = 50_000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    factors = torch.tensor(exported["rope_parameters"]["long_factor"], dtype=torch.float64)
    torch.testing.assert_close(factors, 4.0 * plain / frequencies, rtol=2e-6, atol=0)
    assert exported["max_position_embeddings"] == 512
    assert not {"low_freq_factor", "high_freq_factor"} & exported["rope_parameters"].keys()
    whole = mrrope.export_config(config, "pi", scale=4.0, engine="transformers")
    rotary = transformers.LlamaModel(transformers.LlamaConfig.from_dict(whole)).rotary_emb
    torch.testing.assert_close(rotary.inv_freq.double(), frequencies / 4.0, rtol=2e-6, atol=0)
    again = mrrope.export_config(config, "mrrope_pro", scale=16.0, original_max_position=16, engine="transformers")
    assert again["max_position_embeddings"] == 256


def test_arguments_override_the_configuration():
    given = {"original_max_position": 32, "base": 1e4}
    exported = mrrope.export_config(tiny("llama"), "mrrope_pro", scale=SCALE, **given)
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=32, scale=SCALE, **given)
    assert exported["rope_parameters"]["original_max_position_embeddings"] == 32
    assert exported["rope_theta"] == 1e4
    assert exported["rope_parameters"]["long_factor"] == table.cumulative_scale.tolist()


@pytest.mark.parametrize("engine", hf_config.ENGINES)
def test_a_ready_table(engine, tmp_path):
    table = mrrope.frequency_table(
        "mrrope_uni", rotary_dim=32, base=50_000.0, original_max_position=ORIGINAL, scale=SCALE, bounds=(3, 9)
    )
    table.save(tmp_path / "t.json")
    config = tiny("llama")
    exported = mrrope.export_config(config, table, engine=engine)
    assert exported == mrrope.export_config(config, tmp_path / "t.json", engine=engine)
    assert exported == mrrope.export_config(config, str(tmp_path / "t.json"), engine=engine)
    rotary = transformers.LlamaModel(transformers.LlamaConfig.from_dict(exported)).rotary_emb
    torch.testing.assert_close(rotary.inv_freq, table.inv_freq.float(), rtol=1e-6, atol=0.0)
    assert math.isclose(rotary.attention_scaling, table.attention_factor)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3", "longrope", "calibrated"])
def test_every_single_table_for_transformers(method, model_type):
    """Also those that are no rope type: against transformers' own code with the same frequencies by hand."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny(model_type, **FAMILIES[model_type])).eval()
    plain = 50_000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    factors = torch.linspace(1.0, SCALE, 16, dtype=torch.float64)
    settings = {"rotary_dim": 32, "base": 50_000.0, "original_max_position": ORIGINAL}
    if method == "calibrated":
        given = {"method": mrrope.frequency_table("longrope", factors=factors, scale=SCALE, **settings)}
    else:
        given = {"method": method, "scale": SCALE}
        given |= {"factors": factors} if method == "longrope" else {}
    by_hand = {"pi": plain / SCALE, "longrope": plain / factors, "calibrated": plain / factors}
    expected = by_hand.get(method)
    if expected is None:
        expected = mrrope.frequency_table(method, scale=SCALE, **settings).inv_freq
    exported = mrrope.export_config(model, engine="transformers", **given)
    config = type(model.config).from_dict(json.loads(json.dumps(exported)))
    assert config.max_position_embeddings == SCALE * ORIGINAL
    again = transformers.AutoModelForCausalLM.from_config(config).eval()
    again.load_state_dict(model.state_dict())
    rotary = model.model.rotary_emb
    rotary.inv_freq = expected.float()
    rotary.attention_scaling = 0.1 * math.log(SCALE) + 1.0 if method == "yarn" else 1.0
    torch.testing.assert_close(logits(again, 150), logits(model, 150), rtol=1e-5, atol=1e-5)


def test_an_extended_configuration_is_extended_with_the_warning_of_patch():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 50_000.0}
    config = transformers.LlamaConfig(**TINY, rope_parameters=rope)
    for engine in hf_config.ENGINES:
        with pytest.warns(
            UserWarning, match=r"llama is extended .*yarn with factor 4.*original_max_position=16 extends"
        ):
            exported = mrrope.export_config(config, "yarn", scale=4.0, engine=engine)
        assert exported["max_position_embeddings"] == 4 * ORIGINAL
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mrrope.export_config(config, "yarn", scale=4.0, engine=engine, original_max_position=16)
            mrrope.export_config(tiny("llama"), "yarn", scale=4.0, engine=engine)


@pytest.mark.parametrize(
    "options", [{"alpha": 2.0, "beta": 16.0}, {"bounds": (1, 9)}, {"attention_factor": 1.25}, {"power": 0.5}]
)
def test_options_of_the_registered_types(options):
    method = "mrrope_pow" if "power" in options else "mrrope_pro"
    exported = mrrope.export_config(tiny("llama"), method, scale=SCALE, engine="transformers", **options)
    rotary = transformers.LlamaModel(transformers.LlamaConfig.from_dict(json.loads(json.dumps(exported)))).rotary_emb
    table = mrrope.frequency_table(
        method, rotary_dim=32, base=50_000.0, original_max_position=ORIGINAL, scale=SCALE, **options
    )
    assert torch.equal(rotary.inv_freq, table.inv_freq.float())


@pytest.mark.parametrize("engine", ["transformers", "transformers-longrope"])
def test_a_rope_per_layer_type(engine):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**TINY, head_dim=32, layer_types=["sliding_attention", "full_attention"])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    exported = mrrope.export_config(config, "mrrope_uni", scale=SCALE, engine=engine)
    assert exported["rope_parameters"]["sliding_attention"] == config.rope_parameters["sliding_attention"]
    again = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig.from_dict(exported)).eval()
    again.load_state_dict(model.state_dict())
    with mrrope.patched(model, "mrrope_uni", scale=SCALE):
        for length in (20, 150):
            torch.testing.assert_close(logits(again, length), logits(model, length), rtol=1e-5, atol=1e-5)


def qwen2_vl():
    text = TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0, "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision)


def test_a_text_model_inside_another():
    exported = mrrope.export_config(qwen2_vl(), "mrrope_pro", scale=SCALE, engine="transformers-longrope")
    text = exported["text_config"]
    assert text["rope_parameters"]["rope_type"] == "longrope"
    assert text["rope_parameters"]["mrope_section"] == [4, 6, 6]
    assert text["max_position_embeddings"] == SCALE * ORIGINAL
    assert "rope_parameters" not in exported


def other_base() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)


def relative() -> mrrope.FrequencyTable:
    plain, slow = (
        mrrope.frequency_table(method, rotary_dim=32, base=5e4, original_max_position=ORIGINAL, scale=2.0)
        for method in ("rope", "pi")
    )
    return slow.relative_to(plain)


def yarn_ratio() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("yarn_ratio", rotary_dim=32, base=5e4, original_max_position=ORIGINAL, scale=2.0)


GEMMA = {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
DEEPSEEK |= {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda: tiny("llama"), {"engine": "trt"}, ValueError, "engine must be one of transformers, .*got 'trt'"),
        (lambda: 3, {}, TypeError, "config must be a configuration of transformers, its dict, its path .*got int"),
        (lambda: torch.nn.Linear(1, 1), {}, TypeError, "config must be .*got NoneType"),
        (lambda: {}, {}, ValueError, "model_type that transformers knows, got None"),
        (lambda: {"model_type": "nope"}, {}, ValueError, "model_type that transformers knows, got 'nope'"),
        (
            lambda: {"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}},
            {},
            ValueError,
            "transformers refuses this configuration of llama: .Missing required keys .*factor",
        ),
        (lambda: "/none", {}, FileNotFoundError, "config must be a config.json or a folder with one, .* no /none"),
        (lambda: __file__, {}, ValueError, "is not JSON"),
        (lambda: transformers.GPT2Config(), {}, ValueError, "rotary position embeddings, and gpt2 has none"),
        (lambda: tiny("llama"), {"method": "mrope"}, ValueError, "method must be one of"),
        (lambda: tiny("llama"), {"scale": -1.0}, ValueError, "scale"),
        (lambda: tiny("llama"), {"method": other_base(), "scale": 1.0}, ValueError, "rotary_dim 32"),
        (lambda: tiny("llama"), {"method": other_base()}, ValueError, "ready table, which leaves no room for"),
        (lambda: tiny("llama"), {"method": relative(), "scale": 1.0}, ValueError, "a table with cumulative scales"),
        (lambda: tiny("cohere"), {"engine": "vllm"}, ValueError, "vllm cannot run cohere .*this model pairs others"),
        (
            lambda: tiny("glm4", head_dim=32, pad_token_id=0),
            {"engine": "sglang"},
            ValueError,
            "sglang cannot run glm4 .*pairs others",
        ),
        (lambda: qwen2_vl(), {"engine": "vllm"}, ValueError, "vllm cannot run qwen2_vl_text .*M-RoPE"),
        (
            lambda: transformers.Gemma3TextConfig(**TINY, **GEMMA),
            {"engine": "vllm"},
            ValueError,
            "mrrope has no export of gemma3_text for vllm: each kind of its layers has a RoPE",
        ),
        (
            lambda: tiny("qwen2", dual_chunk_attention_config={"chunk_size": 8}),
            {"engine": "vllm"},
            ValueError,
            "dual_chunk_attention_config",
        ),
        (
            lambda: transformers.GptOssConfig(num_hidden_layers=1, layer_types=["full_attention"]),
            {"engine": "vllm"},
            ValueError,
            "vllm cannot run gpt_oss .*always builds YaRN",
        ),
        (
            lambda: transformers.DeepseekV3Config(num_hidden_layers=1, rope_parameters=DEEPSEEK),
            {"engine": "transformers-longrope"},
            ValueError,
            "the attention of deepseek_v3 is scaled by the rope_parameters",
        ),
        (
            lambda: transformers.Qwen2_5OmniConfig(),  # without an mrope_section, which its code does not require
            {"engine": "vllm"},
            ValueError,
            "vllm cannot run qwen2_5_omni_text .*M-RoPE",
        ),
        (
            lambda: tiny("llama", hidden_act="nope"),
            {},
            ValueError,
            "transformers cannot build a llama of this configuration: .*nope",
        ),
    ],
)
def test_errors(make, arguments, error, message):
    arguments = {"method": "mrrope_pro", "scale": SCALE, "engine": "vllm"} | arguments
    with pytest.raises(error, match=message):
        mrrope.export_config(make(), **arguments)


def tables_for(config, *, layers: int | None = None, key_heads: int | None = None) -> mrrope.TableSet:
    """Return a random set for a tiny model; other numbers of layers or heads make it one for another model."""
    return random_set(
        layers or config.num_hidden_layers,
        key_heads or config.num_key_value_heads,
        rotary_dim=32,
        base=50_000.0,
        original_max_position=ORIGINAL,
        scale=SCALE,
    )


def test_tables_per_layer_do_not_go_into_a_configuration_of_phi3():
    config = tiny("phi3", **FAMILIES["phi3"])
    with pytest.raises(
        ValueError, match=r"refuses this configuration of phi3: .*must be one of \['longrope'\], got mr"
    ):
        mrrope.export_config(config, tables_for(config), engine="transformers")


@pytest.mark.parametrize("kind", ["set", "heads"])
def test_tables_per_layer_and_head_are_exported_whole(kind, tmp_path):
    config = tiny("llama")
    tables = tables_for(config) if kind == "set" else tables_for(config)[0]
    tables.save(tmp_path / "t.json")
    exported = mrrope.export_config(config, tables, engine="transformers")
    assert exported == mrrope.export_config(config, tmp_path / "t.json", engine="transformers")
    assert exported == json.loads(json.dumps(exported, allow_nan=False))
    parameters = exported["rope_parameters"]
    assert parameters == {
        "rope_type": "mrrope",
        "rope_theta": 50_000.0,
        "factor": SCALE,
        "original_max_position_embeddings": ORIGINAL,
        "table": tables.to_dict(),
    }
    assert tables_from_dict(parameters["table"]) == tables
    assert exported["max_position_embeddings"] == SCALE * ORIGINAL
    others = {"rope_parameters", "max_position_embeddings"}
    before = json.loads(config.to_json_string())
    assert {key: exported[key] for key in exported.keys() - others} == {
        key: before[key] for key in before.keys() - others
    }


@pytest.mark.parametrize("engine", [engine for engine in hf_config.ENGINES if engine != "transformers"])
@pytest.mark.parametrize("kind", ["set", "heads"])
def test_engines_with_one_table_refuse_more(engine, kind):
    config = tiny("llama")
    tables = tables_for(config) if kind == "set" else tables_for(config)[0]
    expected = (
        f"{engine} has one table for all layers and heads and cannot express {tables!r}; it takes a FrequencyTable"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        mrrope.export_config(config, tables, engine=engine)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 5}, "method must be a set for the {config.num_hidden_layers} layers of LlamaModel, got one for 5"),
        (
            {"key_heads": 7},
            "method must hold tables for the {config.num_key_value_heads} key heads of LlamaModel in layer 0, got",
        ),
    ],
)
def test_tables_of_another_model_are_refused(wrong, message):
    config = tiny("llama")
    with pytest.raises(ValueError, match=message.format(config=config)):
        mrrope.export_config(config, tables_for(config, **wrong), engine="transformers")


def test_the_plugin_of_vllm_refuses_an_exported_set():
    exported = mrrope.export_config(tiny("llama"), tables_for(tiny("llama")), engine="transformers")
    with pytest.raises(ValueError, match="table must be one table for all layers and heads"):
        RopeRequest.read(exported["rope_parameters"])


def test_the_plugin_of_vllm_takes_an_exported_table():
    exported = mrrope.export_config(tiny("llama"), "yarn", scale=SCALE, engine="transformers")["rope_parameters"]
    (table,) = RopeRequest.read(exported).tables
    settings = {"rotary_dim": 32, "base": 50_000.0, "original_max_position": ORIGINAL, "scale": SCALE}
    assert tables_from_dict(table) == mrrope.frequency_table("yarn", **settings)
    with pytest.raises(ValueError, match=r"factor must be 'auto' or left out with a ready table, got 8\.0"):
        RopeRequest.read(exported | {"factor": 8.0})


def test_the_key_heads_are_those_that_patch_takes():
    """Falcon's configuration has four attention heads and one key head."""
    config = tiny("falcon", multi_query=True, new_decoder_architecture=False, alibi=False)
    right, wrong = (tables_for(config, key_heads=heads) for heads in (1, config.num_attention_heads))
    built = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**mrrope.export_config(config, right, engine="transformers"))
    ).eval()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(built.state_dict())
    assert torch.equal(logits(built, 100), logits(mrrope.patch(model, right), 100))
    with pytest.raises(ValueError, match="method must hold tables for the 1 key heads of FalconModel in layer 0"):
        mrrope.export_config(config, wrong, engine="transformers")


def test_tables_for_a_model_that_scales_its_attention_are_refused():
    """As for one table: the exported configuration would lose the temperature of the attention."""
    config = tiny(
        "deepseek_v3",
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )
    tables = tables_for(config, key_heads=1)
    exported = mrrope.export_config(config, tables, engine="transformers")
    assert mrrope.is_patched(transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**exported)))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    config.rope_parameters |= yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match="the attention of deepseek_v3 is scaled by the rope_parameters"):
        mrrope.export_config(config, tables, engine="transformers")


def test_tables_without_cumulative_scales_are_refused():
    config = tiny("llama")
    tables = mrrope.TableSet([layer.relative_to(layer[0]) for layer in tables_for(config)])
    with pytest.raises(ValueError, match="method must be a table with cumulative scales, and TableSet"):
        mrrope.export_config(config, tables, engine="transformers", original_max_position=ORIGINAL)


def test_the_command_takes_a_set(folder, tmp_path_factory, capsys):
    path = tmp_path_factory.mktemp("set") / "t.json"
    tables = tables_for(tiny("llama"))
    tables.save(path)
    assert command(folder, "--table", path, "--engine", "transformers") == 0
    assert json.loads(capsys.readouterr().out) == mrrope.export_config(folder, tables, engine="transformers")
    assert command(folder, "--table", path, "--engine", "vllm") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mrrope export: vllm has one table for all layers and heads")
    assert printed.count("\n") == 1


def command(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def test_the_command(folder, tmp_path_factory, capsys):
    output = tmp_path_factory.mktemp("out")
    common = ("--method", "mrrope_pro", "--scale", SCALE, "--engine")
    for engine in hf_config.ENGINES:
        expected = mrrope.export_config(folder, "mrrope_pro", scale=SCALE, engine=engine)
        assert command(folder, *common, engine) == 0
        assert json.loads(capsys.readouterr().out) == expected
        assert command(folder / "config.json", *common, engine, "--output", output) == 0
        assert capsys.readouterr().out == f"{output}: for {engine}\n"
        assert json.loads((output / "config.json").read_text()) == expected


def test_the_command_takes_tables_and_options(folder, tmp_path, capsys):
    table = yarn_ratio()
    table.save(tmp_path / "t.json")
    assert command(folder, "--table", tmp_path / "t.json", "--engine", "vllm", "--json") == 0
    assert json.loads(capsys.readouterr().out) == mrrope.export_config(folder, table, engine="vllm")
    assert command(folder, "--method", "ntk", "--scale", 2, "--original-max-position", 32, "--engine", "vllm") == 0
    expected = mrrope.export_config(folder, "ntk", scale=2.0, original_max_position=32, engine="vllm")
    assert json.loads(capsys.readouterr().out) == expected
    assert expected["rope_parameters"]["original_max_position_embeddings"] == 32
    assert (
        command(folder, "--method", "mrrope_pow", "--scale", 2, "--power", 2, "--bounds", 1, 9, "--engine", "sglang")
        == 0
    )
    expected = mrrope.export_config(folder, "mrrope_pow", scale=2.0, power=2.0, bounds=(1, 9), engine="sglang")
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--engine", "vllm", "--scale", "4", "--output", "{folder}"),
            "--output must be another file than the model's own",
        ),
        (("--engine", "vllm", "--scale", "-1"), "scale must be"),
        (("--engine", "vllm"), "scale must be given with method 'mrrope_pro': scale=4.0 extends the 64 tokens"),
        (("--engine", "llama.cpp", "--local-layers", "--output", "x.gguf"), "--local-layers is for configurations"),
        (("--engine", "llama.cpp"), "--engine llama.cpp needs --output FILE"),
        (("--engine", "llama.cpp", "--output", "x.gguf"), "--engine llama.cpp needs a .gguf file"),
    ],
)
def test_the_commands_errors_are_one_line(folder, arguments, message, capsys):
    arguments = [argument.format(folder=folder) for argument in arguments]
    assert command(folder, "--method", "mrrope_pro", *arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("mrrope export: ")
    assert printed.count("\n") == 1


def test_the_command_takes_local_layers(tmp_path, capsys):
    config = transformers.Gemma3TextConfig(**TINY, **GEMMA)
    config.save_pretrained(tmp_path)
    common = (tmp_path, "--method", "mrrope_uni", "--scale", SCALE, "--engine", "transformers-longrope")
    for options, extended in (((), ["full_attention"]), (("--local-layers",), [*GEMMA["layer_types"]])):
        assert command(*common, *options) == 0
        parameters = json.loads(capsys.readouterr().out)["rope_parameters"]
        assert sorted(extended) == sorted(kind for kind, own in parameters.items() if own["rope_type"] == "longrope")


def test_infinities_are_strict_json(tmp_path):
    """In transformers' encoding. Python's own encoding of infinities is not JSON."""
    config = tiny("granitemoehybrid", layer_types=["mamba", "attention"], position_embedding_type="rope")
    assert math.isinf(config.time_step_limit[1])
    config.save_pretrained(tmp_path)
    for form in (config, config.to_dict(), tmp_path):
        exported = mrrope.export_config(form, "mrrope_pro", scale=SCALE, engine="transformers-longrope")
        (tmp_path / "exported").mkdir(exist_ok=True)
        (tmp_path / "exported" / "config.json").write_text(json.dumps(exported, allow_nan=False))
        again = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
        assert list(again.time_step_limit) == list(config.time_step_limit)


def test_the_command_distinguishes_an_engine_from_a_file(tmp_path, capsys):
    assert command(tmp_path / "m.gguf", "--method", "mrrope_pro", "--engine", "vllm") == 2
    assert "--engine vllm needs a model's folder or config.json" in capsys.readouterr().err
    assert command(tmp_path / "none", "--method", "mrrope_pro", "--engine", "vllm") == 2
    assert f"a config.json or a folder with one, and there is no {tmp_path / 'none'}\n" in capsys.readouterr().err
