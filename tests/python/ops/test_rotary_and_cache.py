"""rotary_and_cache: the results of rotary and a scatter of k and v to the cache, with one rounding."""

import math
from dataclasses import replace

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
    saturated,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rotary_and_cache_calls import IN_PLACE, Call, Kept
from rotary_cases import DTYPES, LAYOUTS, OWN_MEMORY, PAIRINGS, Case, cases, table_of
from rotary_reference import TOLERANCES, rotated
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope

INTO = torch.ops.mrrope.rotary_and_cache_.into


CACHE_LAYOUTS = ["nhd", "hnd"]


def kept_cases():
    def build(float8, scales, **options):
        return Kept(float8=float8, scales=scales if float8 else "none", **options)

    return st.builds(
        build,
        paged=st.booleans(),
        cache_layout=st.sampled_from(CACHE_LAYOUTS),
        float8=st.sampled_from([None, *FLOAT8]),
        scales=st.sampled_from(["none", "one", "one in a row", "each"]),
        slot_dtype=st.sampled_from([torch.int32, torch.int64]),
        memory=st.sampled_from(OWN_MEMORY),
        q_out=st.booleans(),
    )


EVERY_KEPT = [
    Kept(paged, cache_layout, float8, "each" if float8 else "none")
    for paged in (True, False)
    for cache_layout in CACHE_LAYOUTS
    for float8 in (None, *FLOAT8)
]


# --- numbers ---


@given(case=cases(), kept=kept_cases(), keys=st.integers(1, 4))
@example(Case(layout="thd", tokens=65, heads=(8, 2), head_dim=128, rotary_dim=128, dtype=torch.bfloat16), Kept(), 2)
@example(Case(tokens=65, heads=(8, 2), head_dim=128, rotary_dim=64, dtype=torch.float16),
         Kept(False, "hnd", torch.float8_e5m2, "each"), 2)  # fmt: skip
@settings(max_examples=200)
def test_every_token_goes_to_its_slot(device, case, kept, keys):
    if case.dtype == torch.float64:
        kept = replace(kept, float8=None, scales="none")
    Call(case.with_changes(heads=(case.heads[0], keys)), kept, device).run_and_check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_every_cache(device, layout, pairing, kept):
    batch = 2 if kept.paged else 3
    case = Case(layout=layout, pairing=pairing, batch=batch, dtype=torch.bfloat16, head_dim=64, rotary_dim=64)
    Call(case, kept, device).run_and_check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_a_rotation_and_a_scatter(device, dtype):
    call = Call(Case(layout="thd", tokens=40, dtype=dtype, head_dim=64, rotary_dim=48), Kept(), device)
    q, k = mrrope.rotary(call.q, call.k, call.positions, call.table, "thd")
    key_cache, value_cache = call.key_cache.clone(), call.value_cache.clone()
    kept, slots = call.each_slot()
    for cache, heads in ((key_cache, k), (value_cache, call.v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, heads[kept])
    mrrope.rotary_and_cache_(**call.arguments())
    assert all(same_bits(x, y) for x, y in zip(call.written(), (q, key_cache, value_cache), strict=True))


def test_a_static_cache_is_written_at_the_positions(device):
    case = Case(dtype=torch.float32, reach=0)
    call = Call(case, Kept(False, "hnd"), device)
    positions = torch.tensor([3, 4, 5, 6, 7], device=device)
    cached = [torch.zeros(2, 2, 9, 16, device=device) for _ in range(2)]
    q, k = mrrope.rotary(call.q, call.k, positions, call.table)
    expected = [cached[0].index_copy(2, positions, k), cached[1].index_copy(2, positions, call.v)]
    mrrope.rotary_and_cache_(call.q, call.k, call.v, positions, call.table, *cached)
    assert torch.equal(call.q, q)
    assert all(torch.equal(x, y) for x, y in zip(cached, expected, strict=True))


def test_padding_is_rotated_but_not_cached(device):
    """Left padding: positions start at the first real token, cache positions at the padding."""
    call = Call(Case(batch=2, tokens=4), Kept(False, "hnd"), device)
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]], device=device)
    places = torch.tensor([[-1, -1, 2, 3], [0, 1, 2, 3]], device=device)
    q, k = mrrope.rotary(call.q, call.k, positions, call.table)
    cached = [torch.full((2, 2, 6, 16), 7.0, device=device) for _ in range(2)]
    mrrope.rotary_and_cache_(call.q, call.k, call.v, positions, call.table, *cached, cache_positions=places)
    assert torch.equal(call.q, q)
    for cache, heads in zip(cached, (k, call.v), strict=True):
        assert torch.equal(cache[0, :, 2:4], heads[0, :, 2:4])
        assert torch.equal(cache[1, :, :4], heads[1])
        assert (cache[0, :, :2] == 7.0).all()
        assert (cache[:, :, 4:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("float8", [None, *FLOAT8])
def test_frobenius_error_is_one_rounding(device, dtype, float8):
    """One rounding of the exact result. Rounding to the heads' dtype first would exceed it."""
    case = Case(layout="thd", tokens=400, heads=(4, 4), head_dim=128, rotary_dim=128, dtype=dtype)
    call = Call(case, Kept(float8=float8, scales="one" if float8 else "none"), device)
    exact = rotated(call.k, call.positions, call.table, "thd")
    mrrope.rotary_and_cache_(**call.arguments())
    kept, slots = (x.cpu() for x in call.each_slot())
    rows = by_slot(call.key_cache, "nhd").cpu()[slots]
    exact = exact[kept]
    if float8:
        scale = call.key_scale.cpu().double()
        rounded = saturated(exact / scale, float8).to(float8).double() * scale
        actual = rows.view(float8).double() * scale
    else:
        rounded, actual = exact.to(dtype).double(), rows.double()
    allowed = (rounded - exact).norm() / exact.norm() * 1.0005 + TOLERANCES[torch.float32].arithmetic
    assert (actual - exact).norm() / exact.norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e5m2_saturates_and_keeps_nan(device, dtype):
    case = Case(layout="thd", tokens=2, heads=(1, 1), dtype=dtype, reach=0)
    call = Call(case, Kept(float8=torch.float8_e5m2), device)
    call.slots = torch.tensor([3, 4], device=device)
    special = [0.0, -0.0, 57344.0, 61440.0, -65536.0, 1e9, float("inf"), -float("inf"), float("nan")]
    call.v[0, 0, : len(special)] = torch.tensor(special, dtype=dtype, device=device)
    mrrope.rotary_and_cache_(**call.arguments())
    row = call.value_cache.view(-1, 1, 16)[3, 0].float().cpu()
    largest = 57344.0
    assert row[:8].tolist() == [0.0, -0.0, largest, largest, -largest, largest, largest, -largest]
    assert row[8].isnan()


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 2.0**127, math.inf, math.nan])
@pytest.mark.parametrize("rotary_dim", [64, 32], ids=["whole heads", "partial rotation"])
def test_impossible_float8_scales_give_nan(cuda, scale, rotary_dim):
    """The host does not read scales on a GPU. NaN tells more than the 0 that a flushed reciprocal would give."""
    case = Case(dtype=torch.bfloat16, heads=(2, 1), head_dim=64, rotary_dim=rotary_dim, layout="thd")
    q, k = case.heads_on(cuda)
    scales = torch.tensor([scale], device=cuda)
    caches = [torch.zeros(4, 16, 1, 64, device=cuda).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.arange(case.tokens, device=cuda)
    options = {"slots": slots, "layout": "thd", "key_scale": scales, "value_scale": scales}
    mrrope.rotary_and_cache_(q, k, k.clone(), case.positions(cuda), case.table(), *caches, **options)
    for cache in caches:
        assert cache.float().view(-1, 64)[: case.tokens].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float8_saturates_and_keeps_nan(device, dtype):
    case = Case(layout="thd", tokens=2, heads=(1, 1), dtype=dtype, reach=0)
    call = Call(case, Kept(float8=torch.float8_e4m3fn), device)
    call.table = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    call.slots = torch.tensor([3, 4], device=device)
    special = [0.0, -0.0, 448.0, 464.0, 465.0, -480.0, 1e4, -1e4, float("inf"), -float("inf"), float("nan")]
    call.v[0, 0, : len(special)] = torch.tensor(special, dtype=dtype, device=device)
    call.k.copy_(call.v).nan_to_num_(nan=0.0, posinf=6e4, neginf=-6e4)
    mrrope.rotary_and_cache_(**call.arguments())
    row = call.value_cache.view(-1, 1, 16)[3, 0].float().cpu()
    expected = [0.0, -0.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 448.0, -448.0]
    assert row[:10].tolist() == expected
    assert row[10].isnan()
    # At position 0 rotations are the identity.
    assert call.key_cache.view(-1, 1, 16)[3, 0].float().cpu()[:10].tolist() == expected


# --- tables, views, shapes ---


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("kept", EVERY_KEPT[:6], ids=str)
def test_table_index(device, layout, kept):
    case = Case(layout=layout, batch=3, tokens=6, dtype=torch.bfloat16)
    call = Call(case, kept, device)
    tables = [table_of(method, 16) for method in ("rope", "yarn", "mrrope_pro")]
    index = torch.tensor([2, 0, 1] if layout == "bhsd" else [0, 1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    arguments = call.arguments() | {"table": tables, "table_index": index}
    q, k = mrrope.rotary(call.q, call.k, call.positions, tables, layout, table_index=index)
    expected = Call(case, kept, device)
    # k is rotated already, and at position 0 a table without an attention factor is the identity.
    plain = expected.arguments() | {"q": q, "k": k, "table": table_of("pi", 16),
                                    "positions": torch.zeros_like(call.positions)}  # fmt: skip
    mrrope.rotary_and_cache_(**plain)
    mrrope.rotary_and_cache_(**arguments)
    assert torch.equal(call.q, q)
    assert same_bits(call.value_cache, expected.value_cache)
    if not kept.float8:
        assert same_bits(call.key_cache, expected.key_cache)
    else:  # rounded to bfloat16 first
        torch.testing.assert_close(
            call.key_cache.float(), expected.key_cache.float(), rtol=torch.finfo(kept.float8).eps, atol=2.0**-9
        )


@pytest.mark.parametrize("float8", [None, *FLOAT8])
def test_rows_of_positions(device, float8):
    case = Case(batch=2, tokens=6, head_dim=40, rotary_dim=32, dtype=torch.bfloat16)
    call, expected = Call(case, Kept(float8=float8), device), Call(case, Kept(float8=float8), device)
    tables = mrrope.AxisTables([table_of("rope", 12), table_of("ntk", 20)])
    positions = torch.randint(0, 5000, (2, 2, 6), generator=torch.Generator().manual_seed(3)).to(device)
    # To a float8 cache k is rounded once, from float32. Heads of 16 bits have cosines of their own precision on a GPU.
    q, k = (call.q, call.k) if float8 is None else (call.q.float(), call.k.float())
    q, k = mrrope.rotary(q, k, positions, tables)
    # k is rotated already, and at position 0 a table without an attention factor is the identity.
    plain = expected.arguments() | {"table": table_of("pi", 32), "positions": torch.zeros_like(positions[0])}
    mrrope.rotary_and_cache_(**plain | {"q": q, "k": k, "v": call.v.to(k.dtype)})
    result = mrrope.rotary_and_cache_(**call.arguments() | {"table": tables, "positions": positions})
    assert torch.equal(result, q.bfloat16())
    assert same_bits(call.key_cache, expected.key_cache)
    assert same_bits(call.value_cache, expected.value_cache)


def test_views_of_one_projection_and_of_one_cache(device):
    tokens, q_heads, kv_heads, dim = 12, 4, 2, 32
    packed = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=device)
    before = packed.clone()
    table = table_of("yarn", dim)
    positions = torch.arange(tokens, device=device) + 5000
    slots = torch.randperm(32, device=device)[:tokens]

    def split(x):
        sizes = [q_heads * dim, kv_heads * dim, kv_heads * dim]
        return [part.unflatten(-1, (-1, dim)) for part in x.split(sizes, dim=-1)]

    q, k, v = split(packed)
    for shape in ((2, 4, 8, kv_heads, dim), (4, 2, 8, kv_heads, dim)):
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        key_cache, value_cache = cache.unbind(0 if shape[0] == 2 else 1)
        packed.copy_(before)
        mrrope.rotary_and_cache_(q, k, v, positions, table, key_cache, value_cache, slots, layout="thd")
        old_q, old_k, old_v = split(before)
        want_q, want_k = mrrope.rotary(old_q, old_k, positions, table, "thd")
        assert torch.equal(q, want_q)
        assert torch.equal(packed[:, q_heads * dim :], before[:, q_heads * dim :])
        assert torch.equal(by_slot(key_cache, "nhd")[slots], want_k)
        assert torch.equal(by_slot(value_cache, "nhd")[slots], old_v)


@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
@pytest.mark.parametrize("empty", [Case(batch=0), Case(tokens=0), Case(heads=(0, 2)), Case(heads=(2, 0))],
                         ids=["batch", "tokens", "q", "k"])  # fmt: skip
def test_empty_tensors(device, kept, empty):
    Call(empty, kept, device).run_and_check()


@pytest.mark.parametrize("paged", [False, True])
def test_blocks_more_than_two_to_the_31_elements_apart(device, paged):
    call = Call(Case(batch=2, tokens=1, head_dim=32), Kept(paged=paged, float8=torch.float8_e4m3fn), device)
    near, far = zip(*(near_and_far_blocks((2, 1, 2, 32), device) for _ in range(2)), strict=True)
    call.slots = torch.tensor([[1], [0]] if paged else [[0], [0]], device=device)
    for key_cache, value_cache in (near, far):
        call.key_cache, call.value_cache = key_cache, value_cache
        mrrope.rotary_and_cache_(**call.arguments() | {"q": call.q.clone()})
    assert all(same_bits(x, y) for x, y in zip(far, near, strict=True))
    assert near[1].float().abs().sum() > 0


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("q_out", [False, True])
@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_opcheck(device, kept, q_out):
    case = Case(dtype=torch.bfloat16, memory="padded", rotary_dim=12)
    call = Call(case, replace(kept, q_out=q_out), device)
    # The other checks compute on copies of the caches, and float8 has no arithmetic.
    tests = {"test_utils": ("test_autograd_registration", "test_faketensor")} if kept.float8 else {}
    opcheck(INTO if q_out else IN_PLACE, call.raw_arguments(), **tests)


def test_schemas_say_what_is_written():
    assert written_arguments(IN_PLACE) == ["q", "key_cache", "value_cache"]
    assert written_arguments(INTO) == ["q_out", "key_cache", "value_cache"]
    assert IN_PLACE._schema.returns == INTO._schema.returns == []


def test_meta_and_fake_tensors():
    call = Call(Case(), Kept(), "cpu")
    before = call.memories()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in call.arguments().items()
        }
        mrrope.rotary_and_cache_(**arguments)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.arguments().items()}
    mrrope.rotary_and_cache_(**meta)
    assert all(torch.equal(x, y) for x, y in zip(call.memories(), before, strict=True))
    call.run_and_check()


@pytest.mark.parametrize("q_out", [False, True])
def test_versions_count_and_autograd_notices(device, q_out):
    call = Call(Case(), Kept(q_out=q_out), device)
    product = torch.ones_like(call.key_cache, requires_grad=True) * call.key_cache
    versions = [x._version for x in call.written()]
    others = [call.k._version, call.v._version, call.slots._version]
    mrrope.rotary_and_cache_(**call.arguments())
    assert [x._version for x in call.written()] == [version + 1 for version in versions]
    assert [call.k._version, call.v._version, call.slots._version] == others
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "key_cache", "value_cache", "q_out"])
def test_gradients_are_refused(device, name):
    call = Call(Case(), Kept(q_out=name == "q_out"), device)
    call.assert_gradient_refused(name)


def test_inference_mode(device):
    call = Call(Case(), Kept(), device)
    with torch.inference_mode():
        call.run_and_check()
        call.key_cache = call.key_cache.clone()
    with pytest.raises(RuntimeError, match="key_cache was made in inference mode"):
        mrrope.rotary_and_cache_(**call.arguments())


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("q_out", [False, True])
def test_compile(device, backend, q_out):
    table = table_of("yarn", 16).to(device)

    def attend(x, positions, slots, key_cache, value_cache):
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32], dim=-1))
        out = torch.empty_like(q) if q_out else None
        q = mrrope.rotary_and_cache_(q, k, v, positions, table, key_cache, value_cache, slots, layout="thd", q_out=out)
        return q.sum(-1) + key_cache.sum()

    assert_compiled_like_eager(attend, 128, backend, device)


@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_graph_capture_with_other_slots(cuda, kept):
    case = Case(dtype=torch.bfloat16, head_dim=64, rotary_dim=64)
    others = (Call(case.with_changes(seed=seed), kept, cuda) for seed in (3, 4))
    Call(case, kept, cuda).assert_graph_replays(others)


def test_runs_on_the_current_stream(cuda):
    Call(Case(), Kept(), cuda).assert_runs_on_the_current_stream()


@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_slots_that_are_not_there_spoil_nothing_on_a_gpu(cuda, kept):
    call = Call(Case(memory="padded"), replace(kept, memory="padded"), cuda)
    limit = call.slots_in_all() if kept.paged else call.slots_in_all() // 2
    wrong = torch.tensor([limit, 2**31 - 1, 2**32 + 1, 2**63 - 1, -(2**63)], device=cuda)
    before = call.copied()
    call.slots[0] = wrong
    mrrope.rotary_and_cache_(**call.arguments())
    torch.cuda.synchronize()
    call.slots[0] = -1
    call.check(before)
