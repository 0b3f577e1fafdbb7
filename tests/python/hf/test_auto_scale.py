"""scale="auto": each sequence gets the smallest scale that covers it; its cached keys are re-rotated as it grows."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from rotary_reference import rotated

import mrrope
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE, GenerateKnowingLengths
from mrrope.hf.auto_scale.ladder import scales_up_to
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import tiny_models
import transformers
from patched_models import turns_in_local_layers_alone

NATIVE, MAX_SCALE = 32, 4.0


def tiny_llama(**changes):
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": NATIVE, "num_hidden_layers": 3, **changes}
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return transformers.LlamaForCausalLM(config).eval()


def auto_scaled(model):
    return mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE)


def text(length, batch=1, seed=0):
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


def fixed(model, ids, scale):
    with mrrope.patched(model, "mrrope_pro", scale=scale):
        return logits(model, ids)


def tables_of(cache):
    (index,) = getattr(cache, TABLES_ATTRIBUTE).values()
    return index.tolist()


@pytest.fixture
def model(device):
    torch.set_default_device(device)
    yield tiny_llama()
    torch.set_default_device(None)


# --- one pass


def test_native_lengths_are_read_as_they_were(model):
    ids = text(NATIVE, batch=2)
    before = logits(model, ids)
    torch.testing.assert_close(logits(auto_scaled(model), ids), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "scale"), [(33, 2.0), (64, 2.0), (65, 4.0), (128, 4.0), (150, 4.0)])
def test_longer_ones_by_the_smallest_scale_that_covers_them(model, length, scale):
    ids = text(length)
    want = fixed(model, ids, scale)
    assert torch.equal(logits(auto_scaled(model), ids), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_mixed_lengths_gives_each_what_it_gets_alone(model, side):
    auto_scaled(model)
    lengths = [20, 40, 100]
    rows = [text(length, seed=length)[0] for length in lengths]
    pad = [torch.zeros(100 - length, dtype=torch.long) for length in lengths]
    whole = [torch.cat([p, row] if side == "left" else [row, p]) for p, row in zip(pad, rows, strict=True)]
    mask = [
        torch.cat([p, row * 0 + 1] if side == "left" else [row * 0 + 1, p]) for p, row in zip(pad, rows, strict=True)
    ]
    mask = torch.stack(mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits(model, torch.stack(whole), attention_mask=mask, position_ids=positions)
    for i, row in enumerate(rows):
        torch.testing.assert_close(got[i][mask[i].bool()], logits(model, row[None])[0], rtol=1e-4, atol=1e-5)


def test_padding_does_not_count_without_positions(model):
    """A left-padded batch in a forward call whose positions start in the padding."""
    ids, padding = text(30), 20
    alone = logits(model, ids)
    mask = torch.cat([torch.zeros(1, padding), torch.ones(1, 30)], dim=1).long()
    got = logits(auto_scaled(model), torch.cat([torch.zeros(1, padding).long(), ids], dim=1), attention_mask=mask)
    torch.testing.assert_close(got[:, padding:], alone, rtol=1e-4, atol=1e-5)


def test_positions_are_whole_numbers(model):
    ids, positions = text(40), torch.arange(40)[None]
    want = logits(auto_scaled(model), ids, position_ids=positions)
    assert torch.equal(logits(model, ids, position_ids=positions.float()), want)
    with pytest.raises(ValueError, match=r"position_ids must be whole numbers where the scale follows .*, got 0\.5"):
        logits(model, ids, position_ids=positions + 0.5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids, position_ids=positions.float()), want)
    if ids.device.type == "cpu":  # a failed assertion leaves a GPU unusable
        with pytest.raises(RuntimeError, match="position_ids must be whole numbers"):
            logits(compiled, ids, position_ids=positions + 0.5)


def test_gradients_are_those_of_the_fixed_scale(model):
    ids = text(50)
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        model(ids, labels=ids).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    auto_scaled(model)(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters())


# --- with a cache


def synchronized(cache):
    """Synchronize the device around the copies of an offloaded cache.

    The cache prefetches a layer on its own stream without waiting for the offload of that layer, nor for the reads of
    earlier layers whose memory it reuses. This race shows with three layers, or on a shared GPU.
    """

    def with_barriers(call):
        def synchronizing(*args, **kwargs):
            torch.cuda.synchronize()
            call(*args, **kwargs)
            torch.cuda.synchronize()

        return synchronizing

    cache.offload, cache.prefetch = with_barriers(cache.offload), with_barriers(cache.prefetch)
    return cache


def caches(model):
    """Return a cache of every kind. Offloaded ones keep their layers in host memory and need a GPU."""
    config = model.config
    found = {
        "dynamic": transformers.DynamicCache(config=config),
        "static": transformers.StaticCache(config=config, max_cache_len=160),
    }
    if model.device.type == "cuda":
        found["offloaded"] = synchronized(transformers.DynamicCache(config=config, offloading=True))
        found["offloaded static"] = synchronized(
            transformers.StaticCache(config=config, max_cache_len=160, offloading=True)
        )
    return found


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded", "offloaded static"])
def test_keys_of_a_growing_text_are_rescaled(model, kind):
    """The first layer's keys depend on tokens and positions only, so that after every step they must equal keys
    rotated by that step's table."""
    ids = text(100, batch=2)
    auto_scaled(model)
    if kind not in caches(model):
        pytest.skip("offloaded caches need a GPU")
    cache = caches(model)[kind]
    for start, end in [(0, 20), (20, 21), (21, 40), (40, 41), (41, 70), (70, 100)]:
        with torch.no_grad():
            model(ids[:, start:end], past_key_values=cache)
        step = (end > NATIVE) + (end > 2 * NATIVE)
        assert tables_of(cache) == [step, step]
        fresh = transformers.DynamicCache(config=model.config)
        with mrrope.patched(model, "mrrope_pro", scale=2.0**step), torch.no_grad():
            model(ids[:, :end], past_key_values=fresh)
        got, want = (some.layers[0].keys[:, :, :end].cpu() for some in (cache, fresh))
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6)


def test_every_layer_is_rescaled_by_the_difference_of_the_tables(model):
    ids = text(NATIVE + 1)
    auto_scaled(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :NATIVE], past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        model(ids[:, NATIVE:], past_key_values=cache)
    tables = next(m for m in model.modules() if isinstance(m, TableRotaryEmbedding)).tables[None]
    difference = tables[1].relative_to(tables[0])
    for layer, old in zip(cache.layers, before, strict=True):
        want = rotated(old, torch.arange(NATIVE), difference)
        torch.testing.assert_close(layer.keys[:, :, :NATIVE].double().cpu(), want, rtol=0.0, atol=1e-6)


def test_all_caches_read_alike(model):
    ids = text(100, batch=2)
    auto_scaled(model)
    read = {}
    for kind, cache in caches(model).items():
        parts = [logits(model, part, past_key_values=cache) for part in ids.split(9, dim=1)]
        read[kind] = torch.cat(parts, dim=1)
    for got in read.values():
        torch.testing.assert_close(got, read["dynamic"], rtol=1e-4, atol=1e-6)


def test_sequences_of_a_batch_change_scale_independently(model):
    """Left-padded: the second is 25 tokens shorter, and changes its scale 25 tokens later."""
    auto_scaled(model)
    ids, padding = text(70, batch=2), 25
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=model.config)
    steps, last = [], []
    for start in range(30, 70):
        begin = 0 if start == 30 else start
        options = {"attention_mask": mask[:, : start + 1], "position_ids": positions[:, begin : start + 1]}
        last.append(logits(model, ids[:, begin : start + 1], past_key_values=cache, **options)[:, -1])
        steps.append(tables_of(cache))
    assert steps[0] == [0, 0]
    assert steps[2] == [1, 0]
    assert steps[-1] == [2, 1]
    for row, skipped in ((0, 0), (1, padding)):
        alone = transformers.DynamicCache(config=model.config)
        for at, start in enumerate(range(30, 70)):
            begin = skipped if start == 30 else start
            want = logits(model, ids[row : row + 1, begin : start + 1], past_key_values=alone)[:, -1]
            torch.testing.assert_close(last[at][row : row + 1], want, rtol=1e-4, atol=1e-5)


def test_windowed_layers_are_rescaled_in_place():
    model = tiny_mistral()
    ids = text(80)
    auto_scaled(model)
    for cache in caches(model).values():
        for start, end in [(0, 20), (20, 40), (40, 41), (41, 66), (66, 80)]:
            with torch.no_grad():
                model(ids[:, start:end], past_key_values=cache)
            step = (end > NATIVE) + (end > 2 * NATIVE)
            fresh = transformers.DynamicCache(config=model.config)
            with mrrope.patched(model, "mrrope_pro", scale=2.0**step), torch.no_grad():
                model(ids[:, :end], past_key_values=fresh)
            got, want = cache.layers[0].keys, fresh.layers[0].keys
            got = got[:, :, : min(end, got.shape[-2])][:, :, -want.shape[-2] :]
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6)


def test_a_cache_filled_by_the_unpatched_model_is_continued(model):
    ids = text(60)
    with torch.no_grad():
        cache = model(ids[:, :30]).past_key_values
    want_cache = transformers.DynamicCache(config=model.config)
    auto_scaled(model)
    logits(model, ids[:, :30], past_key_values=want_cache)
    want = logits(model, ids[:, 30:], past_key_values=want_cache)
    torch.testing.assert_close(logits(model, ids[:, 30:], past_key_values=cache), want, rtol=1e-4, atol=1e-6)


def test_a_copied_cache_carries_its_tables(model):
    auto_scaled(model)
    ids = text(60)
    with torch.no_grad():
        cache = model(ids[:, :40]).past_key_values
    copied = copy.deepcopy(cache)
    want = logits(model, ids[:, 40:], past_key_values=cache)
    assert torch.equal(logits(model, ids[:, 40:], past_key_values=copied), want)
    assert tables_of(copied) == [1]


def test_a_static_cache_reset_for_another_text_starts_over(model):
    auto_scaled(model)
    cache = caches(model)["static"]
    logits(model, text(100), past_key_values=cache)
    assert tables_of(cache) == [2]
    cache.reset()
    short = text(20, seed=1)
    want = logits(model, short)
    torch.testing.assert_close(logits(model, short, past_key_values=cache), want, rtol=1e-4, atol=1e-6)
    assert tables_of(cache) == [0]


def test_a_scale_is_kept_when_the_cache_is_cropped(model):
    auto_scaled(model)
    cache = transformers.DynamicCache(config=model.config)
    ids = text(50)
    logits(model, ids[:, :40], past_key_values=cache)
    cache.crop(-20)
    logits(model, ids[:, 20:25], past_key_values=cache)
    assert tables_of(cache) == [1]


def test_inference_mode_then_grad_mode(model):
    auto_scaled(model)
    ids = text(60)
    with torch.inference_mode():
        cache = model(ids[:, :30]).past_key_values
    want_cache = transformers.DynamicCache(config=model.config)
    logits(model, ids[:, :30], past_key_values=want_cache)
    want = logits(model, ids[:, 30:], past_key_values=want_cache)
    torch.testing.assert_close(logits(model, ids[:, 30:], past_key_values=cache), want, rtol=1e-4, atol=1e-6)


def test_patched_in_inference_mode(model):
    ids = text(50)
    with torch.inference_mode():
        auto_scaled(model)
    assert [name for name, buffer in model.named_buffers() if buffer.is_inference()] == []
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_cache_is_released_after_an_error(model):
    auto_scaled(model)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, text(10), past_key_values=cache)
    fails = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, text(1), past_key_values=cache)
    fails.remove()
    held = weakref.ref(cache)
    del cache
    gc.collect()
    assert held() is None


def test_a_cache_of_other_sequences_is_refused(model):
    auto_scaled(model)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, text(10, batch=2), past_key_values=cache)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"past_key_values must be of the sequences .* of 2, and the call of 3"):
        logits(model, text(1, batch=3), past_key_values=cache)


def test_a_quantized_cache_is_refused(model):
    pytest.importorskip("optimum.quanto", reason="the package optimum-quanto is not installed")
    auto_scaled(model)
    cache = transformers.QuantizedCache("quanto", model.config, nbits=4, residual_length=4, q_group_size=16)
    logits(model, text(10), past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must hold its keys as they are"):
        logits(model, text(1), past_key_values=cache)


# --- positions of cached keys


def tiny_mistral():
    """Return a Mistral whose layers all have a sliding window."""
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": NATIVE, "sliding_window": 16}
    parameters = {"rope_type": "default", "rope_theta": 1e4}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, rope_parameters=parameters)).eval()


def keys_by_tables(model, ids, positions, steps):
    """Return the first layer's keys of these tokens, rotated by each sequence's table."""
    model = copy.deepcopy(model)
    rows = []
    for row, step in enumerate(steps):
        mrrope.patch(model, "mrrope_pro", scale=2.0**step)
        cache = transformers.DynamicCache()
        logits(model, ids[row : row + 1], position_ids=positions[row : row + 1], past_key_values=cache)
        rows.append(cache.layers[0].keys)
    return torch.cat(rows)


def counted(mask):
    """Return positions as generate counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


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


def assert_keys_match_their_positions(model, cache, ids, positions, end):
    want = keys_by_tables(model, ids[:, :end], positions[:, :end], tables_of(cache))
    got = cache.layers[0].keys
    got = got[:, :, : min(end, got.shape[-2])]
    torch.testing.assert_close(got.cpu(), want[:, :, -got.shape[-2] :].cpu(), rtol=0.0, atol=1e-6)


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


# --- generate


GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


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


# --- compiling, copying, offloading and casting


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {"mode": "reduce-overhead"}], ids=["traced", "cuda graphs"])
def test_compiled_decoding_is_one_graph_across_steps(model, how):
    """With a right-padded prompt, and positions that count its real tokens only."""
    if "mode" in how and model.device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    auto_scaled(model)
    ids, mask = text(80, batch=2), torch.ones(2, 80, dtype=torch.long)
    mask[1, 15:20] = 0
    positions = counted(mask)
    step = torch.compile(model, fullgraph=True, **how)
    read = {}
    for name, forward in (("eager", model), ("compiled", step)):
        cache = caches(model)["static"]
        options = {"past_key_values": cache, "attention_mask": mask[:, :20], "position_ids": positions[:, :20]}
        parts = [logits(model, ids[:, :20], **options)]
        torch._dynamo.reset()
        with torch._dynamo.config.patch(error_on_recompile=name == "compiled"):
            for at in range(20, 80):
                # One shape in every step, as in generate.
                sees = torch.nn.functional.pad(mask[:, : at + 1], (0, 160 - at - 1)).bool()[:, None, None]
                options = {"attention_mask": sees, "position_ids": positions[:, at : at + 1].clone()}
                part = logits(forward, ids[:, at : at + 1], past_key_values=cache, **options)
                parts.append(part.clone())
        assert tables_of(cache) == [2, 2]
        assert_keys_match_their_positions(model, cache, ids, positions, 80)
        read[name] = torch.cat(parts, dim=1)
    torch.testing.assert_close(read["compiled"], read["eager"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_decoding_with_a_cache_that_grows(model):
    """One graph for the first step and one for all others, as in the unpatched model."""
    auto_scaled(model)
    ids, positions = text(70, batch=2), torch.arange(70).expand(2, -1)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, ids[:, :25], past_key_values=cache)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    for at in range(25, 70):
        logits(step, ids[:, at : at + 1], past_key_values=cache, position_ids=positions[:, at : at + 1].clone())
    assert tables_of(cache) == [2, 2]
    assert graphs.frame_count == 2
    assert_keys_match_their_positions(model, cache, ids, positions, 70)


@pytest.mark.slow
def test_compiled_decoding_past_a_static_window():
    model = auto_scaled(tiny_mistral())
    ids = text(70, batch=2)
    positions = torch.arange(70).expand(2, -1)
    cache = caches(model)["static"]
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits(model, ids[:, :10], past_key_values=cache)
    for at in range(10, 70):
        logits(step, ids[:, at : at + 1], past_key_values=cache, position_ids=positions[:, at : at + 1].clone())
        assert_keys_match_their_positions(model, cache, ids, positions, at + 1)
    assert tables_of(cache) == [2, 2]


def test_unpatched_it_is_as_before(model):
    ids = text(60)
    before, keys = logits(model, ids), set(vars(model))
    auto_scaled(model)
    assert isinstance(model.generate, GenerateKnowingLengths)
    mrrope.unpatch(model)
    assert torch.equal(logits(model, ids), before)
    assert set(vars(model)) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nested_patches(model):
    auto_scaled(model)
    ids = text(60)
    before = logits(model, ids)
    with mrrope.patched(model, "rope"):
        assert not torch.equal(logits(model, ids), before)
    assert torch.equal(logits(model, ids), before)
    assert isinstance(model.generate, GenerateKnowingLengths)
    cache = transformers.DynamicCache(config=model.config)
    for part in ids.split(20, dim=1):
        logits(model, part, past_key_values=cache)
    assert tables_of(cache) == [1]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model, *, zipped):
    file = io.BytesIO()
    torch.save(model, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied_by",
    [copy.deepcopy, pickled, partial(saved, zipped=True), partial(saved, zipped=False)],
    ids=["deepcopy", "pickle", "torch.save", "torch.save of old"],
)
def test_copies_follow_independently(model, copied_by):
    auto_scaled(model)
    ids = text(60)
    want = torch.cat(
        [
            logits(model, part, past_key_values=cache)
            for cache in [caches(model)["dynamic"]]
            for part in ids.split(20, dim=1)
        ],
        dim=1,
    )
    copied = copied_by(model)
    mrrope.unpatch(model)
    cache = caches(copied)["dynamic"]
    got = torch.cat([logits(copied, part, past_key_values=cache) for part in ids.split(20, dim=1)], dim=1)
    assert torch.equal(got, want)
    assert copied.generate.model is copied
    mrrope.unpatch(copied)


READS_CHUNKS = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, parts = pickle.load(file)
model.model.register_forward_pre_hook(lambda *_: None)  # must not replace the model's own hook
cache = None
with torch.no_grad():
    for part in parts:
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values
print([index.tolist() for index in cache.mrrope_tables.values()])
"""


@pytest.mark.slow
def test_a_pickled_model_follows_in_another_process(tmp_path):
    model = auto_scaled(tiny_llama())
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, text(60, batch=2).split(20, dim=1))))
    run = subprocess.run(
        [sys.executable, "-c", READS_CHUNKS, "model.pickle"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )  # not in the checkout, whose package may lack the built library
    assert run.stdout.strip() == "[[1, 1]]"


def all_offloaded(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def embeddings_offloaded(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    parts = ["model.layers", "model.norm", "model.rotary_emb", "lm_head"]
    devices = {"model.embed_tokens": "disk", **dict.fromkeys(parts, "cpu")}
    return accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [all_offloaded, embeddings_offloaded])
def test_offloaded_weights(offload, tmp_path):
    """Parameters that are loaded when their module is called."""
    model = tiny_llama()
    ids = text(60)
    parts = ids.split(20, dim=1)

    def read(model):
        cache = transformers.DynamicCache(config=model.config)
        read = torch.cat([logits(model, part, past_key_values=cache) for part in parts], dim=1)
        assert tables_of(cache) == [1]
        return read

    want = read(auto_scaled(copy.deepcopy(model)))
    model = offload(model, tmp_path)
    assert next(model.parameters()).is_meta
    torch.testing.assert_close(read(auto_scaled(model)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_layer_is_found_in_any_dtype(model, dtype):
    """With keys that are large in a few slow components, as in real models."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data[14:16] *= 100.0
    auto_scaled(model.to(dtype))
    rotary = next(m for m in model.modules() if isinstance(m, TableRotaryEmbedding))
    assert [part.layer for part in rotary.follower.keys[None].parts] == [0, 1, 2]
    assert all(part.has_attention_factor for part in rotary.follower.keys[None].parts)


def test_other_dtypes(model):
    auto_scaled(model)
    model.to(torch.bfloat16)
    ids = text(60)
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        want = logits(model, ids)
    assert torch.equal(logits(model, ids), want)


def test_unpatching_through_another_module_leaves_generate_as_it_was(model):
    ids = text(20)
    want = model.generate(ids, max_new_tokens=5, **GENERATE)
    auto_scaled(model)
    mrrope.unpatch(model.model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **GENERATE), want)


def test_an_interrupted_patch_leaves_the_model_as_it_was(model, monkeypatch):
    mrrope.patch(model, "mrrope_pro", scale=2.0)
    ids = text(40)
    before = logits(model, ids)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mrrope.hf.auto_scale.module_patch.find_cached_keys", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto_scaled(model)
    assert torch.equal(logits(model, ids), before)


def test_a_cache_of_another_ladder_is_refused(model):
    auto_scaled(model)
    with torch.no_grad():
        cache = model(text(40)).past_key_values
    mrrope.patch(model, "mrrope_uni", scale="auto", max_scale=2.0)
    with pytest.raises(
        ValueError, match="past_key_values must be empty or filled by the tables that the model has now"
    ):
        logits(model, text(1), past_key_values=cache)


def test_a_cache_with_gradients_is_refused(model):
    auto_scaled(model)
    cache = model(text(10)).past_key_values
    with pytest.raises(ValueError, match="past_key_values must not carry gradients"):
        model(text(1), past_key_values=cache)


def test_a_layer_added_later_is_refused(model):
    auto_scaled(model)
    ids = text(40)
    added = copy.deepcopy(model.model.layers[-1])
    added.self_attn.layer_idx = 3
    model.model.layers.append(added)
    model.config.num_hidden_layers = 4
    cache = transformers.DynamicCache()
    logits(model, ids[:, :20], past_key_values=cache)
    message = "model must be patched anew: it had 3 layers that cache when it was patched, .* keys of layer 3"
    with pytest.raises(ValueError, match=message):
        logits(model, ids[:, 20:], past_key_values=cache)
    auto_scaled(model)
    logits(model, ids[:, 20:], past_key_values=cache)
    assert tables_of(cache) == [1]


def test_a_layer_whose_keys_are_zero_is_refused(model):
    ids = text(20)
    model.model.layers[1].self_attn.k_proj.weight.data.zero_()
    before = logits(model, ids)
    message = "scale must be a number .* the keys of layer 1 are all zero, so that no rotation shows in them"
    with pytest.raises(ValueError, match=message):
        auto_scaled(model)
    assert torch.equal(logits(model, ids), before)


def in_another_thread(call):
    """Return the result of a call in another thread, or raise its error."""
    results = []

    def run():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_two_threads_are_refused_and_one_after_the_other_is_not(model):
    """The second call starts while the first is between its embeddings and its rotary embedding."""
    auto_scaled(model)
    ids = text(60)
    want = logits(model, ids[:, :40]), logits(model, ids)
    refused = []

    def other(*_):
        hook.remove()
        refused.append(in_another_thread(lambda: logits(model, ids)))

    hook = model.model.embed_tokens.register_forward_hook(other)
    cache = transformers.DynamicCache(config=model.config)
    assert torch.equal(logits(model, ids[:, :40], past_key_values=cache), want[0])
    assert tables_of(cache) == [1]
    assert isinstance(refused[0], RuntimeError)
    assert str(refused[0]).startswith("model must be called by one thread at a time")
    assert torch.equal(in_another_thread(lambda: logits(model, ids)), want[1])


def test_threads_between_the_steps_of_generate_are_refused(model):
    auto_scaled(model)
    ids, refused = text(20), []

    def other(step, scores):
        refused.append(in_another_thread(lambda: model.generate(ids, max_new_tokens=100, **GENERATE)))
        refused.append(in_another_thread(lambda: logits(model, ids)))
        return scores

    out = model.generate(ids, max_new_tokens=3, logits_processor=[other], return_dict_in_generate=True, **GENERATE)
    assert len(refused) == 6
    assert all(isinstance(error, RuntimeError) for error in refused)
    assert tables_of(out.past_key_values) == [0]
    done = in_another_thread(lambda: model.generate(ids, max_new_tokens=3, **GENERATE))
    assert torch.equal(done, out.sequences)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_releases_the_model_to_other_threads(model, error):
    auto_scaled(model)

    def fails(*_):
        raise error

    hook, ids = model.model.norm.register_forward_pre_hook(fails), text(20)
    with pytest.raises(error):
        model.generate(ids, max_new_tokens=3, **GENERATE)
    hook.remove()
    assert in_another_thread(lambda: logits(model, ids)).shape == (1, 20, model.config.vocab_size)


# --- ladders


def test_a_ladder_of_ready_tables(model, tmp_path):
    tables = [
        mrrope.frequency_table(
            "mrrope_pow", rotary_dim=32, base=1e4, original_max_position=NATIVE, scale=scale, power=0.5
        )
        for scale in (3.0, 8.0)
    ]
    tables[1].save(tmp_path / "eight.json")
    ids = text(150)
    want = {}
    for length, table in ((90, tables[0]), (150, tables[1])):
        with mrrope.patched(model, table):
            want[length] = logits(model, ids[:, :length])
    plain = logits(model, ids[:, :NATIVE])
    mrrope.patch(model, [tmp_path / "eight.json", tables[0]], scale="auto")
    assert all(torch.equal(logits(model, ids[:, :length]), value) for length, value in want.items())
    torch.testing.assert_close(logits(model, ids[:, :NATIVE]), plain, rtol=1e-5, atol=1e-6)


def test_a_model_extended_already_keeps_its_own_table_as_far_as_it_reaches():
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": 128}
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": NATIVE,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=parameters)).eval()
    ids = text(200)
    before = logits(model, ids[:, :128])
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        want = logits(model, ids)
    for max_scale in (4.0, None):
        mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=max_scale)
        torch.testing.assert_close(logits(model, ids[:, :128]), before, rtol=1e-4, atol=1e-6)
        assert torch.equal(logits(model, ids), want)


def test_a_model_whose_own_table_changes_with_the_length_is_refused():
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": 2 * NATIVE}
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=parameters)).eval()
    before = logits(model, text(20))
    with pytest.raises(ValueError, match=r"scale must be a number .* changes with the length of a text already"):
        mrrope.patch(model, "mrrope_pro", scale="auto")
    assert torch.equal(logits(model, text(20)), before)


@pytest.mark.parametrize(("max_scale", "scales"), [(None, [2, 4, 8, 16]), (4.0, [2, 4]), (5, [2, 4]), (2, [2])])
def test_a_shipped_ladder_up_to_a_scale(max_scale, scales):
    config = transformers.LlamaConfig(
        **tiny_models.TINY_SIZES | {"hidden_size": 128},
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    model = transformers.LlamaForCausalLM(config)
    mrrope.patch(model, "smollm2-135m", scale="auto", max_scale=max_scale)
    (rotary,) = (module for module in model.modules() if isinstance(module, TableRotaryEmbedding))
    (tables,) = rotary.tables.values()
    assert [table.scale for table in tables[1:]] == scales
    with pytest.raises(ValueError, match=r"max_scale must reach past the 8192 tokens .*, got 1\.5"):
        mrrope.patch(model, "smollm2-135m", scale="auto", max_scale=1.5)


@pytest.mark.parametrize(
    ("max_scale", "scales"), [(2.0, [2]), (4.0, [2, 4]), (16, [2, 4, 8, 16]), (6.0, [2, 4, 6]), (1.5, [1.5])]
)
def test_the_steps_of_a_ladder(max_scale, scales):
    assert scales_up_to(max_scale) == scales


# --- every family


def families_that_follow():
    unsupported = {"codegen", "gptj", "roformer"}
    return [family for family in tiny_models.causal_lm_families() if family not in unsupported]


# Families whose scale cannot follow the text, by the reason in the error.
UNFOLLOWABLE = {
    # Keys are normalized after the rotation, or every layer has its own rotary embedding.
    "in a way that is not understood": {"granite_swa", "granitemoe_swa", "hunyuan_v1_dense", "hunyuan_v1_moe"},
    "it does not read one token by itself": {
        "blt",
        "deepseek_v4",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "moshi",
    },
    "its configuration does not say how far it reads": {"recurrent_gemma"},
}


def layer_sees_scale(old, new):
    """Whether both keys and values of a layer changed with the table, although at most one of them is rotated."""
    pairs = [(getattr(old, name, None), getattr(new, name, None)) for name in ("keys", "values")]
    return all(isinstance(a, torch.Tensor) and a.numel() and not torch.allclose(a, b, rtol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("family", families_that_follow())
def test_family(family):
    """One token has the same hidden states by every table, so that its re-rotated keys equal those of the new table."""
    model = tiny_models.tiny_model(family)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(**tiny_models.inputs(model, ids)).logits
    reason = next((reason for reason, families in UNFOLLOWABLE.items() if family in families), None)
    options = {"scale": "auto", "max_scale": 256.0, "local_layers": turns_in_local_layers_alone(model)}
    if reason is not None:
        with pytest.raises(ValueError, match=f"scale must be a number for .*{reason}"):
            mrrope.patch(model, "mrrope_pro", **options)
        with torch.no_grad():
            assert torch.equal(model(**tiny_models.inputs(model, ids)).logits, before)
        return
    mrrope.patch(model, "mrrope_pro", **options)
    with torch.no_grad():
        after = model(**tiny_models.inputs(model, ids)).logits
        assert ((after - before).norm() / before.norm()).item() < 1e-4
        rotaries = [m for m in model.modules() if isinstance(m, TableRotaryEmbedding)]
        before = model(input_ids=ids[:, :1], position_ids=torch.full((2, 1), 3), use_cache=True).past_key_values
        cache = copy.deepcopy(before)
        for rotary in rotaries:
            rotary.follower.expected_lengths = torch.tensor([10**9, 10**9])
        model(input_ids=ids[:, 1:2], position_ids=torch.full((2, 1), 4), past_key_values=cache)
        fresh = model(input_ids=ids[:, :1], position_ids=torch.full((2, 1), 3), use_cache=True).past_key_values
    rescaled = 0
    for old, got, want in zip(before.layers, cache.layers, fresh.layers, strict=True):
        if layer_sees_scale(old, want):
            break  # with attention sinks and the like, later hidden states depend on the attention factor
        for name in ("keys", "values", "indexer_keys"):
            parts = [getattr(layer, name, None) for layer in (got, want, old)]
            if all(isinstance(part, torch.Tensor) and part.numel() for part in parts):
                new, right, earlier = (part.narrow(-2, 0, 1) for part in parts)
                torch.testing.assert_close(new, right, rtol=1e-4, atol=1e-5)
                rescaled += not torch.allclose(right, earlier, rtol=1e-3)
    assert rescaled > 0


# --- errors


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mrrope_pro", {"scale": "auto", "max_scale": 1.0}, "max_scale must be a number above 1, got 1.0"),
        ("mrrope_pro", {"scale": "auto", "max_scale": True}, "max_scale must be a number above 1, got True"),
        ("mrrope_pro", {"scale": "auto", "max_scale": "big"}, "max_scale must be a number above 1, got 'big'"),
        ("mrrope_pro", {"scale": 4.0, "max_scale": 8.0}, "max_scale must come with scale='auto', got 8.0"),
        ("mrrope_pro", {"scale": 4.0, "reserve": 8}, "reserve must come with scale='auto', got 8 with scale 4.0"),
        ("mrrope_pro", {"scale": "auto", "reserve": -1}, "reserve must be a non-negative integer, got -1"),
        ("mrrope_pro", {"scale": "auto", "reserve": 0.5}, "reserve must be a non-negative integer, got 0.5"),
        ("mrrope_pro", {"scale": "auto", "reserve": True}, "reserve must be a non-negative integer, got True"),
        ("mrrope_pro", {"scale": "automatic"}, "scale must be"),
        ("mrope", {"scale": "auto"}, "method must be one of"),
        ([], {"scale": "auto"}, r"method must hold a table that reaches past the 32 tokens .*, got \[\]"),
        (["mrrope_pro"], {"scale": 2.0}, "scale must be 'auto' with a list of tables, got 2.0"),
    ],
)
def test_errors_name_the_argument_and_leave_the_model(model, method, options, message):
    ids = text(20)
    before = logits(model, ids)
    with pytest.raises((ValueError, TypeError), match=message):
        mrrope.patch(model, method, **options)
    assert torch.equal(logits(model, ids), before)
    assert not any(isinstance(m, TableRotaryEmbedding) for m in model.modules())


def test_one_table_is_no_ladder(model):
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=32, base=1e4, original_max_position=NATIVE, scale=2.0)
    with pytest.raises(ValueError, match="method must be a method's name or a list of tables with scale='auto'"):
        mrrope.patch(model, table, scale="auto")
    with pytest.raises(ValueError, match=r"leaves no room for .'max_scale'"):
        mrrope.patch(model, [table], scale="auto", max_scale=4.0)
    with pytest.raises(ValueError, match="two that reach as far"):
        mrrope.patch(
            model,
            [table, mrrope.frequency_table("yarn", rotary_dim=32, base=1e4, original_max_position=NATIVE, scale=2.0)],
            scale="auto",
        )
