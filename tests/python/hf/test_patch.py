"""patch, unpatch and patched on tiny models: against the stock code with the same frequencies, and without residue."""

import copy
import gc
import importlib
import pickle
import subprocess
import sys
import warnings
import weakref
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
    IN_A_FRESH_PROCESS,
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
    rotary_embedding,
    unfused,
)
from safetensors.torch import load_file
from tiny_models import random_model, tiny_config_of, tiny_model, tokens
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextGenerationPipeline
from transformers.models.llama import modeling_llama

RADIX_FACTORS = [1.0, 1.0, 1.2, 1.1, 1.3, 1.0, 1.5]
CUMULATIVE_SCALES = [1.0, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 4.0]


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    """Freeze the many objects of transformers, so that collections before every test skip them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def stock() -> Any:
    """Llama's own function, restored once the patched models of other tests are collected."""
    gc.collect()
    assert not hasattr(modeling_llama.apply_rotary_pos_emb, "__wrapped__")
    return modeling_llama.apply_rotary_pos_emb


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
        "scale must be given with method 'yarn': scale=4.0 extends the 64 tokens that the model reads 4 times, and "
        "patch takes scale='auto', got none",
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


def test_unpatching_what_is_not_patched(llama: PreTrainedModel) -> None:
    before = Snapshot(llama)
    with pytest.raises(ValueError, match="model must be a patched one, and this LlamaForCausalLM is not"):
        mrrope.unpatch(llama)
    mrrope.unpatch(mrrope.patch(llama, "pi", scale=2.0))
    with pytest.raises(ValueError, match="model must be a patched one"):
        mrrope.unpatch(llama)
    before.assert_untouched()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", UNFUSABLE])
@pytest.mark.filterwarnings("ignore:.*not the fused op")
def test_unpatch_puts_the_very_same_objects_back(family: str) -> None:
    model = model_named(family)
    before, found = Snapshot(model), logits(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert model.state_dict().keys() == {*before.keys}
    assert not torch.equal(logits(model), found)
    assert mrrope.unpatch(model) is model
    before.assert_untouched()
    assert torch.equal(logits(model), found)


def test_patching_twice_replaces(llama: PreTrainedModel) -> None:
    before = Snapshot(llama)
    mrrope.patch(llama, "pi", scale=4.0)
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    assert_same(logits(llama), logits(unfused(tiny_model("llama"), ready())))
    mrrope.unpatch(llama)  # once is enough
    before.assert_untouched()


def test_an_inner_model_can_be_patched(llama: PreTrainedModel) -> None:
    before = Snapshot(llama)
    want = logits(unfused(tiny_model("llama"), ready()))
    assert mrrope.patch(llama.model, ready()) is llama.model
    assert_same(logits(llama), want)
    mrrope.unpatch(llama)
    before.assert_untouched()


def test_a_rotary_embedding_alone_is_refused(llama: PreTrainedModel) -> None:
    """Only its owner can replace it."""
    with pytest.raises(ValueError, match="model must"):
        mrrope.patch(rotary_embedding(llama), "pi", scale=2.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_models_beside_each_other(order: tuple[int, int], stock: Any) -> None:
    methods = ["mrrope_pro", "pi"]
    models = [tiny_model("llama") for _ in methods]
    beside = tiny_model("llama")
    plain = logits(beside)
    want = [
        logits(unfused(tiny_model("llama"), mrrope.frequency_table(method, **LLAMA, scale=4.0))) for method in methods
    ]
    for model, method in zip(models, methods, strict=True):
        mrrope.patch(model, method, scale=4.0)
    for i in order:
        assert torch.equal(logits(beside), plain)
        assert torch.equal(logits(tiny_model("llama")), plain)  # made after the patch
        assert_same(logits(models[i]), want[i])
        assert_same(logits(models[order[1]]), want[order[1]])
        assert modeling_llama.apply_rotary_pos_emb is not stock
        assert torch.equal(logits(mrrope.unpatch(models[i])), plain)
    assert modeling_llama.apply_rotary_pos_emb is stock
    assert torch.equal(logits(beside), plain)


@pytest.mark.parametrize("others", [0, 1])
def test_a_patched_model_may_be_dropped(llama: PreTrainedModel, stock: Any, others: int) -> None:
    plain = logits(llama)
    dropped = mrrope.patch(tiny_model("llama"), "pi", scale=4.0)
    kept = [mrrope.patch(tiny_model("llama"), ready()) for _ in range(others)]
    gone = weakref.ref(rotary_embedding(dropped))
    del dropped
    gc.collect()
    assert gone() is None, "patching must not keep a model alive"
    assert (modeling_llama.apply_rotary_pos_emb is stock) == (others == 0)
    assert torch.equal(logits(llama), plain)
    for model in [*kept, mrrope.patch(llama, ready())]:
        assert_same(logits(model), logits(unfused(tiny_model("llama"), ready())))
        assert torch.equal(logits(mrrope.unpatch(model)), plain)
    assert modeling_llama.apply_rotary_pos_emb is stock


def test_a_function_over_ours_stays(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, stock: Any) -> None:
    """A function that another library installs over the fused one stays."""
    mrrope.patch(llama, "pi", scale=4.0)
    ours = modeling_llama.apply_rotary_pos_emb

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", theirs)
    assert_same(logits(llama), logits(unfused(tiny_model("llama"), mrrope.frequency_table("pi", **LLAMA, scale=4.0))))
    plain = logits(tiny_model("llama"))
    assert torch.equal(logits(mrrope.unpatch(llama)), plain)
    assert modeling_llama.apply_rotary_pos_emb is theirs
    monkeypatch.undo()
    modeling_llama.apply_rotary_pos_emb = stock


def test_patched_is_patch_and_unpatch(llama: PreTrainedModel) -> None:
    before, plain = Snapshot(llama), logits(llama)
    with mrrope.patched(llama, "mrrope_pro", scale=4.0) as model:
        assert model is llama
        assert_same(logits(llama), logits(unfused(tiny_model("llama"), ready())))
    before.assert_untouched()
    with pytest.raises(ZeroDivisionError), mrrope.patched(llama, ready()):
        raise ZeroDivisionError
    before.assert_untouched()
    with mrrope.patched(llama, ready()):
        mrrope.unpatch(llama)  # early
    before.assert_untouched()
    assert torch.equal(logits(llama), plain)


def test_patched_blocks_nest(llama: PreTrainedModel) -> None:
    before = Snapshot(llama)
    with mrrope.patched(llama, "pi", scale=2.0):
        outer = logits(llama)
        with mrrope.patched(llama, "mrrope_pro", scale=4.0):
            assert not torch.equal(logits(llama), outer)
        assert torch.equal(logits(llama), outer)
    before.assert_untouched()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", UNFUSABLE])
@pytest.mark.filterwarnings("ignore:.*not the fused op")
def test_patched_on_a_model_that_comes_patched(family: str) -> None:
    model = model_named(family)
    plain = logits(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    found = logits(model)
    with mrrope.patched(model, "pi", scale=2.0):
        assert not torch.equal(logits(model), found)
    assert torch.equal(logits(model), found)
    with pytest.raises(ZeroDivisionError), mrrope.patched(model, "pi", scale=2.0):
        raise ZeroDivisionError
    assert torch.equal(logits(model), found)
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


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


def test_a_model_of_windowed_layers_alone_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrrope.hf.rope_config.is_local", lambda _: True)
    model = tiny_model("llama")
    before = logits(model)
    with pytest.warns(UserWarning, match="keeps its own tables: all its layers with RoPE see only a window"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    torch.testing.assert_close(logits(model), before)
    mrrope.patch(model, "mrrope_pro", scale=4.0, local_layers=True)
    assert (logits(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [4.0, "auto"])
@pytest.mark.parametrize("family", ["mistral", "ministral"])
def test_a_window_under_one_rope_in_all_layers_warns(family: str, scale: float | str) -> None:
    model = tiny_model(family)
    ids = tokens(1, LENGTH)
    others = torch.cat([ids[:, :1] % 90 + 4, ids[:, 1:]], dim=1)
    reach = 256 if scale == 4.0 else 1024
    said = rf"reads {reach} tokens so, but no layer sees further back than its sliding window of 8: sliding_window"
    with pytest.warns(UserWarning, match=said):
        mrrope.patch(model, "mrrope_pro", scale=scale)
    assert torch.equal(*(logits(model, input_ids=each)[:, -1] for each in (ids, others))), "the first token is unseen"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 4 * LENGTH}),
        ("gemma2", {}),
        ("qwen2", {"sliding_window": 8}),
    ],
)
def test_layers_that_see_the_whole_text_do_not_warn(family: str, changes: dict[str, Any]) -> None:
    config = tiny_config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(random_model(config), "mrrope_pro", scale=4.0)


def test_a_window_that_is_not_extended_past_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(tiny_model("mistral"), "rope")


@pytest.mark.parametrize("local_layers", [False, True])
def test_local_layers_have_a_rope_of_their_own(local_layers: bool) -> None:
    size = {"rotary_dim": 16, "original_max_position": LENGTH}
    tables = {
        "full_attention": mrrope.frequency_table("mrrope_pro", base=1e6, scale=4.0, **size),
        "sliding_attention": mrrope.frequency_table("mrrope_pro" if local_layers else "rope", base=1e4,
                                                    scale=4.0 if local_layers else 1.0, **size),
    }  # fmt: skip
    reference, model = tiny_model("gemma3_text"), tiny_model("gemma3_text")
    plain = logits(model)
    for layer_type, table in tables.items():
        unfused(reference, table, layer_type)
    mrrope.patch(model, "mrrope_pro", scale=4.0, **({"local_layers": True} if local_layers else {}))
    for layer_type, table in tables.items():
        packed = packed_tables(model)[f"model.rotary_emb.{layer_type}_packed_table"]
        # The model's own frequencies are float32, so phase steps agree in their first 24 bits.
        difference = (packed[:-1] - table.turns).abs().double() / table.turns.abs()
        assert difference.max() < 2**-23
        assert packed[-1] == table.packed(torch.device("cpu"))[-1]
    assert_same(logits(model), logits(reference))
    assert relative(logits(reference), plain) > 1e-3


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


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ["llama", "llama4_text", "gemma3_text"])
def test_copies_stand_on_their_own(family: str, how: Callable[[Any], Any]) -> None:
    model = tiny_model(family)
    plain = logits(model)
    found = logits(mrrope.patch(model, "mrrope_pro", scale=4.0))
    clone = how(model)
    assert torch.equal(logits(clone), found)
    assert torch.equal(logits(mrrope.unpatch(model)), plain)
    assert torch.equal(logits(clone), found), "unpatching the one must not touch the other"
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)


def test_an_unpatched_copy_of_a_model_that_is_patched_later(llama: PreTrainedModel) -> None:
    clone, plain = copy.deepcopy(llama), logits(llama)
    mrrope.patch(llama, "pi", scale=4.0)
    assert torch.equal(logits(clone), plain)


@pytest.mark.slow
def test_unpickled_in_a_fresh_process(tmp_path: Path) -> None:
    families = ["llama", "deepseek_v3", "llama4_text", "gemma3_text", "qwen3_5_text", "qwen3", "olmo2"]
    cases = {}
    for family in families:
        model = tiny_model(family)
        plain = logits(model)
        cases[family] = (mrrope.patch(model, "mrrope_pro", scale=4.0), tokens(2, 24), logits(model), plain)
    path = tmp_path / "models.pickle"
    path.write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


ATTENTION_IN_ANOTHER_MODULE = """
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

class OtherAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **_):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None
"""


def test_unpickled_where_the_function_takes_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        saved = pickle.dumps(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, offset=0: (q, k))
    with pytest.raises(ValueError, match=r"patched anew: .*apply_rotary_pos_emb takes other arguments"):
        pickle.loads(saved)


@pytest.mark.slow
def test_unpickled_with_attention_in_another_module_than_the_rotary_embedding(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_modeling.py").write_text(ATTENTION_IN_ANOTHER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("other_modeling")
    for layer in llama.model.layers:
        layer.self_attn.__class__ = other.OtherAttention
    plain = logits(llama)
    want = logits(mrrope.patch(llama, "mrrope_pro", scale=4.0))
    path = tmp_path / "models.pickle"
    path.write_bytes(pickle.dumps({"other": (llama, tokens(2, 24), want, plain)}))
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_weights_are_saved_as_if_unpatched(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "before")
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    llama.save_pretrained(tmp_path / "patched")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "patched"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("before", "patched")]
    assert configs[0] == configs[1]
    again = type(llama).from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(again), logits(mrrope.unpatch(llama)))


def test_weights_load_into_a_patched_model(llama: PreTrainedModel) -> None:
    other = tiny_model("llama", seed=1)
    mrrope.patch(other, ready()).load_state_dict(llama.state_dict(), strict=True)
    assert torch.equal(logits(other), logits(mrrope.patch(llama, ready())))


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
