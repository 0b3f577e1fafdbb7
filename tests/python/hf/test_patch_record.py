"""Which patch a model has, and the warning where it is saved without it."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from patched_models import LLAMA, UNFUSABLE, Snapshot, logits, model_named, ready
from tiny_models import random_model, tiny_config_of, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not the fused op"),
    pytest.mark.usefixtures("rope_types", "no_other_patched_models"),
]


@pytest.fixture
def llama():
    return tiny_model("llama")


def table(method, scale, **options):
    return mrrope.frequency_table(method, **LLAMA, scale=scale, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", UNFUSABLE])
def test_a_method(family):
    model = model_named(family)
    assert mrrope.patch_of(model) is None
    for scale in (4.0, 2):
        mrrope.patch(model, "mrrope_pro", scale=scale, alpha=2.0)
        found = mrrope.patch_of(model)
        assert (found.method, found.scale) == ("mrrope_pro", scale)
        assert found.call == f"mrrope.patch(model, 'mrrope_pro', scale={scale!r}, alpha=2.0)"
        assert [each.scale for each in found.tables] == [scale]
    mrrope.unpatch(model)
    assert mrrope.patch_of(model) is None


def test_its_tables_and_its_call_patch_alike(llama):
    mrrope.patch(llama, "mrrope_pro", scale=4.0, alpha=2.0, local_layers=True)
    want, found = logits(llama), mrrope.patch_of(llama)
    assert found.tables == (table("mrrope_pro", 4.0, alpha=2.0),)
    assert torch.equal(logits(mrrope.patch(tiny_model("llama"), *found.tables)), want)
    assert torch.equal(logits(eval(found.call, {"mrrope": mrrope, "model": tiny_model("llama")})), want)


def test_a_ladder(llama):
    mrrope.patch(llama, "mrrope_uni", scale="auto", max_scale=4, reserve=3, fuse_norms=True)
    found = mrrope.patch_of(llama)
    assert (found.method, found.scale) == ("mrrope_uni", "auto")
    assert [each.scale for each in found.tables] == [1.0, 2.0, 4.0]
    assert found.call == ("mrrope.patch(model, 'mrrope_uni', scale='auto', max_scale=4, reserve=3, fuse_norms=True)")


def test_ready_tables(llama, tmp_path):
    heads = mrrope.HeadTables([table("mrrope_pro", 4.0)] * llama.config.num_key_value_heads)
    whole = mrrope.TableSet([heads] * llama.config.num_hidden_layers)
    ready().save(tmp_path / "table.json")
    for given in (ready(), heads, whole):
        found = mrrope.patch_of(mrrope.patch(llama, given))
        assert found == mrrope.patch_of(llama)
        assert (found.method, found.scale, found.tables) == (None, 4.0, (given,))
        assert found.call == "mrrope.patch(model, tables)"
    found = mrrope.patch_of(mrrope.patch(llama, tmp_path / "table.json"))
    assert found.call == f"mrrope.patch(model, '{tmp_path / 'table.json'}')"
    assert found.tables == (ready(),)


def test_parts_blocks_and_copies(llama):
    with mrrope.patched(llama, "pi", scale=2.0):
        assert mrrope.patch_of(llama).method == "pi"
        with mrrope.patched(llama, "ntk", scale=4.0):
            assert mrrope.patch_of(llama.model).method == "ntk"
        for each in (llama, llama.model, copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
            assert mrrope.patch_of(each).call == "mrrope.patch(model, 'pi', scale=2.0)"
    assert mrrope.patch_of(llama) is None


@pytest.mark.parametrize("family", ["llama", UNFUSABLE])
def test_saving_warns_once(family, tmp_path):
    model = model_named(family)
    before = Snapshot(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    said = r"save_pretrained writes \w+ without its patch: mrrope\.patch\(model, 'mrrope_pro', scale=4\.0\) after"
    with pytest.warns(UserWarning, match=said):
        model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
        mrrope.unpatch(model)
        before.assert_untouched()
        model.save_pretrained(tmp_path)
    mrrope.patch(model, "mrrope_pro", scale=2.0)
    with pytest.warns(UserWarning, match=r"scale=2\.0\) after"):
        model.model.save_pretrained(tmp_path)


def test_what_the_warning_says_keeps_the_patch(llama, tmp_path):
    want = logits(mrrope.patch(llama, "mrrope_pro", scale=4.0))
    with pytest.warns(UserWarning, match="without its patch"):
        llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    eval(mrrope.patch_of(llama).call, {"mrrope": mrrope, "model": loaded})
    assert torch.equal(logits(loaded), want)


def test_a_configuration_that_holds_the_tables_does_not_warn(tmp_path):
    config = tiny_config_of("llama")
    heads = mrrope.HeadTables([ready()] * config.num_key_value_heads)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "mrrope", "table": heads.to_dict()}
    model = random_model(config)
    assert mrrope.patch_of(model).tables == (heads,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    mrrope.patch(model, "mrrope_pro", scale=2.0)
    with pytest.warns(UserWarning, match="without its patch"):
        model.save_pretrained(tmp_path)


def test_trainer_and_peft(llama, tmp_path: Path):
    peft = pytest.importorskip("peft")
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    arguments = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True)
    with pytest.warns(UserWarning, match="without its patch"):
        Trainer(llama, arguments).save_model(tmp_path / "whole")
    adapted = peft.get_peft_model(mrrope.unpatch(llama), peft.LoraConfig(target_modules=["q_proj"]))
    mrrope.patch(adapted, "mrrope_pro", scale=4.0)
    with pytest.warns(UserWarning, match="writes PeftModel without its patch"):
        adapted.save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("tuned", ["layers", "prompt"])
def test_an_adapter_of_a_model_that_was_patched_before(llama, tmp_path: Path, tuned: str):
    """PEFT's own ``save_pretrained`` saves it, also from Trainer."""
    peft = pytest.importorskip("peft")
    configs = {
        "layers": lambda: peft.LoraConfig(target_modules=["q_proj"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }
    before = Snapshot(llama)
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without its patch")
        llama.state_dict()
        adapted = peft.get_peft_model(llama, configs[tuned]())
    said = r"PEFT writes LlamaForCausalLM without its patch: mrrope\.patch\(model, 'mrrope_pro', scale=4\.0\) after"
    with pytest.warns(UserWarning, match=said) as caught:
        adapted.save_pretrained(tmp_path / "adapter")
    assert len([each for each in caught if "without its patch" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without its patch")
        adapted.save_pretrained(tmp_path / "adapter")
        with mrrope.patched(llama, "mrrope_pro", scale=2.0):
            pass
        adapted.save_pretrained(tmp_path / "adapter")
    mrrope.patch(llama, "mrrope_pro", scale=2.0)
    arguments = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True)
    with pytest.warns(UserWarning, match=r"a checkpoint of PEFT writes .*scale=2\.0\) after from_pretrained"):
        Trainer(adapted, arguments).save_model(tmp_path / "trained")
    mrrope.unpatch(llama)
    assert not llama._state_dict_pre_hooks
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without its patch")
        adapted.save_pretrained(tmp_path / "adapter")
    if tuned == "prompt":  # which leaves the layers alone
        before.assert_untouched()


def test_copies_of_a_patched_model_warn_for_themselves(llama, tmp_path: Path):
    peft = pytest.importorskip("peft")
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    for copied in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        adapted = peft.get_peft_model(copied, peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.warns(UserWarning, match="a checkpoint of PEFT writes"):
            adapted.save_pretrained(tmp_path)
        mrrope.unpatch(copied)
        assert not copied._state_dict_pre_hooks
    assert llama._state_dict_pre_hooks
