"""``unpatch``, ``patched``, and several patched models beside each other."""

import gc
import weakref
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from patched_models import (
    LLAMA,
    UNFUSABLE,
    Snapshot,
    assert_same,
    logits,
    model_named,
    ready,
    rotary_embedding,
    unfused,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.usefixtures("quick_collection", "stock")


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


def test_a_patched_model_may_be_collected_while_another_is_probed(llama: PreTrainedModel, stock: Any) -> None:
    """Probes replace functions and put back what they found."""
    dropped = mrrope.patch(tiny_model("llama"), "pi", scale=4.0)
    dropped.itself = [dropped]  # a cycle, which only the garbage collector frees
    gone = weakref.ref(rotary_embedding(dropped))
    found: list[bool] = []

    def collect(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, torch.nn.Linear):  # of attention that is probed
            found.append(gone() is None)
            gc.collect()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(collect)
    gc.disable()
    try:
        del dropped
        mrrope.patch(llama, "pi", scale=4.0)
    finally:
        gc.enable()
        hook.remove()
    assert found[0] is False, "it must live when attention is probed"
    assert gone() is None
    mrrope.unpatch(llama)
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
