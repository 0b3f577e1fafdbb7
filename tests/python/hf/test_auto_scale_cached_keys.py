"""scale="auto": cached keys are rescaled at the positions that they were rotated at."""

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

import transformers
from auto_scaled_models import (
    GENERATE,
    assert_keys_match_their_positions,
    auto_scaled,
    caches,
    counted,
    keys_by_tables,
    logits,
    tables_of,
    text,
    tiny_llama,
    tiny_mistral,
)

PARTS = [20, 8, 1, 1, 12, 1, 1, 20]
"""Tokens of each call: a prompt, an answer, and a second prompt, past two steps of the ladder."""


def mask_with_inner_padding():
    """Return a mask with padding on the left and after a short answer, on the right of a prompt, and nowhere."""
    mask = torch.ones(3, sum(PARTS), dtype=torch.long)
    mask[0, :5] = mask[0, 25:30] = 0
    mask[1, 13:20] = 0
    return mask


PLACES = {
    "counted": counted,
    "by slots": lambda mask: torch.arange(mask.shape[1]).expand(mask.shape[0], -1),
    "with gaps": lambda mask: (
        torch.arange(mask.shape[1]) + torch.arange(mask.shape[1]) // 20 * 7 * torch.tensor([[1], [0], [2]])
    ),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded", "offloaded static"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral], ids=["whole", "window"])
def test_keys_are_rescaled_at_the_positions_they_were_rotated_at(device, make, kind, places):
    torch.set_default_device(device)
    try:
        model = auto_scaled(make())
        if kind not in caches(model):
            pytest.skip("offloaded caches need a GPU")
        if (make, kind) == (tiny_mistral, "offloaded static"):
            pytest.skip("transformers 5.17 raises where all layers of such a cache have a window")
        cache, mask = caches(model)[kind], mask_with_inner_padding()
        positions, ids = PLACES[places](mask), text(sum(PARTS), batch=3)
        seen, start = set(), 0
        for tokens in PARTS:
            end = start + tokens
            options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            if places == "by slots":  # the model's own
                del options["position_ids"]
            logits(model, ids[:, start:end], past_key_values=cache, **options)
            assert_keys_match_their_positions(model, cache, ids, positions, end)
            seen.add(tuple(tables_of(cache)))
            start = end
        assert len(seen) >= 3, "sequences cross one by one"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_two_rounds_of_which_one_ended_early(model, kind):
    """Each sequence gets the result of a batch of one without the padding between the rounds."""
    auto_scaled(model)
    first, second, early = text(12, batch=2), text(9, batch=2, seed=1), 6
    first_round = {"max_new_tokens": 10, "return_dict_in_generate": True, **GENERATE}
    second_turn = {"max_new_tokens": 10, "output_logits": True, "return_dict_in_generate": True, **GENERATE}

    def continued(ids, mask, cache):
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, **second_turn)
        assert max(tables_of(out.past_key_values)) == 1, "the second round must change the scale"
        return torch.stack(out.logits, dim=1)

    cache = caches(model)[kind]
    answers = model.generate(first, past_key_values=cache, **first_round).sequences
    assert tables_of(cache) == [0, 0]
    both = torch.cat([answers, second], dim=1)
    mask = torch.ones_like(both)
    mask[1, 12 + early : 22] = 0
    got = continued(both, mask, cache)
    for row, length in ((0, 22), (1, 12 + early)):
        cache = caches(model)[kind]
        read = answers[row : row + 1, : min(length, 21)]  # without the last token, which is not read yet
        logits(model, read, past_key_values=cache)
        alone = torch.cat([answers[row : row + 1, :length], second[row : row + 1]], dim=1)
        want = continued(alone, torch.ones_like(alone), cache)
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("places", ["counted", "by slots"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral], ids=["whole", "window"])
def test_padding_in_a_cache_of_the_unpatched_model(make, kind, places):
    model = make()
    cache, mask, ids, end = caches(model)[kind], mask_with_inner_padding(), text(sum(PARTS), batch=3), 28
    positions = PLACES[places](mask)
    logits(model, ids[:, :end], attention_mask=mask[:, :end], position_ids=positions[:, :end], past_key_values=cache)
    auto_scaled(model)
    options = {"attention_mask": mask, "position_ids": positions[:, end:]}
    logits(model, ids[:, end:], past_key_values=cache, **options)
    assert tables_of(cache) == [1, 1, 1]
    window = cache.layers[0].keys.shape[-2]
    own = mask[:, -window:].bool()
    got, want = cache.layers[0].keys, keys_by_tables(model, ids, positions, tables_of(cache))[:, :, -window:]
    got = got[:, :, : want.shape[-2]]
    for row in range(3):
        torch.testing.assert_close(got[row][:, own[row]], want[row][:, own[row]], rtol=0.0, atol=1e-6)


def test_positions_of_repeated_and_cropped_caches(model):
    auto_scaled(model)
    mask, ids = mask_with_inner_padding(), text(sum(PARTS), batch=3)
    positions = counted(mask)
    cache = transformers.DynamicCache(config=model.config)
    options = {"attention_mask": mask[:, :30], "position_ids": positions[:, :30]}
    logits(model, ids[:, :30], past_key_values=cache, **options)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    ids, mask, positions = (each.repeat_interleave(2, dim=0) for each in (ids, mask, positions))
    options = {"attention_mask": mask[:, :50], "position_ids": positions[:, 26:50]}
    logits(model, ids[:, 26:50], past_key_values=cache, **options)
    assert_keys_match_their_positions(model, cache, ids, positions, 50)


def test_keys_from_elsewhere_are_refused(model):
    auto_scaled(model)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, text(10), past_key_values=cache)
    for layer in cache.layers:
        layer.update(layer.keys[:, :, :3], layer.values[:, :, :3])
    with pytest.raises(ValueError, match=r"past_key_values must be filled by the model .* 13 tokens, 3 of them"):
        logits(model, text(1), past_key_values=cache)


@pytest.mark.parametrize("lengths", [-5, 0, [10, -1]])
def test_lengths_are_positive(model, lengths):
    with (
        pytest.raises(ValueError, match=r"lengths must be positive, got (-5|0|\[)"),
        mrrope.expecting(auto_scaled(model), lengths),
    ):
        pytest.fail("must not get here")


@pytest.mark.parametrize("lengths", [True, 10.5, [2.0], [], "10", None])
def test_lengths_are_integers(model, lengths):
    with (
        pytest.raises(TypeError, match=r"lengths must be integers, got (True|10\.5|\[|'10'|None)"),
        mrrope.expecting(auto_scaled(model), lengths),
    ):
        pytest.fail("must not get here")
