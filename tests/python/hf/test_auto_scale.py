"""scale="auto": each sequence gets the smallest scale that covers it; its cached keys are re-rotated as it grows."""

import copy
import gc
import weakref

import pytest
import torch
from rotary_reference import rotated

import mrrope
from mrrope.hf.auto_scale.ladder import scales_up_to
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import tiny_models
import transformers
from auto_scaled_models import (
    NATIVE,
    auto_scaled,
    caches,
    fixed,
    logits,
    tables_of,
    text,
    tiny_mistral,
)

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
    got = logits(compiled, ids, position_ids=positions.float())
    is_cpu = ids.device.type == "cpu"
    # Equal to the bit on a CPU; on an H200 up to rounding only.
    torch.testing.assert_close(got, want, rtol=0.0 if is_cpu else 1e-4, atol=0.0 if is_cpu else 1e-5)
    if is_cpu:  # a failed assertion leaves a GPU unusable
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
    with pytest.raises(ValueError, match=r"max_scale must reach past the 8192 native tokens, got 1\.5"):
        mrrope.patch(model, "smollm2-135m", scale="auto", max_scale=1.5)


@pytest.mark.parametrize(
    ("max_scale", "scales"), [(2.0, [2]), (4.0, [2, 4]), (16, [2, 4, 8, 16]), (6.0, [2, 4, 6]), (1.5, [1.5])]
)
def test_the_steps_of_a_ladder(max_scale, scales):
    assert scales_up_to(max_scale) == scales


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
        ([], {"scale": "auto"}, r"method must hold a table that reaches past the 32 native tokens, got \[\]"),
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
