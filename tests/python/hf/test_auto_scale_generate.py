"""scale="auto" in generate: expected lengths, reserves and strategies."""

import copy
from functools import partial

import pytest
import torch

import mrrope
from mrrope.hf.auto_scale.follower import GenerateKnowingLengths

pytest.importorskip("transformers")

import transformers
from auto_scaled_models import GENERATE, MAX_SCALE, auto_scaled, logits, pickled, tables_of, text


def test_generate_expects_its_new_tokens(model):
    auto_scaled(model)
    ids = text(20)
    out = model.generate(ids, max_new_tokens=30, return_dict_in_generate=True, **GENERATE)
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        want = model.generate(ids, max_new_tokens=30, **GENERATE)
    assert torch.equal(out.sequences, want), "20 + 30 tokens fit scale 2, so that no step is crossed"
    assert tables_of(out.past_key_values) == [1]


@pytest.mark.parametrize("options", [{"max_length": 50}, {"generation_config": "max_new_tokens"}])
def test_other_settings_of_the_number_of_new_tokens(model, options):
    auto_scaled(model)
    if "generation_config" in options:
        options = {"generation_config": transformers.GenerationConfig(max_new_tokens=30, **GENERATE)}
    else:
        options |= GENERATE
    out = model.generate(text(20), return_dict_in_generate=True, **options)
    assert tables_of(out.past_key_values) == [1]


def test_generate_without_a_known_length_changes_scale_on_the_way(model):
    """The same tokens as reading them one by one."""
    auto_scaled(model)
    ids = text(20)
    out = type(model).generate(model, ids, max_new_tokens=60, return_dict_in_generate=True, **GENERATE)
    assert tables_of(out.past_key_values) == [2]
    cache, written, step = transformers.DynamicCache(config=model.config), ids, ids
    for _ in range(60):
        step = logits(model, step, past_key_values=cache)[:, -1:].argmax(-1)
        written = torch.cat([written, step], dim=1)
    assert torch.equal(out.sequences, written)


def test_lengths_expected_around_generate_still_apply(model):
    auto_scaled(model)
    with mrrope.expecting(model, 100):
        out = model.generate(text(20), max_new_tokens=2, return_dict_in_generate=True, **GENERATE)
    assert tables_of(out.past_key_values) == [2]


def test_a_reserve_replaces_the_number_of_new_tokens(model):
    """A large unused budget does not raise the scale; a text that does get long changes its scale on the way."""
    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE, reserve=8)
    ids = text(20)
    options = {**GENERATE, "return_dict_in_generate": True}

    def tables_after(**more):
        return tables_of(model.generate(ids, **options | more).past_key_values)

    assert tables_after(max_new_tokens=100, eos_token_id=list(range(90))) == [0], "ends after one token"
    assert tables_after(max_length=120, eos_token_id=list(range(90))) == [0]
    assert tables_after(max_new_tokens=30) == [1]
    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE, reserve=40)
    assert tables_after(max_new_tokens=100, eos_token_id=list(range(90))) == [1], "20 + 40 tokens"
    assert tables_after(max_new_tokens=2) == [0], "no more than may be written"


def test_a_reserve_survives_copies_and_patches(model):
    def room_of(model):
        prompts, new_tokens = model.generate._announced((text(20),), {"max_new_tokens": 100})
        assert prompts.tolist() == [20]
        return new_tokens

    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE, reserve=0)
    assert room_of(model) == 0
    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE, reserve=7)
    with mrrope.patched(model, "mrrope_pro", scale="auto", reserve=3):
        assert room_of(model) == 3
    with pytest.raises(ValueError, match="method must be one of"):
        mrrope.patch(model, "mrope", scale="auto", reserve=4)
    assert [room_of(each) for each in (model, copy.deepcopy(model), pickled(model))] == [7, 7, 7]
    assert room_of(auto_scaled(model)) == 100


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="aot_eager"), torch.nn.Sequential], ids=["compiled", "part"]
)
def test_generate_through_a_wrapper(model, wrap):
    wrapped = auto_scaled(wrap(model))
    options = {**GENERATE, "eos_token_id": list(range(90)), "return_dict_in_generate": True}
    out = model.generate(text(20), max_new_tokens=30, **options)
    assert tables_of(out.past_key_values) == [1], "it ends after one token, and might have written 30"
    mrrope.unpatch(wrapped)
    assert not isinstance(model.generate, GenerateKnowingLengths)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 8},
        {"cache_implementation": "static"},
    ],
)
def test_generation_strategies(model, options):
    """Left-padded texts of two lengths: each table fits the final length under every strategy."""
    auto_scaled(model)
    ids = text(30, batch=2)
    ids[1, :15] = 0
    mask = (ids != 0).long()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=10, return_dict_in_generate=True, **GENERATE, **options
    )
    each = options.get("num_beams", 1)
    assert tables_of(out.past_key_values) == [1] * each + [0] * each
    if "num_return_sequences" in options:
        return
    for row, skipped in ((0, 0), (1, 15)):
        alone = model.generate(ids[row : row + 1, skipped:], max_new_tokens=10, **GENERATE, **options)
        assert torch.equal(out.sequences[row, 30:], alone[0, -10:])
