"""``export_config`` of ready tables: single ones, and sets per layer and key head."""

import json
import math
import re

import pytest
import torch

import mrrope
from mrrope.export import hf_config
from mrrope.serving.rope_request import RopeRequest
from mrrope.tables.lookup import tables_from_dict

transformers = pytest.importorskip("transformers")
from tiny_exports import FAMILIES, ORIGINAL, SCALE, logits, tables_for, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("rope_types")


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


def test_the_plugin_of_vllm_takes_an_exported_set():
    tables = tables_for(tiny("llama"))
    exported = mrrope.export_config(tiny("llama"), tables, engine="transformers")
    (table,) = RopeRequest.read(exported["rope_parameters"]).tables
    assert tables_from_dict(table) == tables


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
