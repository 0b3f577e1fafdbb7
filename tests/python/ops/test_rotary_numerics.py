"""Accuracy of rotary: within the rounding of the dtype for all shapes, strides and positions."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from large_memory import addresses_past_31_bits, skip_unless_free
from markers import needs_cuda
from rotary_cases import (
    DTYPES,
    EMPTY_DIMENSIONS,
    OWN_MEMORY,
    PAIRINGS,
    Case,
    cases,
    empty_case,
    onto,
    storage_of,
    table_of,
    whole_memory,
)
from rotary_reference import TOLERANCES, assert_rotated, rotated
from tensor_bits import bits_of

import mrrope

WIDE = [torch.float64, torch.float32]


def assert_same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(bits_of(actual), bits_of(expected))


def pair_norms(x: torch.Tensor) -> torch.Tensor:
    first, second = x.double().chunk(2, dim=-1)
    return torch.hypot(first, second)


@given(case=cases(memories=[*OWN_MEMORY, "expanded"]))
@example(case=Case(tokens=65, head_dim=128, rotary_dim=128, dtype=torch.bfloat16))
@example(case=Case(tokens=65, head_dim=512, rotary_dim=510, dtype=torch.float16, pairing="interleaved"))
@settings(max_examples=500)
def test_matches_the_reference(device, case):
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    before = [whole_memory(x).clone() for x in (q, k, positions) if x is not None]
    result_q, result_k = mrrope.rotary(q, k, positions, table, case.layout, case.pairing)
    for x, result in ((q, result_q), (k, result_k)):
        if x is None:
            assert result is None
        else:
            assert_rotated(result, x, positions, table, case.layout, case.pairing)
    after = [whole_memory(x) for x in (q, k, positions) if x is not None]
    for old, new in zip(before, after, strict=True):
        assert_same_bits(new, old)


@given(case=cases())
def test_in_place_equals_out_of_place_and_touches_nothing_else(device, case):
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    expected = mrrope.rotary(q, k, positions, table, case.layout, case.pairing)
    around = {}
    for x in filter(lambda x: x is not None, (q, k)):
        inside = torch.zeros(whole_memory(x).shape, dtype=torch.bool, device=device)
        inside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
        around[x] = (~inside, whole_memory(x)[~inside])
    result = mrrope.rotary_(q, k, positions, table, case.layout, case.pairing)
    assert result[0] is q
    assert result[1] is k
    for actual, wanted in zip(result, expected, strict=True):
        assert_same_bits(actual, wanted)
    for x, (outside, values) in around.items():
        assert_same_bits(whole_memory(x)[outside], values)


@given(case=cases(memories=["transposed", "padded", "sliced", "unaligned", "expanded"]))
def test_strided_equals_contiguous(device, case):
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    strided = mrrope.rotary(q, k, positions, table, case.layout, case.pairing)
    dense_k = None if k is None else k.contiguous()
    dense = mrrope.rotary(q.contiguous(), dense_k, positions.contiguous(), table, case.layout, case.pairing)
    for actual, expected in zip(strided, dense, strict=True):
        assert_same_bits(actual, expected)


@given(case=cases())
def test_layouts_are_views_of_each_other(device, case):
    case = case.with_changes(layout="bhsd")
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    expected = mrrope.rotary(q, k, positions, table, "bhsd", case.pairing)
    result = mrrope.rotary(
        q.transpose(1, 2), None if k is None else k.transpose(1, 2), positions, table, "bshd", case.pairing
    )
    for actual, wanted in zip(result, expected, strict=True):
        assert_same_bits(None if actual is None else actual.transpose(1, 2), wanted)


@given(case=cases(), token_stride=st.sampled_from([0, 2, 3]))
def test_positions_may_have_any_strides(device, case, token_stride):
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    if token_stride == 0:
        positions = positions[..., :1].expand(positions.shape)
    else:
        wide = positions.repeat_interleave(token_stride, dim=-1)
        wide[..., 1::token_stride] = 13
        positions = wide[..., ::token_stride]
    strided = mrrope.rotary(q, k, positions, table, case.layout, case.pairing)
    dense = mrrope.rotary(q, k, positions.contiguous(), table, case.layout, case.pairing)
    for actual, expected in zip(strided, dense, strict=True):
        assert_same_bits(actual, expected)


@given(case=cases(dtypes=WIDE))
def test_norms_grow_by_the_attention_factor_only(device, case):
    case = case.with_changes(pairing="halves", head_dim=case.rotary_dim)
    (q, _), positions, table = case.heads_on(device), case.positions(device), case.table()
    result, _ = mrrope.rotary(q, None, positions, table, case.layout)
    error = pair_norms(result) / table.attention_factor - pair_norms(q)
    assert (error.abs() <= TOLERANCES[case.dtype].arithmetic * pair_norms(q)).all()


@given(case=cases(dtypes=WIDE))
def test_rotations_add_up(device, case):
    case = case.with_changes(method="rope", pairing="halves", head_dim=case.rotary_dim)
    # Below 2^62, so that their sum is a valid position.
    case = case.with_changes(reach=min(case.reach, 2**62), position_dtype=torch.int64)
    (q, _), table = case.heads_on(device), case.table()
    a, b = case.positions(device, seed=1), case.positions(device, seed=2)
    once, _ = mrrope.rotary(q, None, a + b, table, case.layout)
    twice, _ = mrrope.rotary(mrrope.rotary(q, None, a, table, case.layout)[0], None, b, table, case.layout)
    error = pair_norms(once.double() - twice.double())
    # Three rotations, each with its error.
    assert (error <= 3 * TOLERANCES[case.dtype].arithmetic * pair_norms(q)).all()


@given(case=cases(dtypes=WIDE), shift=st.integers(-(2**31), 2**31))
def test_scores_depend_on_the_difference_of_positions_only(device, case, shift):
    case = case.with_changes(heads=(2, 2), layout="bhsd", position_dtype=torch.int64, reach=min(case.reach, 2**62))
    (q, k), table = case.heads_on(device), case.table()
    a, b = case.positions(device, seed=1), case.positions(device, seed=2)

    def scores(shift: int) -> torch.Tensor:
        result_q, _ = mrrope.rotary(q, None, a + shift, table, "bhsd", case.pairing)
        result_k, _ = mrrope.rotary(k, None, b + shift, table, "bhsd", case.pairing)
        return (result_q.double() * result_k.double()).sum(-1)

    # Four rotations, each with its error.
    size = (q.double().norm(dim=-1) * k.double().norm(dim=-1)) * table.attention_factor**2
    assert ((scores(shift) - scores(0)).abs() <= 4 * TOLERANCES[case.dtype].arithmetic * size).all()


@given(case=cases(dtypes=WIDE))
def test_inverse_undoes(device, case):
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    result = mrrope.rotary(q, k, positions, table, case.layout, case.pairing)
    back = mrrope.rotary(*result, positions, table.inverse(), case.layout, case.pairing)
    allowed = 2 * TOLERANCES[case.dtype].arithmetic
    for x, returned in zip((q, k), back, strict=True):
        if x is not None:
            # Relative to the head's norm, which bounds the pairs of either pairing.
            error = (returned.double() - x.double()).abs() / x.double().norm(dim=-1, keepdim=True)
            assert error.max() <= allowed


@given(case=cases())
def test_conjugate_rotates_back_with_the_same_attention_factor(device, case):
    (q, _), positions, table = case.heads_on(device), case.positions(device), case.table()
    packed = table.packed(q.device)
    (result,) = torch.ops.mrrope.rotary([q], positions, packed, case.layout, case.pairing, conjugate=True)
    assert_rotated(result, q, positions, table, case.layout, case.pairing, conjugate=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_frobenius_error_is_one_rounding_at_every_distance(device, dtype, pairing):
    case = Case(dtype=dtype, pairing=pairing, batch=1, tokens=256, heads=(8, 2), head_dim=128, rotary_dim=128)
    for reach in (2**12, 2**20, 2**31 - 1, 2**63 - 1):
        at = case.with_changes(reach=reach)
        (q, k), positions, table = at.heads_on(device), at.positions(device), at.table()
        for x, result in zip((q, k), mrrope.rotary(q, k, positions, table, "bhsd", pairing), strict=True):
            assert_rotated(result, x, positions, table, "bhsd", pairing)
            expected = rotated(x, positions, table, "bhsd", pairing)
            error = (result.cpu().double() - expected).norm() / expected.norm()
            assert error <= TOLERANCES[dtype].frobenius


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_positions(device, dtype):
    table = table_of("mrrope_uni", 64)
    for kind in (torch.int32, torch.int64):
        limits = torch.iinfo(kind)
        positions = torch.tensor([limits.min, limits.min + 1, -1, 0, 1, limits.max], dtype=kind, device=device)
        q = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
        assert_rotated(mrrope.rotary(q, None, positions, table, "thd")[0], q, positions, table, "thd")


@pytest.mark.parametrize("dtype", DTYPES)
def test_position_zero_is_exact(device, dtype):
    q = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    result, _ = mrrope.rotary(q, None, torch.zeros(3, dtype=torch.int64, device=device), table_of("rope", 64))
    assert_same_bits(result, q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_components_stay_in_their_pair(device, dtype):
    q = torch.ones(1, 1, 64, dtype=dtype, device=device)
    q[0, 0, 3], q[0, 0, 9] = float("nan"), float("inf")
    result, _ = mrrope.rotary(q, None, torch.ones(1, dtype=torch.int64, device=device), table_of("rope", 64), "thd")
    assert result[0, 0, [3, 35]].isnan().all()
    assert not result[0, 0, [9, 41]].isfinite().any()
    others = [i for i in range(64) if i % 32 not in (3, 9)]
    assert result[0, 0, others].isfinite().all()


def test_overflow_and_underflow_round_like_torch(device):
    table, position = table_of("rope", 2), torch.tensor([1], device=device)
    for dtype in (torch.float16, torch.bfloat16):
        finfo = torch.finfo(dtype)
        for x in ([finfo.max, -finfo.max], [finfo.smallest_normal, finfo.smallest_normal / 2], [0.0, 0.0]):
            q = torch.tensor([[x]], dtype=dtype, device=device)
            result, _ = mrrope.rotary(q, None, position, table, "thd")
            exact, _ = mrrope.rotary(q.float(), None, position, table, "thd")
            assert_same_bits(result, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_round_to_even(device, dtype):
    # At position 0 this factor puts many products exactly halfway between two representable numbers.
    gain = 1 + torch.finfo(dtype).eps / 2
    table = mrrope.frequency_table("rope", rotary_dim=64, base=1e4, original_max_position=8, attention_factor=gain)
    q = torch.randn(64, 8, 64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    result, _ = mrrope.rotary(q, None, torch.zeros(64, dtype=torch.int64, device=device), table, "thd")
    assert_same_bits(result, (q.float() * gain).to(dtype))


@pytest.mark.parametrize("heads_first", [True, False])
def test_input_that_overlaps_itself(device, heads_first):
    flat = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(device)
    q = flat.unfold(0, 8, 1)[:4].unsqueeze(1 if heads_first else 0)
    layout, positions = ("thd" if heads_first else "bhsd"), torch.arange(4, device=device)
    q = q if heads_first else q.unsqueeze(0)
    result, _ = mrrope.rotary(q, None, positions, table_of("rope", 8), layout)
    assert_rotated(result, q, positions, table_of("rope", 8), layout)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("layout", "empty"), EMPTY_DIMENSIONS)
def test_empty_tensors(device, layout, empty, in_place):
    case = empty_case(layout, empty)
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    before = q.clone(), k.clone()
    op = mrrope.rotary_ if in_place else mrrope.rotary
    for x, result in zip(before, op(q, k, positions, table, layout), strict=True):
        assert_rotated(result, x, positions, table, layout)


def test_threads_do_not_change_the_result():
    case = Case(batch=3, tokens=301, heads=(8, 2), head_dim=128, rotary_dim=96)
    (q, k), positions, table = case.heads_on("cpu"), case.positions("cpu"), case.table()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(mrrope.rotary(q, k, positions, table))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_offsets_past_31_bits_on_the_cpu(layout):
    memory = addresses_past_31_bits()
    case = Case(layout=layout, dtype=torch.bfloat16, heads=(4, None))
    strides = case.heads_on("cpu")[0].stride()
    far = memory.as_strided(case.shape(4), (2**31, *strides[1:]))
    far.copy_(case.heads_on("cpu")[0])
    x, positions, table = far.clone(), case.positions("cpu"), case.table()
    result, _ = mrrope.rotary(far, None, positions, table, layout)
    assert_rotated(result, x, positions, table, layout)
    mrrope.rotary_(far, None, positions, table, layout)
    assert_same_bits(far, result)


@needs_cuda
@pytest.mark.parametrize("layout", ["thd", "bhsd"])
def test_more_than_2_to_the_31_elements(layout):
    skip_unless_free(10)
    heads, tokens, dim = 4, 2**22 + 3, 128
    shape = (tokens, heads, dim) if layout == "thd" else (1, heads, tokens, dim)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    assert q.numel() > 2**31
    positions, table = torch.arange(tokens, device="cuda"), table_of("mrrope_pro", dim)
    result, _ = mrrope.rotary(q, None, positions, table, layout)
    axis = 0 if layout == "thd" else 2
    for start in (0, tokens // 2, tokens - 64):
        part = [x.narrow(axis, start, 64) for x in (result, q)]
        assert_rotated(*part, positions[start : start + 64], table, layout)


@needs_cuda
def test_more_threads_than_one_launch_takes():
    skip_unless_free(24)
    # Pairs this small take one thread each, and the launch is split before the last of them.
    tokens = 2**31 + 5
    q = torch.ones(tokens, 1, 2, dtype=torch.bfloat16, device="cuda")
    positions, table = torch.zeros(tokens, dtype=torch.int32, device="cuda"), table_of("rope", 2)
    windows = [slice(0, 64), slice(2**31 - 600, 2**31)]
    for window in (*windows, slice(tokens - 64, tokens)):
        positions[window] = torch.arange(window.stop - window.start, device="cuda", dtype=torch.int32) + 1
    mrrope.rotary_(q, None, positions, table, "thd")
    for window in (*windows, slice(tokens - 64, tokens)):
        ones = torch.ones_like(q[window])
        assert_rotated(q[window], ones, positions[window], table, "thd")


def test_poisoned_memory_is_really_around_the_views():
    for memory in ("padded", "sliced", "unaligned"):
        view = onto("cpu", storage_of((2, 3, 4, 8), memory, torch.float32))
        assert whole_memory(view).numel() > view.numel()
