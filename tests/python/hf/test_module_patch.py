"""Module patches: a model is as before where one raises, and unpatch restores what other libraries set."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.auto_scale.follower import GenerateKnowingLengths, followers_in
from mrrope.hf.auto_scale.module_patch import AnnouncedLengths, AutoScale
from mrrope.hf.fusion.rms_norm import FusedNorms
from mrrope.hf.rotary_embedding import FusedRotary, TableRotaryEmbedding, installed_functions
from mrrope.hf.swapped_table import SwappedTable

pytest.importorskip("transformers")

from patched_models import UNFUSABLE, Snapshot, logits, model_named, rotary_embedding
from tiny_models import tiny_model, tokens
from transformers.models.llama import modeling_llama


class PatchError(Exception):
    """Raised by a patch under test."""


def raise_in_call(patch: type[Any], number: int, *, has_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one call of ``apply`` raise, before or after it changes its module."""
    own, calls = patch.apply, []

    def apply(self: Any, module: nn.Module, state: Any) -> None:
        calls.append(module)
        if len(calls) != number or has_run:
            own(self, module, state)
        if len(calls) == number:
            raise PatchError

    monkeypatch.setattr(patch, "apply", apply)


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    ("patch", "number"), [(FusedRotary, 1), (SwappedTable, 1), (AutoScale, 1), (AnnouncedLengths, 1), (FusedNorms, 3)]
)
@pytest.mark.filterwarnings("ignore:.*not the fused op")
def test_a_patch_that_raises(
    patch: type[Any], number: int, has_run: bool, is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_named(UNFUSABLE if patch is SwappedTable else "llama")
    before = Snapshot(model)
    scale: Any = 4.0 if patch is SwappedTable else "auto"
    if is_patched:
        mrrope.patch(model, "yarn", scale=scale, fuse_norms=True)
    want = logits(model)
    raise_in_call(patch, number, has_run=has_run, monkeypatch=monkeypatch)
    with pytest.raises(PatchError):
        mrrope.patch(model, "mrrope_pro", scale=scale, fuse_norms=True)
    assert mrrope.is_patched(model) == is_patched
    assert torch.equal(logits(model), want)
    if is_patched:
        mrrope.unpatch(model)
    assert_hooks(model, 0)
    before.assert_untouched()


def assert_hooks(model: nn.Module, count: int) -> None:
    assert sum(len(module._forward_hooks) for module in model.modules()) == count


def test_frequencies_that_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention factor is set last: the frequencies before it are restored."""
    model = model_named(UNFUSABLE)
    before, rotary = Snapshot(model), rotary_embedding(model)

    def refuse(self: nn.Module, name: str, value: Any) -> None:
        if name == "attention_scaling" and value != 1.0:
            raise PatchError
        nn.Module.__setattr__(self, name, value)

    monkeypatch.setattr(type(rotary), "__setattr__", refuse, raising=False)
    with pytest.raises(PatchError):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    before.assert_untouched()


@pytest.mark.parametrize("is_patched", [False, True])
def test_warnings_that_are_errors(is_patched: bool) -> None:
    model = model_named(UNFUSABLE)
    before = Snapshot(model)
    if is_patched:
        with pytest.warns(UserWarning, match="not the fused op"):
            mrrope.patch(model, "yarn", scale=2.0)
    want = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not the fused op"), mrrope.patched(model, "mrrope_pro", scale=4.0):
            pass
    assert torch.equal(logits(model), want)
    if is_patched:
        mrrope.unpatch(model)
    before.assert_untouched()


def test_a_function_that_cannot_be_installed_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two functions of an unpickled model, the second takes other arguments by now."""
    gc.collect()
    stock, model = modeling_llama.apply_rotary_pos_emb, tiny_model("llama")
    monkeypatch.setattr(modeling_llama, "apply_rotary_second", copy.copy(stock), raising=False)
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        assert len(rotary_embedding(model).functions) == 2
        saved = pickle.dumps(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_second", lambda q, k, cos, sin, offset=0: (q, k))
    with pytest.raises(ValueError, match=r"patched anew: .*apply_rotary_second takes other arguments"):
        pickle.loads(saved)
    assert modeling_llama.apply_rotary_pos_emb is stock


def test_a_finalizer_while_functions_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may collect another patched model at any allocation."""
    install = installed_functions._install

    def interrupted(*args: Any) -> Any:
        function = install(*args)
        installed_functions._restore_unused()
        return function

    monkeypatch.setattr(installed_functions, "_install", interrupted)
    model = tiny_model("llama")
    before = Snapshot(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    logits(model)
    mrrope.unpatch(model)
    before.assert_untouched()


def test_a_generate_of_the_instance_is_called_and_restored() -> None:
    model = tiny_model("llama")
    calls = []

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = generate
    before = Snapshot(model)
    with mrrope.patched(model, "mrrope_pro", scale="auto"):
        assert isinstance(model.generate, GenerateKnowingLengths)
        mrrope.patch(model, "mrrope_pro", scale="auto")
        model.generate(tokens(1, 8), max_new_tokens=2, pad_token_id=0)
    assert len(calls) == 1
    before.assert_untouched()


def test_a_rotary_embedding_that_another_module_holds_too() -> None:
    """Followers are attached to the module that takes a cache, also where a block restores them."""
    model = tiny_model("llama")
    model.model.layers[0].mlp.shared = model.model.rotary_emb
    before = Snapshot(model)
    mrrope.patch(model, "mrrope_pro", scale="auto")
    want = logits(model)
    for _ in range(2):
        with mrrope.patched(model, "pi", scale=2.0):
            assert_hooks(model, 1)  # of the guard of its cache
        assert_hooks(model, 2)
    assert torch.equal(logits(model), want)
    mrrope.unpatch(model)
    assert_hooks(model, 0)
    before.assert_untouched()


def test_blocks_keep_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mrrope.patch(tiny_model("llama"), "mrrope_pro", scale="auto")
    inner: list[weakref.ref[nn.Module]] = []
    for _ in range(3):
        with mrrope.patched(model, "pi", scale="auto"):
            modules = [rotary_embedding(model), *followers_in(model)]
            inner += map(weakref.ref, modules)
            del modules
    gc.collect()
    assert [ref() for ref in inner if ref() is not None] == []

    finalized = []
    own = installed_functions._restore_unused
    monkeypatch.setattr(installed_functions, "_restore_unused", lambda: (finalized.append(1), own()))
    user = mrrope.patch(tiny_model("llama"), "mrrope_pro", scale=2.0)
    for _ in range(3):
        with mrrope.patched(user, "pi", scale=2.0):
            pass
    assert isinstance(rotary_embedding(user), TableRotaryEmbedding)
    gc.collect()
    finalized.clear()
    del user
    gc.collect()
    assert len(finalized) == 1, "one finalizer per rotary embedding, however often it is installed"
