"""What ``rope_parameters`` ask for: keys, values, and tables equal to those of ``mrrope.patch``."""

import json
import math
import pickle
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mrrope
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.serving.mark import OWN_TYPES, ROPE_TYPE, mentions_mrrope, selects_mrrope
from mrrope.serving.rope_request import SHARED_TYPES, RopeRequest
from mrrope.serving.rope_settings import KEY, ServedRope, merged
from mrrope.tables.frequency_table import METHODS
from mrrope.tables.lookup import load_tables

DIM = 32
PAIRS = DIM // 2
BASE = 50_000.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": BASE,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": BASE,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + 0.01 * pair for pair in range(PAIRS)],
    "long_factor": [1.0 + 0.5 * pair for pair in range(PAIRS)],
    "factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": BASE, "factor": 4.0, "original_max_position_embeddings": 1024}
NATIVES = {
    "plain": {"rope_type": "default", "rope_theta": BASE},
    "linear": {"rope_type": "linear", "rope_theta": BASE, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": BASE, "factor": 2.0},
    "yarn": YARN,
    "yarn of betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25, "truncate": False},
    "longrope": LONGROPE,
    "llama3": LLAMA3,
    "mrrope_pro": YARN | {"rope_type": "mrrope_pro"},
}
STATED = 4096


def patched_tables(native: dict, *args: object, **options: object) -> tuple[mrrope.FrequencyTable, ...]:
    """Return the tables that ``mrrope.patch`` gives a model of transformers."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=2 * DIM,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=STATED,
        rope_parameters=json.loads(json.dumps(native)),
    )
    with warnings.catch_warnings(action="ignore"):  # of configurations that are extended already
        model = mrrope.patch(LlamaForCausalLM(config), *args, **options)
    (rotary,) = [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]
    return rotary.tables[None]


def served(given: dict, native: dict, stated: float | None = STATED) -> ServedRope:
    """Return what is served after the parameters went to another process and through JSON."""
    parameters = merged(given, native, stated)
    assert json.loads(json.dumps(parameters)) == parameters
    rope = ServedRope.of(pickle.loads(pickle.dumps(parameters)))
    assert rope is not None
    return rope


@pytest.mark.parametrize("native", NATIVES.values(), ids=NATIVES)
@pytest.mark.parametrize(
    ("given", "method", "options"),
    [
        ({"rope_type": "mrrope_pro", "factor": 4}, "mrrope_pro", {"scale": 4.0}),
        ({"type": "mrrope_uni", "factor": 1.5}, "mrrope_uni", {"scale": 1.5}),
        ({"rope_type": "mrrope", "method": "yarn", "factor": 4}, "yarn", {"scale": 4.0}),
        ({"rope_type": "mrrope_pow", "power": 2, "factor": 4}, "mrrope_pow", {"scale": 4.0, "power": 2}),
        (
            {"rope_type": "mrrope_pro", "factor": 4, "beta_slow": 2, "beta_fast": 16, "attention_factor": 1.1},
            "mrrope_pro",
            {"scale": 4.0, "alpha": 2, "beta": 16, "attention_factor": 1.1},
        ),
        ({"rope_type": "yarn_ratio", "factor": 4, "bounds": [2, 9]}, "yarn_ratio", {"scale": 4.0, "bounds": (2, 9)}),
        (
            {"rope_type": "mrrope_pro", "factor": 16, "original_max_position_embeddings": 1024},
            "mrrope_pro",
            {"scale": 16.0, "original_max_position": 1024},
        ),
        ({"rope_type": "mrrope_pro", "factor": 8, "rope_theta": 1e6}, "mrrope_pro", {"scale": 8.0, "base": 1e6}),
    ],
    ids=["pro", "legacy key", "yarn", "pow", "betas", "bounds", "original length", "base"],
)
def test_tables_are_those_of_patch(native, given, method, options):
    rope = served(given, native)
    (expected,) = patched_tables(native, method, **options)
    ladder = rope.ladder(DIM)
    assert ladder.tables == (expected,)
    assert ladder.tables[0].is_like(expected)
    assert rope.max_length == int(expected.original_max_position * expected.scale)


@pytest.mark.parametrize("name", ["plain", "linear", "yarn", "llama3", "mrrope_pro"])
@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"max_factor": 6}, {"max_scale": 6}),
        ({"original_max_position_embeddings": 1024}, {"original_max_position": 1024}),
    ],
    ids=["defaults", "max_factor", "original length"],
)
def test_ladders_are_those_of_patch(name, given, options):
    rope = served({"rope_type": "mrrope_pro", "factor": "auto", **given}, NATIVES[name])
    expected = patched_tables(NATIVES[name], "mrrope_pro", scale="auto", **options)
    ladder = rope.ladder(DIM)
    assert rope.is_auto
    assert ladder.tables == expected
    assert ladder.reaches[0] == rope.native_length
    assert ladder.reaches[-1] == rope.max_length


def test_frequencies_are_those_of_the_formula():
    table = served({"rope_type": "pi", "factor": 4}, NATIVES["plain"]).ladder(DIM).tables[0]
    expected = [BASE ** (-2 * pair / DIM) / 4 for pair in range(PAIRS)]
    torch.testing.assert_close(table.inv_freq, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("native", "given", "native_length", "max_length"),
    [
        ("plain", {"factor": 16}, 4096, 65536),
        ("plain", {"factor": "auto"}, 4096, 65536),
        ("plain", {"factor": "auto", "max_factor": 10}, 4096, 40960),
        ("plain", {"factor": 1.1}, 4096, 4505),
        ("llama3", {"factor": 2}, 4096, 8192),
        ("llama3", {"factor": 16, "original_max_position_embeddings": 1024}, 4096, 16384),
        ("llama3", {"factor": 16, "rope_theta": 2 * BASE}, 4096, 16384),
        ("llama3", {"factor": 2, "rope_theta": BASE}, 4096, 8192),
        ("longrope", {"factor": 2}, 4096, 8192),
        ("dynamic", {"factor": 2}, 8192, 16384),
        ("yarn", {"factor": 2}, 4096, 8192),
    ],
)
def test_lengths(native, given, native_length, max_length):
    rope = served({"rope_type": "mrrope_pro", **given}, NATIVES[native])
    assert (rope.native_length, rope.max_length) == (native_length, max_length)


def test_keys_of_the_model_are_kept():
    native = NATIVES["llama3"] | {
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 6, 6],
        "mrope_interleaved": True,
        "llama_4_scaling_beta": 0.1,
        "type": "llama3",
    }
    parameters = merged({"rope_type": "mrrope_pro", "factor": 4}, native, STATED)
    kept = {key: native[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")}
    assert parameters == kept | {"llama_4_scaling_beta": 0.1, "rope_type": "mrrope", KEY: parameters[KEY]}
    assert parameters[KEY]["native"] == {key: value for key, value in native.items() if key != "type"}
    restated = merged({"rope_type": "mrrope_pro", "factor": 4, "mrope_section": [8, 4, 4]}, native, STATED)
    assert restated["mrope_section"] == [8, 4, 4]


def test_a_base_of_the_user_replaces_that_of_the_model():
    parameters = merged({"rope_type": "mrrope_pro", "factor": 4, "rope_theta": 1e6}, NATIVES["llama3"], STATED)
    assert parameters["rope_theta"] == 1e6
    assert parameters[KEY]["native"]["rope_theta"] == BASE


def test_a_file_of_a_registered_type_states_the_extended_length():
    of_file = {**YARN, "rope_type": "mrrope_pro", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = ServedRope.of(merged(of_file, None, 4096))
    assert (rope.native_length, rope.max_length) == (1024, 4096)
    expected = mrrope.frequency_table("mrrope_pro", rotary_dim=DIM, base=BASE, original_max_position=1024, scale=4.0)
    assert rope.ladder(DIM).tables == (expected,)
    without_length = {key: value for key, value in of_file.items() if key != "original_max_position_embeddings"}
    assert ServedRope.of(merged(without_length, None, 1024)).ladder(DIM).tables == (expected,)


@pytest.mark.parametrize(
    ("given", "native_length", "max_length"),
    [
        ({"factor": 2}, 4096, 8192),
        ({"factor": 2, "original_max_position_embeddings": 1024}, 1024, 2048),
        ({"factor": "auto"}, 4096, 65536),
    ],
)
def test_an_override_of_such_a_file_extends_it_further(given, native_length, max_length):
    of_file = merged(YARN | {"rope_type": "mrrope_pro", "bounds": [2, 9]}, None, 4096)
    rope = served({"rope_type": "mrrope_uni", **given}, of_file)
    assert (rope.native_length, rope.max_length) == (native_length, max_length)
    if "original_max_position_embeddings" not in given:
        native = YARN | {"rope_type": "mrrope_pro", "bounds": [2, 9]}
        options = {"scale": 2.0} if given["factor"] == 2 else {"scale": "auto"}
        assert rope.ladder(DIM).tables == patched_tables(native, "mrrope_uni", **options)
        assert rope.untrained_extension == "mrrope_pro with factor 4"


def test_an_override_of_an_exported_longrope_extends_it_further():
    """Both of its factors are the same; those of a trained one are not."""
    given = {"rope_type": "mrrope_uni", "factor": 2}
    exported = LONGROPE | {"short_factor": LONGROPE["long_factor"]}
    assert served(given, exported).untrained_extension == "longrope with factor 4"
    assert served(given | {"original_max_position_embeddings": 1024}, exported).untrained_extension is None
    assert served(given, LONGROPE).untrained_extension is None


def test_an_override_replaces_what_a_file_says_about_serving():
    of_file = merged({"rope_type": "mrrope_pro", "factor": "auto", "rope_theta": BASE}, None, 4096)
    rope = served({"rope_type": "mrrope_uni", "factor": 4}, of_file)
    assert rope.ladder(DIM).tables == patched_tables(NATIVES["plain"], "mrrope_uni", scale=4.0)


def test_tables_by_name_path_and_content(tmp_path):
    shipped = mrrope.FrequencyTable.load("smollm2-135m-4x")
    native = {"rope_type": "default", "rope_theta": shipped.base}
    length = shipped.original_max_position
    path = tmp_path / "table.json"
    shipped.save(path)
    for table in ("smollm2-135m-4x", str(path), shipped.to_dict()):
        rope = served({"rope_type": "mrrope", "table": table}, native, length)
        assert rope.ladder(shipped.rotary_dim).tables == (shipped,)
        assert not rope.is_auto
        assert rope.max_length == 4 * length
    in_folder = merged({"rope_type": "mrrope", "table": "table.json"}, native, length, tmp_path)
    path.unlink()  # workers need no file
    assert ServedRope.of(in_folder).ladder(shipped.rotary_dim).tables == (shipped,)


def test_a_list_of_tables_is_a_ladder():
    steps = [mrrope.FrequencyTable.load(f"smollm2-135m-{scale}x") for scale in (4, 2)]
    native, length = {"rope_type": "default", "rope_theta": steps[0].base}, steps[0].original_max_position
    given = {"rope_type": "mrrope", "table": ["smollm2-135m-4x", "smollm2-135m-2x"], "reserve": 100}
    rope = served(given, native, length)
    ladder = rope.ladder(steps[0].rotary_dim)
    assert (rope.is_auto, rope.reserve, ladder.reserve) == (True, 100, 100)
    assert ladder.tables[1:] == (steps[1], steps[0])
    assert ladder.tables[0].is_like(mrrope.frequency_table(
        "rope", rotary_dim=steps[0].rotary_dim, base=steps[0].base, original_max_position=length
    ))  # fmt: skip
    assert ladder.reaches == (length, 2 * length, 4 * length)
    one = served({"rope_type": "mrrope", "table": "smollm2-135m-4x", "factor": "auto"}, native, length)
    assert one.ladder(steps[0].rotary_dim).tables == (ladder.tables[0], steps[0])


@pytest.mark.parametrize("native", NATIVES.values(), ids=NATIVES)
def test_tables_do_not_depend_on_where_a_model_is_built(native):
    rope = served({"rope_type": "mrrope_pro", "factor": 4}, native)
    expected = rope.ladder(DIM).tables
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert rope.ladder(DIM).tables == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_of_others_are_not_served():
    for parameters in (None, {}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "mrrope_pro", "factor": 4.0}):
        assert ServedRope.of(parameters) is None


@pytest.mark.parametrize(
    ("parameters", "is_own"),
    [
        ({"rope_type": "mrrope_pro", "factor": 4}, True),
        ({"type": "mrrope_pro", "factor": 4}, True),
        ({"rope_type": "yarn_ratio"}, True),
        ({"rope_type": "mrrope"}, True),
        ({"rope_type": "mrrope_prof", "factor": 4}, True),
        ({"rope_type": "yarn", "factor": 4}, False),
        ({"rope_type": "yarn", "factor": "auto"}, True),
        ({"rope_type": "yarn", "factor": 4, "max_factor": 8}, True),
        ({"rope_type": "yarn", "factor": 4, "reserve": 8}, True),
        ({"rope_type": "linear", "table": "x.json"}, True),
        ({"rope_type": "ntk", "factor": 4}, False),
        ({"rope_type": "default", "table": None}, False),
        ({"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}, False),
        ({"full_attention": {"rope_type": "mrrope_pro", "factor": 4}}, False),
        (None, False),
    ],
)
def test_types_of_vllm_stay_its_own(parameters, is_own):
    assert selects_mrrope(parameters) is is_own


def test_all_methods_but_those_of_engines_are_types_of_mrrope():
    assert {ROPE_TYPE, *METHODS} - SHARED_TYPES == OWN_TYPES


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_parameters_are_found_anywhere_in_settings(name):
    pro, yarn = {"rope_type": "mrrope_pro", "factor": 4}, {"rope_type": "yarn", "factor": 4}
    for settings in ({name: pro}, {"text_config": {name: pro}}, {name: {"full_attention": pro, "sliding": None}}):
        assert mentions_mrrope(settings)
    # Keys of mrrope are keys of others elsewhere.
    for settings in (None, {}, {name: None}, {name: yarn}, {name: {"full_attention": yarn}}, {"quantization": pro}):
        assert not mentions_mrrope(settings)


def test_types_of_vllm_with_keys_of_mrrope():
    assert RopeRequest.read({"rope_type": "linear", "factor": "auto"}).method == "pi"
    assert RopeRequest.read({"rope_type": "yarn", "factor": "auto", "max_factor": 4}).method == "yarn"


PRO = {"rope_type": "mrrope_pro", "factor": 4}
AUTO = {"rope_type": "mrrope_pro", "factor": "auto"}
TABLE = {"rope_type": "mrrope", "table": "smollm2-135m-4x"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PRO | {"fator": 4, "maxfactor": 2}, "got 'fator', 'maxfactor'"),
        (PRO | {"mrope_sections": [1]}, "got 'mrope_sections'"),
        (PRO | {"type": "yarn"}, "rope_type and type must agree, got 'mrrope_pro' and 'yarn'"),
        (PRO | {"factor": 0.5}, 'factor must be a number from 1 on, or "auto", got 0.5'),
        (PRO | {"factor": True}, "factor must be .* got True"),
        (PRO | {"factor": "16"}, "factor must be .* got '16'"),
        (PRO | {"factor": math.inf}, "factor must be .* got inf"),
        ({"rope_type": "mrrope_pro"}, "factor must be given with mrrope_pro"),
        (PRO | {"max_factor": 8}, 'max_factor must come with factor "auto", got max_factor 8'),
        (PRO | {"reserve": 8}, 'reserve must come with factor "auto", got reserve 8'),
        (AUTO | {"max_factor": 1}, "max_factor must be a number above 1, got 1"),
        (AUTO | {"max_factor": "8"}, "max_factor must be a number above 1, got '8'"),
        (AUTO | {"reserve": -1}, "reserve must be a non-negative integer, got -1"),
        (AUTO | {"reserve": 1.5}, "reserve must be a non-negative integer, got 1.5"),
        (AUTO | {"reserve": True}, "reserve must be a non-negative integer, got True"),
        ({"rope_type": "mrrope"}, "must come with a method or a table, got neither"),
        (TABLE | {"method": "yarn"}, "must come with a method or a table, got 'yarn' and 'smollm2-135m-4x'"),
        ({"rope_type": "mrrope", "method": "yarm", "factor": 4}, "method must be one of rope, .* got 'yarm'"),
        (PRO | {"method": "yarn"}, "method must come with rope_type 'mrrope', got 'mrrope_pro'"),
        (PRO | {"table": "x.json"}, "table must come with rope_type 'mrrope', got 'mrrope_pro'"),
        (PRO | {"rope_type": "mrrope_prof"}, "rope_type must be 'mrrope' or a method .* got 'mrrope_prof'"),
        ({"rope_type": "dynamic", "factor": "auto"}, "rope_type must be 'mrrope' or a method .* got 'dynamic'"),
        ({"factor": "auto"}, "rope_type must be 'mrrope' or a method .* got None"),
        (TABLE | {"factor": 8}, "factor must be 'auto' or left out with a ready table, got 8"),
        (TABLE | {"table": ["smollm2-135m-4x"], "factor": 4}, "left out with a list of tables, got 4"),
        (TABLE | {"power": 2}, "leaves no room for power"),
        (TABLE | {"factor": "auto", "max_factor": 8}, "leave no room for max_factor, got 8"),
        (TABLE | {"table": "smollm3"}, "table must be the path of a table's .json, .* got 'smollm3'"),
        (TABLE | {"table": 3}, "table must be .* got 3"),
        (TABLE | {"table": []}, "table must be a table or a list of tables, got an empty list"),
        (TABLE | {"table": {"format": "x"}}, "table must be a table's JSON: format must be"),
        (PRO | {"power": "2"}, "power must be a number, got '2'"),
        (PRO | {"bounds": [1]}, r"bounds must be a list of two integers, got \[1\]"),
        (PRO | {"bounds": [1.5, 2]}, "bounds must be a list of two integers"),
        (PRO | {"factors": "1, 2"}, "factors must be a list of numbers, got '1, 2'"),
        (PRO | {"attention_factor": 0}, "attention_factor must be a positive number, got 0"),
        (PRO | {"beta_slow": [1]}, r"beta_slow must be a number, got \[1\]"),
        (PRO | {"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
        (PRO | {"original_max_position_embeddings": "4096"}, "original_max_position_embeddings must be a positive"),
        ({"rope_type": "mrrope_pow", "factor": 4}, "do not fit the model: power"),
        (PRO | {"bounds": [9, 2]}, r"'bounds': \[9, 2\]} do not fit the model: bounds"),
        (TABLE, "do not fit the model: method must be a table for the model's base"),
    ],
)
def test_bad_values_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        merged(given, NATIVES["plain"], STATED)


def test_a_missing_table_is_named():
    with pytest.raises(FileNotFoundError, match=r"there is no nowhere/table.json"):
        merged({"rope_type": "mrrope", "table": "nowhere/table.json"}, NATIVES["plain"], STATED)


def test_a_table_for_another_head_is_refused_when_the_layer_is_built():
    shipped = mrrope.FrequencyTable.load("smollm2-135m-4x")
    native = {"rope_type": "default", "rope_theta": shipped.base}
    rope = served(TABLE, native, shipped.original_max_position)
    with pytest.raises(ValueError, match="rotary_dim 128, got"):
        rope.ladder(128)


@pytest.mark.parametrize(
    ("native", "given", "message"),
    [
        ({"rope_type": "proportional", "rope_theta": BASE}, PRO, "this one has 'proportional'"),
        ({"rope_type": "ntk", "factor": 2.0}, PRO, "this one has 'ntk'"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, PRO, "this one sets alpha"),
        (YARN | {"extrapolation_factor": 2.0}, PRO, "this one sets extrapolation_factor"),
        (LONGROPE, AUTO, "factor must be a number for a model with rope_type 'longrope'.*'auto'"),
        (NATIVES["dynamic"], AUTO, "factor must be a number for a model with rope_type 'dynamic'"),
        (LONGROPE, PRO | {"factor": 1}, "factor must extend a model with rope_type 'longrope'"),
    ],
)
def test_models_that_cannot_be_extended_are_refused(native, given, message):
    with pytest.raises(ValueError, match=message):
        merged(given, native, STATED)


def test_a_model_that_states_no_length_needs_one():
    with pytest.raises(ValueError, match="original_max_position_embeddings must be given for this model"):
        merged(PRO, NATIVES["plain"], None)
    assert served(PRO | {"original_max_position_embeddings": 1024}, NATIVES["plain"], None).max_length == 4096
    assert served(PRO, YARN, None).max_length == 4 * 4096


def test_yarn_of_mistral_without_a_temperature():
    (expected,) = patched_tables(YARN | {"attention_factor": 1.0}, "mrrope_pro", scale=4.0)
    assert served(PRO, YARN | {"apply_yarn_scaling": False, "mscale_all_dim": 1}).ladder(DIM).tables == (expected,)


# --- tables per layer and head ---

SHIPPED = mrrope.TableSet.load("smollm2-135m-heads-4x")
SMOLLM = {"rope_type": "default", "rope_theta": SHIPPED.base}
OF_HEADS = mrrope.HeadTables(SHIPPED[0])


@pytest.mark.parametrize("tables", [SHIPPED, OF_HEADS], ids=["set", "heads"])
def test_tables_per_layer_and_head_by_path_and_content(tmp_path, tables):
    path = tmp_path / "tables.json"
    tables.save(path)
    for given in (str(path), tables.to_dict()):
        rope = served({"rope_type": "mrrope", "table": given}, SMOLLM, 8192)
        assert rope.ladder(64).tables == (tables,)
        assert rope.ladder(rope.some_rotary_dim).tables == (tables,)
        assert (rope.is_auto, rope.max_length, rope.native_length) == (False, 32768, 8192)
    in_folder = merged({"rope_type": "mrrope", "table": "tables.json", "factor": 4.0}, SMOLLM, 8192, tmp_path)
    path.unlink()  # workers need no file
    assert ServedRope.of(in_folder).ladder(64).tables == (tables,)


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-heads"])
@pytest.mark.parametrize("max_factor", [None, 6])
def test_shipped_ladders_are_those_of_patch(name, max_factor):
    given = {"rope_type": "mrrope", "table": name, "factor": "auto", "max_factor": max_factor}
    ladder = served(given, SMOLLM, 8192).ladder(64)
    scales = [2, 4] if max_factor else [2, 4, 8, 16]
    assert ladder.tables[1:] == tuple(load_tables(f"{name}-{scale}x") for scale in scales)
    assert ladder.reaches == (8192, *(8192 * scale for scale in scales))
    without_factor = {"rope_type": "mrrope", "table": name}
    assert max_factor or served(without_factor, SMOLLM, 8192).ladder(64) == ladder


def test_a_ladder_may_mix_tables_and_sets():
    given = {"rope_type": "mrrope", "table": ["smollm2-135m-2x", "smollm2-135m-heads-4x"], "factor": "auto"}
    ladder = served(given, SMOLLM, 8192).ladder(64)
    assert ladder.tables[1:] == (mrrope.FrequencyTable.load("smollm2-135m-2x"), SHIPPED)


@pytest.mark.parametrize(
    ("given", "native", "length", "message"),
    [
        ({"table": "smollm2-135m-heads-4x"}, NATIVES["plain"], 8192, "table for the model's base 50000, got TableSet"),
        ({"table": "smollm2-135m-heads-4x"}, SMOLLM, 4096, "table for the model's original_max_position 4096, got"),
        ({"table": "smollm2-135m-heads", "factor": 4}, SMOLLM, 8192, "left out with a list of tables, got 4"),
        ({"table": "smollm2-135m-heads-4x", "factor": 8}, SMOLLM, 8192, "left out with a ready table, got 8"),
        ({"table": "smollm2-135m-heads", "max_factor": 1.5}, SMOLLM, 8192, "at least 2, the smallest scale .* got 1.5"),
        ({"table": "smollm2-135m-head"}, SMOLLM, 8192, "smollm2-135m-heads.* got 'smollm2-135m-head'"),
        ({"table": {"format": "mrrope.TableSet/1"}}, SMOLLM, 8192, "table must be a table's JSON: layers must be"),
    ],
)
def test_bad_sets_are_refused(given, native, length, message):
    with pytest.raises(ValueError, match=message):
        merged({"rope_type": "mrrope", **given}, native, length)


def test_messages_do_not_quote_whole_tables():
    table = {"rope_type": "mrrope", "table": [SHIPPED.to_dict(), OF_HEADS.to_dict()]}
    with pytest.raises(ValueError, match=r"'table': \['...', '...'\]} do not fit the model") as error:
        merged(table, SMOLLM, 4096)
    assert len(str(error.value)) < 400


def test_a_set_for_another_rotary_dim_is_refused_when_the_layer_is_built():
    with pytest.raises(ValueError, match="rotary_dim 128, got TableSet"):
        served({"rope_type": "mrrope", "table": "smollm2-135m-heads-4x"}, SMOLLM, 8192).ladder(128)
