"""scale="auto" for tokens with several positions (M-RoPE): the largest position is the length of a sequence."""

import threading

import pytest
import torch

import mrrope
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE, followers_in

pytest.importorskip("transformers")

import transformers
from model_tolerance import relative
from mrope_models import FAMILIES, mrope_model, positions_of
from tiny_models import LENGTH, tokens

MAX_SCALE = 4.0
ROUNDING = 2e-5  # relative, of float32 keys and logits computed in another order; rows mixed up change them by 7e-4
SLOTS = 6 * LENGTH
GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}

# Positions that end at a scale's reach. The image has more tokens than positions.
IMAGE = (9, 12)
WITH_IMAGE = {scale: positions_of([20, IMAGE, int(LENGTH * scale) - 32]) for scale in (1.0, 2.0, 4.0)}
TEXT_ALONE = {scale: positions_of([int(LENGTH * scale)]) for scale in (1.0, 2.0, 4.0)}
KINDS = {"text": TEXT_ALONE, "image": WITH_IMAGE}


@pytest.fixture(params=FAMILIES)
def model(request):
    return mrope_model(request.param)


@pytest.fixture
def qwen():
    return mrope_model("qwen2_vl")


def auto_scaled(model, **options):
    return mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE, **options)


@torch.no_grad()
def logits(model, ids, positions=None, **options):
    return model(input_ids=ids, position_ids=positions, **options).logits


def tables_of(cache):
    (index,) = getattr(cache, TABLES_ATTRIBUTE).values()
    return index.tolist()


def first_keys(cache):
    """The first layer with keys. No rotation precedes it, so that its keys depend on its own table alone."""
    return next(layer.keys for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor))


def caches(model):
    config = model.config.get_text_config(decoder=True)
    return {
        "dynamic": transformers.DynamicCache(config=config),
        "static": transformers.StaticCache(config=config, max_cache_len=SLOTS),
    }


# --- one pass


@pytest.mark.parametrize("kind", KINDS)
def test_native_lengths_are_read_as_they_were(model, kind):
    positions = KINDS[kind][1.0]
    ids = tokens(1, positions.shape[-1])
    before = logits(model, ids, positions)
    assert relative(logits(auto_scaled(model), ids, positions), before) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_longer_ones_by_the_smallest_scale_that_covers_them(model, kind):
    for scale in (2.0, 4.0):
        positions = KINDS[kind][scale]
        one_more = torch.cat([KINDS[kind][scale / 2], KINDS[kind][scale / 2][..., -1:] + 1], dim=-1)
        for at in (positions, one_more):
            ids = tokens(1, at.shape[-1])
            with mrrope.patched(model, "mrrope_pro", scale=scale):
                want = logits(model, ids, at)
            with mrrope.patched(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE):
                assert torch.equal(logits(model, ids, at), want)


def test_positions_that_the_model_makes_itself(model):
    for length, scale in ((2 * LENGTH, 2.0), (2 * LENGTH + 1, 4.0)):
        ids = tokens(2, length)
        with mrrope.patched(model, "mrrope_pro", scale=scale):
            want = logits(model, ids)
        with mrrope.patched(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE):
            assert torch.equal(logits(model, ids), want)


def test_any_row_may_hold_the_largest_position(qwen):
    auto_scaled(qwen)
    for row in range(3):
        positions = torch.arange(10).repeat(3, 1, 1)
        positions[row, 0, 4] = 2 * LENGTH
        with torch.no_grad():
            cache = qwen(input_ids=tokens(1, 10), position_ids=positions).past_key_values
        assert tables_of(cache) == [2]


# --- with a cache


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_a_growing_text_are_rescaled(model, kind, cache_kind):
    """After every step the keys must equal those of a fresh prefill with that step's table."""
    positions = KINDS[kind][4.0].expand(3, 2, -1)
    ids = tokens(2, positions.shape[-1])
    auto_scaled(model)
    cache = caches(model)[cache_kind]
    last = positions.shape[-1] - 4 * LENGTH  # tokens past those of a text alone
    start = 0
    for end in (LENGTH + last - 3, LENGTH + last, LENGTH + last + 1, 2 * LENGTH + last + 20, ids.shape[1]):
        with torch.no_grad():
            model(input_ids=ids[:, start:end], position_ids=positions[..., start:end], past_key_values=cache)
        reached = int(positions[..., :end].max()) + 1
        step = (reached > LENGTH) + (reached > 2 * LENGTH)
        assert tables_of(cache) == [step, step]
        fresh = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
        with mrrope.patched(model, "mrrope_pro", scale=2.0**step), torch.no_grad():
            model(input_ids=ids[:, :end], position_ids=positions[..., :end], past_key_values=fresh)
        assert relative(first_keys(cache)[:, :, :end], first_keys(fresh)) < ROUNDING
        start = end


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
def test_sequences_of_a_batch_change_scale_independently(model, cache_kind):
    """Left-padded: a text, and a shorter one with an image whose positions advance less than its tokens."""
    rows = [positions_of([180]), positions_of([15, IMAGE, 42])]
    length = max(row.shape[-1] for row in rows)
    padding = [length - row.shape[-1] for row in rows]
    positions = torch.cat([torch.nn.functional.pad(row, (n, 0)) for row, n in zip(rows, padding, strict=True)], dim=1)
    mask = torch.stack([(torch.arange(length) >= n).long() for n in padding])
    ids = tokens(2, length) * mask
    auto_scaled(model)
    cache, got, steps, start = caches(model)[cache_kind], [], [], 0
    for end in (60, 120, 121, length):
        options = {"attention_mask": mask[:, :end], "past_key_values": cache}
        got.append(logits(model, ids[:, start:end], positions[..., start:end], **options))
        steps.append(tables_of(cache))
        start = end
    assert steps == [[0, 0], [1, 0], [1, 0], [2, 1]]
    for row, skipped in enumerate(padding):
        alone, start = caches(model)[cache_kind], skipped
        for end, together in zip((60, 120, 121, length), got, strict=True):
            want = logits(
                model, ids[row : row + 1, start:end], positions[:, row : row + 1, start:end], past_key_values=alone
            )
            assert relative(together[row : row + 1, -want.shape[1] :], want) < ROUNDING
            start = end


def test_positions_repeat_with_a_cache(qwen):
    auto_scaled(qwen)
    positions = WITH_IMAGE[2.0]
    ids = tokens(1, positions.shape[-1])
    alone, repeated = (transformers.DynamicCache(config=qwen.config.get_text_config(decoder=True)) for _ in range(2))
    for cache in (alone, repeated):
        logits(qwen, ids[:, :120], positions[..., :120], past_key_values=cache)
    repeated.batch_repeat_interleave(2)
    want = logits(qwen, ids[:, 120:], positions[..., 120:], past_key_values=alone)
    got = logits(qwen, ids[:, 120:].repeat(2, 1), positions[..., 120:].repeat(1, 2, 1), past_key_values=repeated)
    assert tables_of(repeated) == [1, 1]
    assert relative(got, want.expand_as(got)) < ROUNDING


def test_a_text_cached_by_the_unpatched_model_is_continued(qwen):
    ids = tokens(1, 100)
    with torch.no_grad():
        cache = qwen(input_ids=ids[:, :60]).past_key_values
    auto_scaled(qwen)
    logits(qwen, ids[:, 60:], past_key_values=cache)
    with mrrope.patched(qwen, "mrrope_pro", scale=2.0), torch.no_grad():
        fresh = qwen(input_ids=ids).past_key_values
    assert relative(first_keys(cache), first_keys(fresh)) < ROUNDING


def test_tables_per_layer_and_head(qwen):
    rope = {"rotary_dim": 16, "base": 1e6, "original_max_position": LENGTH, "scale": 2.0}
    tables = [mrrope.frequency_table("mrrope_pro", alpha=1.0 + i, beta=8.0, **rope) for i in range(4)]
    heads = [mrrope.HeadTables(tables[:2]), mrrope.HeadTables(tables[2:])]
    positions = WITH_IMAGE[2.0].expand(3, 2, -1)
    ids = tokens(2, positions.shape[-1])
    for step in (heads[0], mrrope.TableSet(heads)):
        with mrrope.patched(qwen, step), torch.no_grad():
            fresh = qwen(input_ids=ids, position_ids=positions).past_key_values
        with mrrope.patched(qwen, [step], scale="auto"):
            cache = caches(qwen)["dynamic"]
            for part, at in zip(ids.split(100, dim=1), positions.split(100, dim=2), strict=True):
                logits(qwen, part, at, past_key_values=cache)
        assert relative(first_keys(cache), first_keys(fresh)) < ROUNDING


# --- generate


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}]
)
def test_generate_reads_a_text_with_the_scale_of_its_final_length(model, options):
    ids = tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    call = {"attention_mask": mask, "max_new_tokens": 20, **options, **GENERATE}
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        first = model.generate(ids[:1], **call | {"attention_mask": mask[:1]})
    with mrrope.patched(model, "mrrope_pro", scale=1.0):
        second = model.generate(ids[1:, 10:], **call | {"attention_mask": mask[1:, 10:]})
    got = auto_scaled(model).generate(ids, **call)
    if got.past_key_values is not None:
        assert tables_of(got.past_key_values) == [1, 0], "50 + 20 and 40 + 20 tokens"
    assert torch.equal(got.sequences[0, 50:], first.sequences[0, 50:])
    assert torch.equal(got.sequences[1, 50:], second.sequences[0, 40:])


@pytest.mark.parametrize(("new_tokens", "table"), [(20, 0), (40, 1)])
def test_generate_counts_the_positions_of_an_image(model, new_tokens, table):
    """A prompt of more than LENGTH tokens at positions below it, and the new ones."""
    positions = positions_of([10, IMAGE, 20])
    ids = tokens(1, positions.shape[-1])
    assert ids.shape[1] > LENGTH > int(positions.max())
    call = {"position_ids": positions, "max_new_tokens": new_tokens, **GENERATE}
    with mrrope.patched(model, "mrrope_pro", scale=2.0**table):
        want = model.generate(ids, **call)
    got = auto_scaled(model).generate(ids, **call)
    assert tables_of(got.past_key_values) == [table]
    assert torch.equal(got.sequences, want.sequences)
    (follower,) = followers_in(model)
    assert (follower.expected_lengths, follower.expected_new_tokens, follower.user) == (None, None, {})


@pytest.mark.parametrize(("new_tokens", "table"), [(20, 0), (40, 1)])
def test_generate_from_a_picture(qwen, new_tokens, table):
    """The model computes the positions: 96 tokens of 8 rows and 12 columns."""
    vision = qwen.config.vision_config
    grid = torch.tensor([[1, 8, 12]]) * torch.tensor([1, vision.spatial_merge_size, vision.spatial_merge_size])
    ids = tokens(1, 126)
    ids[:, 20:116] = qwen.config.image_token_id
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(0)
    call = {
        "pixel_values": torch.randn(int(grid.prod()), channels, generator=generator),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == qwen.config.image_token_id).int(),
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new_tokens,
        **GENERATE,
    }
    with mrrope.patched(qwen, "mrrope_pro", scale=2.0**table):
        want = qwen.generate(ids, **call)
    got = auto_scaled(qwen).generate(ids, **call)
    assert tables_of(got.past_key_values) == [table], "positions end at 20 + 12 + 10, and the new ones"
    assert torch.equal(got.sequences, want.sequences)


def test_a_reserve_and_lengths_expected_around_generate(qwen):
    auto_scaled(qwen, reserve=5)
    ids = tokens(1, 50)
    call = {"max_new_tokens": 100, "eos_token_id": list(range(128))}
    assert tables_of(qwen.generate(ids, **GENERATE | call).past_key_values) == [0], "50 + 5 tokens"
    with mrrope.expecting(qwen, 2 * LENGTH + 1):
        assert tables_of(qwen.generate(ids, **GENERATE | call).past_key_values) == [2]


def test_another_thread_is_refused_while_generating(qwen):
    auto_scaled(qwen)
    refused = []

    def call():
        try:
            logits(qwen, tokens(1, 3))
        except RuntimeError as error:
            refused.append(str(error))

    class Interrupts(transformers.generation.LogitsProcessor):
        def __call__(self, input_ids, scores):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            return scores

    qwen.generate(tokens(1, 5), max_new_tokens=3, logits_processor=[Interrupts()], **GENERATE)
    assert len(refused) == 3
    assert all("one thread at a time" in text for text in refused)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate_across_steps(model, implementation):
    """The same tokens as reading them one by one."""
    auto_scaled(model, reserve=0)
    ids = tokens(1, 55)
    options = {} if implementation == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    got = model.generate(ids, max_new_tokens=20, **options, **GENERATE)
    assert tables_of(got.past_key_values) == [1]
    cache, written, step = caches(model)["dynamic"], ids, ids
    for at in range(20):
        positions = None if at == 0 else torch.tensor([[[54 + at]]]).expand(3, 1, 1)
        step = logits(model, step, positions, past_key_values=cache)[:, -1:].argmax(-1)
        written = torch.cat([written, step], dim=1)
    assert torch.equal(got.sequences, written)


# --- torch.compile


@pytest.mark.slow
def test_compiled_decoding_is_one_graph_across_steps(qwen):
    auto_scaled(qwen)
    positions = positions_of([20, IMAGE, 120]).expand(3, 2, -1)
    ids = tokens(2, positions.shape[-1])
    begin, end = 150, ids.shape[1]
    assert int(positions[..., :begin].max()) < LENGTH
    step = torch.compile(qwen, fullgraph=True, backend="aot_eager")
    read = {}
    for name, forward in (("eager", qwen), ("compiled", step)):
        cache = caches(qwen)["static"]
        parts = [logits(qwen, ids[:, :begin], positions[..., :begin], past_key_values=cache)]
        torch._dynamo.reset()
        with torch._dynamo.config.patch(error_on_recompile=name == "compiled"):
            for at in range(begin, end):
                sees = (torch.arange(SLOTS) <= at).expand(2, 1, 1, -1)
                one = slice(at, at + 1)
                options = {"attention_mask": sees, "past_key_values": cache}
                parts.append(logits(forward, ids[:, one], positions[..., one].clone(), **options).clone())
        assert tables_of(cache) == [2, 2]
        read[name] = torch.cat(parts, dim=1)
    assert relative(read["compiled"], read["eager"]) < ROUNDING
