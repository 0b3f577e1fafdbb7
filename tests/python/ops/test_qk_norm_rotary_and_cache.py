"""qk_norm_rotary_and_cache: RMSNorm, rotation, cache write, float8 q and gate against float64, schemas and errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_calls import (
    assert_compiled_like_eager,
    near_and_far_blocks,
    written_arguments,
)
from cache_reference import (
    FLOAT8,
    by_slot,
    by_token,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from norm_reference import EPS, OVERS, normed
from qk_norm_rotary_and_cache_calls import Call, Options
from rotary_cases import DTYPES, OWN_MEMORY, PAIRINGS, Case, cases, table_of
from rotary_reference import rotated_by, unit_rotations
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope

IN_PLACE = torch.ops.mrrope.qk_norm_rotary_and_cache_.default


INTO = torch.ops.mrrope.qk_norm_rotary_and_cache_.into


Q_SCALES = ["none", "one", "each", "computed"]


@st.composite
def option_sets(draw) -> Options:
    cache_dtype = draw(st.sampled_from([None, *FLOAT8]))
    q_out = draw(st.sampled_from([None, "same", *FLOAT8]))
    return Options(
        over=draw(st.sampled_from(OVERS)),
        offset=draw(st.sampled_from([0.0, 1.0])),
        norms=draw(st.tuples(st.booleans(), st.booleans())),
        gate=draw(st.booleans()),
        q_out=q_out,
        q_scale=draw(st.sampled_from(Q_SCALES)) if q_out in FLOAT8 else "none",
        paged=draw(st.booleans()),
        cache_layout=draw(st.sampled_from(["nhd", "hnd"])),
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(["none", "one", "each"])) if cache_dtype else "none",
        memory=draw(st.sampled_from(OWN_MEMORY)),
    )


QWEN = Case(layout="thd", tokens=33, heads=(16, 2), head_dim=256, rotary_dim=64, dtype=torch.bfloat16)


EVERY_OPTIONS = [
    Options(over, 1.0, (True, True), gate, q_out, q_scale, paged, cache_layout, cache_dtype, scales)
    for over in OVERS
    for gate, q_out, q_scale, paged, cache_layout, cache_dtype, scales in [
        (False, None, "none", True, "nhd", None, "none"),
        (True, "same", "none", False, "hnd", None, "none"),
        (True, torch.float8_e4m3fn, "computed", True, "hnd", torch.float8_e4m3fn, "one"),
        (False, torch.float8_e5m2, "each", False, "nhd", torch.float8_e5m2, "each"),
    ]
]


# --- numbers ---


@given(case=cases(), options=option_sets(), keys=st.integers(1, 4))
@example(QWEN, Options(offset=1.0, gate=True), 2)
@example(QWEN, Options("all_heads", 1.0, gate=True, q_out=torch.float8_e4m3fn, q_scale="computed"), 2)
@settings(max_examples=200)
def test_against_float64(device, case, options, keys):
    if case.dtype == torch.float64:
        options = replace(options, q_out=None, q_scale="none", cache_dtype=None, scales="none")
    Call(case.with_changes(heads=(case.heads[0], keys)), options, device).run_and_check()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_every_option(device, pairing, dtype, options):
    case = Case(layout="thd", tokens=40, heads=(8, 2), head_dim=128, rotary_dim=96, dtype=dtype, pairing=pairing)
    Call(case, options, device).run_and_check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", OVERS)
def test_equals_the_unfused_ops(device, dtype, over):
    """To a rounding: the two kernels may contract other products."""
    call = Call(Case(dtype=dtype, head_dim=64, rotary_dim=64), Options(over, paged=False, cache_layout="hnd"), device)
    options = {"eps": EPS, "over": over}
    q, k = mrrope.qk_norm_rotary(call.q, call.k, call.q_weight, call.k_weight, call.positions, call.table, **options)
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    torch.testing.assert_close(call.q, q)
    kept = call.slots >= 0
    for sequence in range(2):
        for slot, token in zip(call.slots[sequence][kept[sequence]], kept[sequence].nonzero()[:, 0], strict=True):
            torch.testing.assert_close(call.key_cache[sequence, :, slot], k[sequence, :, token])


@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8])
def test_without_norms_it_is_rotary_and_cache(device, cache_dtype):
    case = Case(dtype=torch.bfloat16, head_dim=64, rotary_dim=48)
    call, expected = (
        Call(case, Options(norms=(False, False), gate=is_gated, cache_dtype=cache_dtype), device)
        for is_gated in (True, False)
    )
    given = ("q", "k", "v", "positions", "table", "key_cache", "value_cache", "slots", "layout", "cache_layout")
    mrrope.rotary_and_cache_(**{name: value for name, value in expected.arguments().items() if name in given})
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    for name in ("q", "key_cache", "value_cache"):
        assert same_bits(getattr(call, name), getattr(expected, name))


def test_heads_of_zeros_and_infinity_have_a_finite_scale(device):
    for dtype in FLOAT8:
        case = Case(layout="thd", tokens=3, head_dim=64, rotary_dim=64, reach=0, method="rope")
        call = Call(case, Options(norms=(False, False), q_out=dtype, q_scale="computed"), device)
        call.q[0] = 0.0
        call.q[1, 0, 5] = math.inf
        mrrope.qk_norm_rotary_and_cache_(**call.arguments())
        assert (call.q_scale_out[0] == 2.0**-126).all()
        assert not call.q_out[0].float().any()
        assert call.q_scale_out.isfinite().all()
        assert call.q_out[1, 0, 5].float() == torch.finfo(dtype).max


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 2.0**127, math.inf, math.nan])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("head_dim", [64, 36], ids=["vectors", "component by component"])
def test_an_impossible_scale_of_q_gives_nan(cuda, scale, has_norms, head_dim):
    for dtype in FLOAT8:
        case = Case(dtype=torch.bfloat16, layout="thd", head_dim=head_dim, rotary_dim=32)
        call = Call(case, Options(norms=(has_norms, has_norms), q_out=dtype, q_scale="one"), cuda)
        call.q_scale.fill_(scale)
        mrrope.qk_norm_rotary_and_cache_(**call.arguments())
        assert call.q_out.float().isnan().all()


def assert_infinity_stays_where_it_is(device, over, pairing, tokens, has_norms):
    """With norms all other components of the head are 0, without they keep their values."""
    case = Case(dtype=torch.bfloat16, pairing=pairing, layout="thd", tokens=tokens, heads=(32, 8), head_dim=64,
                rotary_dim=32, method="rope")  # fmt: skip
    call = Call(case, Options(over, norms=(has_norms, has_norms)), device)
    for x in (call.q, call.k):
        x[0, 1, 40] = math.inf
    before = call.copied()
    call.slots.copy_(torch.arange(tokens))
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    for x, found in ((before.q, call.q), (before.k, call.key_cache.flatten(0, 1)[:tokens])):
        assert found[0, 1, 40].isnan() if has_norms else found[0, 1, 40] == math.inf
        found[0, 1, 40] = 0.0
        assert found.isfinite().all()
        if has_norms:
            assert not found[0, 1].any()
        else:
            assert torch.equal(found[0, 1, 41:], x[0, 1, 41:])


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("tokens", [1, 400, 2100])  # one head per thread, two and eight
def test_infinity_in_the_unrotated_tail_stays_where_it_is(device, over, pairing, tokens, has_norms):
    assert_infinity_stays_where_it_is(device, over, pairing, tokens, has_norms)


def test_infinity_in_the_unrotated_tail_of_many_tokens(cuda):
    """Over all heads, four per thread."""
    assert_infinity_stays_where_it_is(cuda, "all_heads", "halves", 12000, has_norms=True)


@pytest.mark.parametrize("over", OVERS)
def test_rows_of_positions(device, over):
    case = Case(batch=2, tokens=6, head_dim=40, rotary_dim=32)
    call = Call(case, Options(over), device)
    tables = mrrope.AxisTables([table_of("rope", 12), table_of("ntk", 20)])
    positions = torch.randint(0, 5000, (2, 2, 6), generator=torch.Generator().manual_seed(3))
    before = call.copied()
    mrrope.qk_norm_rotary_and_cache_(**call.arguments() | {"table": tables, "positions": positions.to(device)})
    parts = [(table_of("rope", 12), 0), (table_of("ntk", 20), 1)]
    by = np.concatenate([unit_rotations(positions[row], t.turns) * t.attention_factor for t, row in parts], axis=-1)
    for weight, x, actual in ((call.q_weight, before.q, call.q), (call.k_weight, before.k, None)):
        exact = rotated_by(normed(x.cpu().double(), weight.cpu().double(), over, "bhsd", 0.0), by)
        if actual is None:
            kept = call.slots.reshape(-1) >= 0
            actual = by_slot(call.key_cache, "nhd")[call.slots.reshape(-1)[kept]]
            exact = by_token(exact, "bhsd")[kept.cpu()]
        assert (actual.cpu().double() - exact).abs().max() <= 5e-6 * exact.abs().max()


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_table_index_and_head_tables(device, over, layout):
    case = Case(layout=layout, batch=3, tokens=6, heads=(4, 2), head_dim=64, rotary_dim=64)
    call = Call(case, Options(over), device)
    stacks = [mrrope.HeadTables([table_of(m, 64), table_of("rope", 64)]) for m in ("yarn", "ntk", "mrrope_pro")]
    index = torch.tensor([2, 0, 1] if layout == "bhsd" else [0, 1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    chosen = {"table": stacks, "table_index": index}
    norm = {"eps": EPS, "over": over, "layout": layout}
    q, k = mrrope.qk_norm_rotary(call.q, call.k, call.q_weight, call.k_weight, call.positions, **chosen, **norm)
    mrrope.qk_norm_rotary_and_cache_(**call.arguments() | chosen)
    torch.testing.assert_close(call.q, q)
    kept = call.slots.reshape(-1) >= 0
    rows = by_slot(call.key_cache, "nhd")[call.slots.reshape(-1)[kept]]
    torch.testing.assert_close(rows, by_token(k, layout)[kept])


def test_views_of_one_projection_with_a_gate(device):
    """Qwen3-Next's projection yields [q | gate] for each head."""
    tokens, q_heads, kv_heads, dim = 12, 4, 2, 64
    projected = torch.randn(tokens, q_heads, 2 * dim, dtype=torch.bfloat16, device=device)
    before = projected.clone()
    q, gate = projected.split(dim, dim=-1)
    k, v = torch.randn(2, tokens, kv_heads, dim, dtype=torch.bfloat16, device=device)
    weights = torch.randn(2, dim, dtype=torch.bfloat16, device=device)
    caches = torch.zeros(2, 4, 8, kv_heads, dim, dtype=torch.bfloat16, device=device)
    slots, positions = torch.randperm(32, device=device)[:tokens], torch.arange(tokens, device=device)
    options = {"eps": EPS, "weight_offset": 1.0, "layout": "thd"}
    table = table_of("rope", 16)
    want_q, want_k = mrrope.qk_norm_rotary(before[..., :dim], k, *weights, positions, table, **options)
    mrrope.qk_norm_rotary_and_cache_(q, k, v, *weights, positions, table, *caches, slots, gate=gate, **options)
    torch.testing.assert_close(projected[..., :dim], want_q)
    torch.testing.assert_close(projected[..., dim:], before[..., dim:].sigmoid())
    torch.testing.assert_close(caches[0].flatten(0, 1)[slots], want_k)
    assert torch.equal(caches[1].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
@pytest.mark.parametrize("empty", [Case(batch=0), Case(tokens=0), Case(heads=(0, 2)), Case(heads=(2, 0))],
                         ids=["batch", "tokens", "q", "k"])  # fmt: skip
def test_empty_tensors(device, options, empty):
    Call(empty, options, device).run_and_check()


def test_blocks_more_than_two_to_the_31_elements_apart(device):
    options = Options(cache_dtype=torch.float8_e4m3fn)
    call = Call(Case(batch=2, tokens=1, head_dim=32, rotary_dim=32), options, device)
    near, far = zip(*(near_and_far_blocks((2, 1, 2, 32), device) for _ in range(2)), strict=True)
    call.slots = torch.tensor([[1], [0]], device=device)
    for key_cache, value_cache in (near, far):
        call.key_cache, call.value_cache = key_cache, value_cache
        mrrope.qk_norm_rotary_and_cache_(**call.arguments() | {"q": call.q.clone()})
    assert all(same_bits(x, y) for x, y in zip(far, near, strict=True))
    assert near[1].float().abs().sum() > 0


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_opcheck(device, options):
    call = Call(Case(dtype=torch.bfloat16, memory="padded", rotary_dim=12), options, device)
    # The other checks compute on copies of the caches, and float8 has no arithmetic.
    tests = {"test_utils": ("test_autograd_registration", "test_faketensor")} if options.cache_dtype else {}
    opcheck(IN_PLACE if call.q_out is None else INTO, call.raw_arguments(), **tests)


def test_schemas_say_what_is_written():
    assert written_arguments(IN_PLACE) == ["q", "key_cache", "value_cache", "gate"]
    assert written_arguments(INTO) == ["q_out", "key_cache", "value_cache", "gate", "q_scale_out"]
    assert IN_PLACE._schema.returns == INTO._schema.returns == []


def test_meta_tensors_write_nothing():
    call = Call(Case(), EVERY_OPTIONS[2], "cpu")
    before = call.memories()
    mrrope.qk_norm_rotary_and_cache_(
        **{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.arguments().items()}
    )
    assert all(torch.equal(x, y) for x, y in zip(call.memories(), before, strict=True))


@pytest.mark.parametrize("options", [EVERY_OPTIONS[0], EVERY_OPTIONS[1], EVERY_OPTIONS[2]], ids=str)
def test_versions_count(device, options):
    call = Call(Case(), options, device)
    versions = [x._version for x in call.written()]
    others = [call.k._version, call.v._version, call.q_weight._version]
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    assert [x._version for x in call.written()] == [version + 1 for version in versions]
    assert [call.k._version, call.v._version, call.q_weight._version] == others


@pytest.mark.parametrize("name", ["q", "k", "v", "q_weight", "k_weight", "key_cache", "value_cache", "gate", "q_out"])
def test_gradients_are_refused(device, name):
    call = Call(Case(), EVERY_OPTIONS[1] if name == "q_out" else Options(gate=True), device)
    call.assert_gradient_refused(name)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_q_out", [False, True])
def test_compile(device, backend, has_gate, has_q_out):
    table = table_of("yarn", 16).to(device)
    weights = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)

    def attend(x, positions, slots, key_cache, value_cache):
        q, k, v, gate = (part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32, 64], dim=-1))
        q = mrrope.qk_norm_rotary_and_cache_(
            q, k, v, *weights, positions, table, key_cache, value_cache, slots, eps=EPS, layout="thd",
            gate=gate if has_gate else None, q_out=torch.empty_like(q) if has_q_out else None,
        )  # fmt: skip
        return (q * gate).sum(-1) + key_cache.sum()

    assert_compiled_like_eager(attend, 192, backend, device)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_compile_with_float8(device, backend, dtype):
    table = table_of("yarn", 16).to(device)
    weights = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    scale = torch.tensor([0.25], device=device)

    def attend(x, positions, slots, key_cache, value_cache):
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32], dim=-1))
        q_out = torch.empty_like(q, dtype=dtype)
        scales = torch.empty(q.shape[:2], device=q.device)
        mrrope.qk_norm_rotary_and_cache_(
            q, k, v, *weights, positions, table, key_cache, value_cache, slots, eps=EPS, layout="thd",
            key_scale=scale, value_scale=scale, q_out=q_out, q_scale_out=scales,
        )  # fmt: skip
        return q_out, scales

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 128, generator=generator).to(device, torch.bfloat16)
        slots = torch.randperm(16, generator=generator)[:tokens].to(device)
        caches = [[torch.zeros(4, 4, 2, 16, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        expected, actual = (
            function(x, torch.arange(tokens, device=device), slots, *written)
            for function, written in zip((attend, compiled), caches, strict=True)
        )
        for want, got in zip((*expected, *caches[0]), (*actual, *caches[1]), strict=True):
            assert want.float().abs().sum() > 0
            assert same_bits(got, want)


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_graph_capture_with_other_slots(cuda, options):
    case = Case(dtype=torch.bfloat16, head_dim=64, rotary_dim=64)
    others = (Call(case.with_changes(seed=seed), options, cuda) for seed in (3, 4))
    Call(case, options, cuda).assert_graph_replays(others)


def test_runs_on_the_current_stream(cuda):
    Call(Case(), Options(gate=True), cuda).assert_runs_on_the_current_stream()
