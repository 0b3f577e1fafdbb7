"""patch, unpatch and patched on tiny models: against the stock code with the same frequencies, and without residue."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope
from mrrope.tables.frequency_table import METHOD_TRAITS

pytest.importorskip("transformers")

from model_tolerance import relative
from patched_models import (
    CONVENTIONS,
    LENGTH,
    LLAMA,
    TOLERANCE,
    UNFUSABLE,
    Snapshot,
    assert_same,
    logits,
    model_named,
    packed_tables,
    ready,
    unfused,
)
from tiny_models import random_model, tiny_config_of, tiny_model, tokens
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextGenerationPipeline
from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.usefixtures("quick_collection", "stock")


RADIX_FACTORS = [1.0, 1.0, 1.2, 1.1, 1.3, 1.0, 1.5]


CUMULATIVE_SCALES = [1.0, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 4.0]


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {}),
    ("pi", {"scale": 4.0}),
    ("ntk", {"scale": 4.0}),
    ("yarn", {"scale": 4.0}),
    ("yarn_ratio", {"scale": 4.0}),
    ("mrrope_uni", {"scale": 4.0}),
    ("mrrope_pro", {"scale": 4}),
    ("mrrope_pow", {"scale": 4.0, "power": 2.0}),
    ("radix", {"scale": 4.0, "factors": RADIX_FACTORS}),
    ("longrope", {"scale": 4.0, "factors": CUMULATIVE_SCALES, "attention_factor": 1.2}),
    ("llama3", {"scale": 4.0, "alpha": 1.0, "beta": 4.0}),
    ("mrrope_pro", {"scale": 4.0, "alpha": 0.5, "beta": 8.0}),
    ("mrrope_pro", {"scale": 4.0, "bounds": (1, 6)}),
    ("mrrope_pro", {"scale": 4.0, "attention_factor": 1.5}),
    ("mrrope_pro", {"scale": 4.0, "original_max_position": 24}),
]


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[f"{m}-{'-'.join(o)}" for m, o in METHODS])
def test_every_method_and_option(llama: PreTrainedModel, method: str, options: dict[str, Any]) -> None:
    before = logits(llama)
    want = logits(unfused(tiny_model("llama"), mrrope.frequency_table(method, **LLAMA | options)))
    assert mrrope.patch(llama, method, **options) is llama
    assert_same(logits(llama), want)
    assert (relative(want, before) > 1e-3) == (method != "rope")
    mrrope.unpatch(llama)
    assert torch.equal(logits(llama), before)


def test_no_method_is_left_out() -> None:
    assert {method for method, _ in METHODS} == {*METHOD_TRAITS}


@pytest.mark.parametrize("given", ["table", "path", "str"])
def test_a_ready_table(llama: PreTrainedModel, tmp_path: Path, given: str) -> None:
    table = mrrope.frequency_table("mrrope_pow", **LLAMA, scale=8.0, power=0.5)
    path = tmp_path / "table.json"
    table.save(path)
    mrrope.patch(llama, {"table": table, "path": path, "str": str(path)}[given])
    assert torch.equal(packed_tables(llama)["model.rotary_emb.packed_table"], table.packed(torch.device("cpu")))
    assert_same(logits(llama), logits(unfused(tiny_model("llama"), table)))


@pytest.mark.parametrize("scale", [4.0, 4])
def test_a_ready_table_with_its_own_scale(llama: PreTrainedModel, scale: float) -> None:
    want = logits(mrrope.patch(llama, ready()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(mrrope.patch(llama, ready(), scale=scale)), want)


def test_a_table_of_another_model_that_is_meant(llama: PreTrainedModel) -> None:
    table = other_model(base=5e4, original_max_position=128)
    mrrope.patch(llama, table, base=5e4, original_max_position=128)
    assert_same(logits(llama), logits(unfused(tiny_model("llama"), table)))


def test_types_that_recompute_their_frequencies_do_not_undo_the_patch() -> None:
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = modeling_llama.LlamaForCausalLM(config).eval()
    ids = tokens(1, LENGTH + 32)  # past the trained length, where stock code recomputes its frequencies
    table = mrrope.frequency_table("mrrope_pro", **LLAMA, scale=4.0)
    reference = unfused(copy.deepcopy(model), table)
    reference.model.rotary_emb.rope_type = "default"
    assert_same(logits(mrrope.patch(model, table), input_ids=ids), logits(reference, input_ids=ids))


def other_model(**settings: float) -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_pro", **LLAMA | settings, scale=4.0)


def other_size() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_pro", **LLAMA | {"rotary_dim": 8}, scale=4.0)


WRONG_CALLS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "unknown method": ("mrrope_max", {"scale": 4.0}, ValueError, "method.*mrrope_max"),
    "no method": (None, {}, TypeError, "method"),
    "a number for a method": (4.0, {}, TypeError, "method"),
    "scale of nothing": ("mrrope_pro", {"scale": 0.0}, ValueError, "scale"),
    "negative scale": ("yarn", {"scale": -4.0}, ValueError, "scale"),
    "scale that shrinks": ("yarn", {"scale": 0.5}, ValueError, "scale must be a finite number, 1 or more, got 0.5"),
    "scale not a number": ("yarn", {"scale": float("nan")}, ValueError, "scale"),
    "infinite scale": ("pi", {"scale": float("inf")}, ValueError, "scale"),
    "scale of words": ("pi", {"scale": "four"}, TypeError, "scale"),
    "unknown option": ("pi", {"scale": 2.0, "colour": 1}, TypeError, "colour"),
    "rotary_dim of its own": ("pi", {"scale": 2.0, "rotary_dim": 8}, ValueError, "rotary_dim 16"),
    "bad bounds": ("mrrope_pro", {"scale": 4.0, "bounds": (6, 1)}, ValueError, "bounds"),
    "bad trained length": ("yarn", {"scale": 4.0, "original_max_position": 0}, ValueError, "original_max_position"),
    "no power": ("mrrope_pow", {"scale": 4.0}, ValueError, "power"),
    "no factors": ("radix", {"scale": 4.0}, ValueError, "factors"),
    "factors of another size": ("longrope", {"scale": 4.0, "factors": [1.0] * 7}, ValueError, "factors"),
    "table of another size": (other_size(), {}, ValueError, "method.*rotary_dim 16"),
    "table of another base": (other_model(base=5e4), {}, ValueError, r"model's base 10000, .* say base=50000"),
    "table of another length": (
        other_model(original_max_position=128),
        {},
        ValueError,
        r"model's original_max_position 64, .* say original_max_position=128",
    ),
    "table and another scale": (ready(), {"scale": 8.0}, ValueError, r"ready table, .* {'scale': 8.0}: its scale is 4"),
    "scale that is true": ("rope", {"scale": True}, TypeError, "scale must be a number or 'auto', got True"),
    "scale that is true of a table": (
        ready(),
        {"scale": True},
        TypeError,
        "scale must be a number or 'auto', got True",
    ),
    "scale in capitals": ("pi", {"scale": "Auto"}, TypeError, "scale must be a number or 'auto', got 'Auto'"),
    "transformers' name of scale": ("pi", {"factor": 4}, TypeError, "'factor': it is called scale here, got factor=4"),
    "transformers' name of beta": ("yarn", {"scale": 4.0, "beta_fast": 8}, TypeError, "'beta_fast': it is called beta"),
    "a ladder": (
        "smollm2-135m",
        {"scale": 4.0},
        ValueError,
        "method must be one table without scale='auto', such as 'smollm2-135m-2x', .* a ladder of 4, got scale 4.0",
    ),
    "table and option": (ready(), {"alpha": 2.0}, ValueError, "ready table.*alpha"),
    "no scale": (
        "yarn",
        {},
        ValueError,
        "scale must be given with method 'yarn': scale=4.0 covers 4 times the 64 tokens of the model, and patch takes "
        "scale='auto', got none",
    ),
    "no scale with options": ("mrrope_pow", {"power": 1.0, "original_max_position": 32}, ValueError, "the 32 tokens"),
    "table and scale 1": (ready(), {"scale": 1.0}, ValueError, r"ready table, .* {'scale': 1.0}: its scale is 4"),
    "transformers' name of base": ("yarn", {"rope_theta": 1e6}, TypeError, "'rope_theta': it is called base here"),
    "a hyphen": ("mrrope-pro", {"scale": 4.0}, ValueError, "got 'mrrope-pro': the nearest is 'mrrope_pro'"),
    "capitals": ("YaRN", {"scale": "auto"}, ValueError, "got 'YaRN': the nearest is 'yarn'"),
    "a letter amiss": ("smollm2-135n-8x", {"scale": 8.0}, ValueError, ".* the nearest is 'smollm2-135m-8x'"),
    "no such file": ("/nowhere/table.json", {}, FileNotFoundError, "/nowhere/table.json"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls_leave_the_model_alone(llama: PreTrainedModel, case: str) -> None:
    method, options, error, words = WRONG_CALLS[case]
    before = Snapshot(llama)
    with pytest.raises(error, match=words):
        mrrope.patch(llama, method, **options)
    before.assert_untouched()
    with pytest.raises(error, match=words), mrrope.patched(llama, method, **options):
        pytest.fail("must not get here")
    before.assert_untouched()


@pytest.mark.parametrize("method", ["rope", "ready"])
def test_what_extends_nothing_or_has_a_scale_needs_none(llama: PreTrainedModel, method: str) -> None:
    mrrope.patch(llama, ready() if method == "ready" else method)
    assert mrrope.patch_of(llama).scale == (4.0 if method == "ready" else 1.0)


def test_wrong_calls_leave_a_patched_model_patched(llama: PreTrainedModel, tmp_path: Path) -> None:
    mrrope.patch(llama, "yarn", scale=2.0)
    before, found = Snapshot(llama), logits(llama)
    not_json = tmp_path / "table.json"
    not_json.write_text("inv_freq: 1")
    wrong: list[tuple[Any, dict[str, Any]]] = [("mrrope_max", {}), ("pi", {"scale": 0.0}), (not_json, {})]
    for method, options in wrong:
        with pytest.raises(ValueError, match=r"method|scale|table\.json"):
            mrrope.patch(llama, method, **options)
        before.assert_untouched()
    assert torch.equal(logits(llama), found)


@pytest.mark.parametrize("call", [lambda model: mrrope.patch(model, "pi", scale=2.0), mrrope.unpatch])
@pytest.mark.parametrize("thing", ["llama", None, {"model": 1}])
def test_only_modules_are_models(call: Callable[[Any], Any], thing: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        call(thing)


def test_a_pipeline_has_a_model(llama: PreTrainedModel) -> None:
    pipeline = TextGenerationPipeline(model=llama, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())))
    for call in (lambda of: mrrope.patch(of, "pi", scale=2.0), mrrope.unpatch, mrrope.is_patched):
        with pytest.raises(TypeError, match=r"nn\.Module, got TextGenerationPipeline: pass its \.model"):
            call(pipeline)


def test_models_without_rope() -> None:
    model = tiny_model("gpt2")
    before = Snapshot(model)
    with pytest.raises(ValueError, match="model must have rotary position embeddings, and GPT2LMHeadModel"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    before.assert_untouched()
    with pytest.raises(ValueError, match="model must be a patched one"):
        mrrope.unpatch(model)


@pytest.mark.parametrize("family", CONVENTIONS)
def test_conventions(family: str, recwarn: pytest.WarningsRecorder) -> None:
    rotary_dim, base = CONVENTIONS[family]
    model = tiny_model(family)
    before, plain = Snapshot(model), logits(model)
    table = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=rotary_dim, base=base, original_max_position=LENGTH, scale=8.0
    )
    want = logits(unfused(tiny_model(family), table))
    mrrope.patch(model, "mrrope_pro", scale=8.0)
    assert not [warning for warning in recwarn if "fused" in str(warning.message)]
    assert packed_tables(model)
    assert_same(logits(model), want)
    assert relative(want, plain) > 1e-3
    mrrope.unpatch(model)
    before.assert_untouched()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("family", ["llama", "llama4_text"])
def test_positions_of_the_callers_own(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family)
    positions = torch.stack([torch.arange(24) + 7, torch.arange(24) * 2]).to(dtype)
    call = {"position_ids": positions, "attention_mask": torch.ones(2, 24, dtype=torch.long)}
    rotary_dim, base = CONVENTIONS.get(family, (16, 1e4))
    table = mrrope.frequency_table("pi", rotary_dim=rotary_dim, base=base, original_max_position=LENGTH, scale=4.0)
    want = logits(unfused(tiny_model(family), table), **call)
    assert_same(logits(mrrope.patch(model, table), **call), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", *CONVENTIONS])
def test_fractions_of_a_position(family: str, dtype: torch.dtype) -> None:
    positions = torch.stack([torch.arange(24) * 0.3 + 7.5, torch.arange(24) * 2.7]).to(dtype)
    call = {"position_ids": positions, "attention_mask": torch.ones(2, 24, dtype=torch.long)}
    rotary_dim, base = CONVENTIONS.get(family, (16, 1e4))
    table = mrrope.frequency_table("pi", rotary_dim=rotary_dim, base=base, original_max_position=LENGTH, scale=4.0)
    reference = unfused(tiny_model(family), table)
    want = logits(reference, **call)
    assert_same(logits(mrrope.patch(tiny_model(family), table), **call), want)
    assert relative(logits(reference, **call | {"position_ids": positions.long()}), want) > 1e-3, "fractions matter"


@pytest.mark.usefixtures("rope_types")
def test_fractions_of_a_position_in_a_configured_rope_type() -> None:
    config = tiny_config_of("llama")
    extension = {"rope_type": "mrrope_pro", "factor": 4.0, "original_max_position_embeddings": LENGTH}
    config.rope_parameters = {**config.rope_parameters, **extension}
    call = {"position_ids": torch.arange(24)[None] * 2.7, "input_ids": tokens(1, 24)}
    assert_same(logits(random_model(config), **call), logits(unfused(tiny_model("llama"), ready()), **call))


def test_several_positions_a_token() -> None:
    """M-RoPE: text, an image of 3 x 4 patches, text again, as Qwen numbers them."""
    height, width = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    image = torch.stack([torch.zeros(12), height.flatten(), width.flatten()]).long() + 5
    positions = torch.cat([torch.arange(5).expand(3, -1), image, torch.arange(9, 16).expand(3, -1)], dim=1)
    positions = torch.stack([positions, positions.roll(1, dims=0) + 3], dim=1)  # [3, batch 2, 24]
    rotary_dim, base = CONVENTIONS["qwen3_5_text"]
    table = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=rotary_dim, base=base, original_max_position=LENGTH, scale=4.0
    )
    reference, model = unfused(tiny_model("qwen3_5_text"), table), mrrope.patch(tiny_model("qwen3_5_text"), table)
    want = logits(reference, position_ids=positions)
    assert_same(logits(model, position_ids=positions), want)
    assert relative(logits(model, position_ids=positions[:1].expand(3, -1, -1)), want) > 1e-3, "rows must matter"
    assert_same(logits(model), logits(reference))


def test_where_the_op_cannot_be_fused_the_table_is_swapped() -> None:
    model = model_named(UNFUSABLE)
    plain = logits(model)
    table = mrrope.frequency_table("mrrope_pro", **LLAMA, scale=4.0)
    want = logits(unfused(model_named(UNFUSABLE), table))
    with pytest.warns(UserWarning, match="gets the table but not the fused op: OwnCosines computes"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert not packed_tables(model)
    assert torch.equal(logits(model), want)
    clone = copy.deepcopy(model)
    mrrope.unpatch(model)
    assert torch.equal(logits(model), plain)
    assert torch.equal(logits(clone), want)
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "qwen3_5_text"])
def test_casts_leave_the_tables_alone(family: str, dtype: torch.dtype) -> None:
    model = mrrope.patch(tiny_model(family), "mrrope_pro", scale=4.0)
    tables = {name: table.clone() for name, table in packed_tables(model).items()}
    exact = logits(model)
    cast = {torch.float16: model.half, torch.bfloat16: model.bfloat16, torch.float64: model.double}[dtype]
    assert cast() is model
    model.to(dtype)
    assert {table.dtype for table in packed_tables(model).values()} == {torch.int64}
    assert all(torch.equal(table, tables[name]) for name, table in packed_tables(model).items())
    assert relative(logits(model), exact) < 4 * TOLERANCE[dtype]
    again = copy.deepcopy(model)
    assert torch.equal(logits(again), logits(model))
    model.float()
    assert all(torch.equal(table, tables[name]) for name, table in packed_tables(model).items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """As close to float64 as stock code in the same dtype is, to within the rounding of either."""
    exact = logits(mrrope.patch(tiny_model("llama", dtype=torch.float64), ready()))
    found = logits(mrrope.patch(tiny_model("llama").to(dtype), ready()))
    stock = logits(unfused(tiny_model("llama").to(dtype), ready()))
    assert found.dtype == dtype
    assert relative(found, exact) < max(1.25 * relative(stock, exact), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_of_latent_attention(dtype: torch.dtype) -> None:
    """No further off float32 than stock code is. All experts are active: otherwise rounding decides which."""
    config = tiny_config_of("deepseek_v3")
    config.num_experts_per_tok = config.n_routed_experts
    model = random_model(config, dtype=dtype)
    stock, found = logits(model), logits(mrrope.patch(copy.deepcopy(model), "rope"))
    exact = logits(model.float())  # the experts have no float64
    assert relative(found, exact) < relative(stock, exact)
