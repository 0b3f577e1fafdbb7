"""Exported configurations: transformers' own longrope gives the patched model's logits; limits of engines raise."""

import copy
import itertools
import json
import warnings

import pytest
import torch

import mrrope
from mrrope.export import hf_config

transformers = pytest.importorskip("transformers")
from tiny_exports import FAMILIES, GEMMA, ORIGINAL, SCALE, TINY, logits, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("rope_types")


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


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


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize("engine", hf_config.ENGINES)
def test_an_exported_configuration_is_extended_with_the_warning(model_type, engine):
    """Both factors of an exported longrope are the same; Phi-3's and SGLang's state a length past all texts."""
    config = tiny(model_type, **FAMILIES[model_type])
    exported = mrrope.export_config(config, "mrrope_pro", scale=SCALE, engine=engine)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**exported))
    said = rf"is extended .*with factor 4\): scale=2.0 extends the {4 * ORIGINAL} .*original_max_position={ORIGINAL} "
    with pytest.warns(UserWarning, match=said):
        mrrope.patch(model, "mrrope_pro", scale=2.0)
    with pytest.warns(UserWarning, match=said):
        again = mrrope.export_config(exported, "mrrope_pro", scale=2.0, engine=engine)
    assert again["max_position_embeddings"] == 8 * ORIGINAL


def test_trained_factors_of_longrope_do_not_warn():
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": ORIGINAL}
    rope = {"rope_type": "longrope", "rope_theta": 50_000.0, "factor": 2.0, **factors}
    config = transformers.LlamaConfig(**TINY | {"max_position_embeddings": 2 * ORIGINAL}, rope_parameters=rope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.export_config(config, "pi", scale=2.0)
        mrrope.patch(transformers.AutoModelForCausalLM.from_config(config), "pi", scale=2.0)


@pytest.mark.parametrize("engine", hf_config.ENGINES)
def test_a_window_of_all_layers_is_exported_with_the_warning_of_patch(engine):
    said = r"mistral reads 256 tokens so, but no layer sees further back than its sliding window of 8: sliding_window"
    with pytest.warns(UserWarning, match=said):
        mrrope.export_config(tiny("mistral", sliding_window=8), "mrrope_pro", scale=SCALE, engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.export_config(tiny("mistral", sliding_window=None), "mrrope_pro", scale=SCALE, engine=engine)
        mrrope.export_config(tiny("mistral", sliding_window=8), "rope", engine="transformers")


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
        (lambda: tiny("llama"), {"scale": True}, TypeError, "scale must be a number, got True"),
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
