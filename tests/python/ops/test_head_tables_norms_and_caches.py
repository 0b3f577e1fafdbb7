"""Head tables in the ops that norm, write caches or project, against float64."""

from dataclasses import replace

import pytest
import torch
from head_case import EPS, FACTORS, OPS, HeadCase, K, head_cases, norm_weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rotary_cases import DTYPES, LAYOUTS
from rotary_reference import HEAD_AXIS, TOLERANCES
from torch.autograd import gradcheck
from torch.library import opcheck


def normed(x: torch.Tensor, weight: torch.Tensor, over: str, layout: str) -> torch.Tensor:
    dims = [-1] if over == "head" else [HEAD_AXIS[layout], -1]
    if over == "all_heads":
        heads = x.shape[HEAD_AXIS[layout]]
        weight = weight.view(heads, 1, -1) if layout == "bhsd" else weight.view(heads, -1)
    return x * (x.square().mean(dims, keepdim=True) + EPS).rsqrt() * weight


@given(case=head_cases(), over=st.sampled_from(["head", "all_heads"]), in_place=st.booleans())
@example(HeadCase(dtype=torch.bfloat16, head_dim=128, rotary_dim=64, tokens=3, choice="index"), "head", False)
@settings(max_examples=60)
def test_qk_norm_rotary(device, case, over, in_place):
    heads = case.heads_on(device)
    before, weights = [x.clone() for x in heads], norm_weights(case, heads, over)
    positions, table, layout, pairing, _, index = case.rest(device)
    rest = weights, positions, table, EPS, 0.0, over, layout, pairing, False, index
    if in_place:
        OPS.qk_norm_rotary_(heads, *rest)
    result = heads if in_place else OPS.qk_norm_rotary(heads, *rest)
    extra = 16 * torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    for place, (x, weight, y) in enumerate(zip(before, weights, result, strict=True)):
        exact = normed(x.cpu().double(), weight.cpu().double(), over, layout)
        case.assert_near(y, case.rotated(exact, place), extra)


@pytest.mark.parametrize("over", ["head", "all_heads"])
@FACTORS
def test_gradients_of_qk_norm_rotary(device, over, query_factors):
    case = HeadCase(dtype=torch.float64, tokens=2, head_dim=6, rotary_dim=4, query_factors=query_factors)
    heads = case.heads_on(device)
    weights = norm_weights(case, heads, over)
    positions, table, layout, pairing, _, index = case.rest(device)
    inputs = [x.requires_grad_() for x in (*heads, *weights)]

    def call(q, k, q_weight, k_weight):
        return OPS.qk_norm_rotary(
            [q, k], [q_weight, k_weight], positions, table, EPS, 0.0, over, layout, pairing, False, index
        )

    assert gradcheck(call, inputs)
    opcheck(OPS.qk_norm_rotary.default, (heads, weights, positions, table, EPS, 0.0, over, layout, pairing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("over", ["head", "all_heads"])
@FACTORS
def test_gradients_of_qk_norm_rotary_against_float64(device, over, dtype, query_factors):
    """Shapes of the kernels that hold heads in registers."""
    case = HeadCase(dtype=dtype, tokens=7, head_dim=64, rotary_dim=32, per_table=(3, 1), choice="index")
    case = replace(case, query_factors=query_factors)
    heads = case.heads_on(device)
    weights = norm_weights(case, heads, over)
    positions, table, layout, pairing, _, index = case.rest(device)
    gradients = [torch.randn(x.shape, device=device).to(dtype) for x in heads]
    tolerance = TOLERANCES[dtype]
    found = OPS.qk_norm_rotary_backward(
        gradients, heads, weights, positions, table, EPS, 0.0, over, layout, pairing, False, index
    )
    for i, (x, weight, gradient) in enumerate(zip(heads, weights, gradients, strict=True)):
        wide = [y.detach().cpu().double().requires_grad_() for y in (x, weight)]
        normed(*wide, over, layout).backward(case.rotated(gradient, i, conjugate=True))
        for actual, exact in zip((found[i], found[len(heads) + i]), (wide[0].grad, wide[1].grad), strict=True):
            error = (actual.cpu().double() - exact).norm() / exact.norm()
            # One rounding, the rotation, and the sums of the norm.
            assert error < tolerance.rounding + tolerance.arithmetic + 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("choice", ["one", "index"])
@pytest.mark.parametrize("layout", LAYOUTS)
@FACTORS
def test_rotary_and_cache(device, layout, choice, float8, query_factors):
    """Equals the rotation by itself and a scatter: rotary is checked against float64 above."""
    batch = 1 if layout == "thd" else 2
    case = HeadCase(layout=layout, batch=batch, choice=choice, dtype=torch.bfloat16, head_dim=64, rotary_dim=32)
    case = replace(case, query_factors=query_factors)
    q, k = case.heads_on(device)
    v = torch.randn_like(k)
    positions, table, layout, pairing, _, index = case.rest(device)
    axis, total = HEAD_AXIS[layout], case.batch * case.tokens
    cache_dtype = torch.float8_e4m3fn if float8 else case.dtype
    caches = [torch.zeros(total + 3, 4, case.tables, case.head_dim, device=device).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(4 * (total + 3), generator=torch.Generator().manual_seed(5))[:total].to(device)
    # Float8 caches are rounded once, from the float32 result.
    expected_q, wide_k = OPS.rotary([q, k], *case.rest(device))
    if float8:
        wide_k = OPS.rotary([q.float(), k.float()], *case.rest(device))[K]
    OPS.rotary_and_cache_(
        q, k, v, positions, table, *caches, slots if layout == "thd" else slots.view(case.batch, -1), True, layout,
        "nhd", pairing, table_index=index,
    )  # fmt: skip
    assert torch.equal(q, expected_q)
    for cache, x in zip(caches, (wide_k, v.float() if float8 else v), strict=True):
        by_token = x.transpose(1, 2) if axis == -3 else x
        expected = by_token.reshape(total, case.tables, case.head_dim).to(cache_dtype)
        assert torch.equal(cache.flatten(0, 1)[slots].float(), expected.float())


@pytest.mark.parametrize("over", ["head", "all_heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@FACTORS
def test_qk_norm_rotary_and_cache(device, layout, dtype, over, query_factors):
    """Norms and rotation against float64 in q and in the cache, beside the gate."""
    batch = 1 if layout == "thd" else 2
    case = HeadCase(layout=layout, batch=batch, choice="index", dtype=dtype, head_dim=64, rotary_dim=32)
    case = replace(case, query_factors=query_factors)
    heads = case.heads_on(device)
    before, weights = [x.clone() for x in heads], norm_weights(case, heads, over)
    q, k = heads
    v, gate = torch.randn_like(k), torch.randn_like(q)
    expected_gate = gate.double().sigmoid()
    positions, table, layout, pairing, _, index = case.rest(device)
    total = case.batch * case.tokens
    caches = [torch.zeros(total + 3, 4, case.tables, case.head_dim, device=device, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(4 * (total + 3), generator=torch.Generator().manual_seed(5))[:total].to(device)
    OPS.qk_norm_rotary_and_cache_(
        q, k, v, *weights, positions, table, *caches, slots if layout == "thd" else slots.view(case.batch, -1), True,
        EPS, 0.0, over, layout, "nhd", pairing, table_index=index, gate=gate,
    )  # fmt: skip
    expected_q, expected_k = (
        case.rotated(normed(x.cpu().double(), weight.cpu().double(), over, layout), place)
        for place, (x, weight) in enumerate(zip(before, weights, strict=True))
    )
    extra = 16 * torch.finfo(torch.float32).eps
    case.assert_near(q, expected_q, extra)
    stored_k, stored_v = (cache.flatten(0, 1)[slots].unflatten(0, (case.batch, case.tokens)) for cache in caches)
    for stored, expected in ((stored_k, expected_k), (stored_v, v)):
        by_layout = {"bhsd": stored.transpose(1, 2), "bshd": stored, "thd": stored[0]}[layout]
        if expected is v:
            assert torch.equal(by_layout, v)
        else:
            case.assert_near(by_layout, expected, extra)
    torch.testing.assert_close(gate.double(), expected_gate, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [3, 64])
@FACTORS
def test_qkv_rotary_is_unfused(device, num_tokens, query_factors):
    """Head tables take the plain projection, then rotary."""
    case = HeadCase(layout="bshd", tokens=num_tokens, per_table=(2, 1), head_dim=64, rotary_dim=64)
    case = replace(case, query_factors=query_factors)
    positions, table, _, pairing, _, _ = case.rest(device)
    generator = torch.Generator().manual_seed(0)
    outputs = (2 + 1 + 1) * case.tables * case.head_dim
    x = torch.randn(case.batch, num_tokens, 32, generator=generator, dtype=torch.float64).to(device)
    weight = torch.randn(outputs, 32, generator=generator, dtype=torch.float64).to(device)
    projected = OPS.qkv_rotary(x, weight, None, positions, table, 2 * case.tables, case.tables, pairing)
    plain = (x @ weight.T).unflatten(-1, (-1, case.head_dim))
    parts = plain.split([2 * case.tables, case.tables, case.tables], dim=2)
    rotated = [case.rotated(part, place) for place, part in enumerate(parts[:2])]
    expected = torch.cat([*rotated, parts[2].cpu()], dim=2).flatten(2)
    torch.testing.assert_close(projected.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rescale_cache(device, layers, tables, dtype):
    """Keys rotated by old head tables and re-rotated equal keys rotated by the new ones."""
    case = HeadCase(dtype=torch.float64, batch=3, tables=tables, per_table=(3, None), choice="sequence")
    case = replace(case, head_dim=16)
    stacks = [replace(case, seed=case.seed + 10 * layer).packed() for layer in range(layers)]
    packed = torch.cat(stacks, dim=1)  # [3, layers, heads, words]
    old, new = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 1, 0], dtype=torch.int32)
    positions = case.positions()

    def rotated(x, layer, index):
        table = packed[:, layer % layers, None].contiguous()
        return OPS.rotary([x], positions, table, "bhsd", "halves", False, index)[0]

    plain = [replace(case, seed=layer).heads_on("cpu")[0] for layer in range(3)]
    keys = [rotated(x, i, old).to(dtype).to(device) for i, x in enumerate(plain)]
    # A layer of another layout of memory is another launch, and keeps its tables.
    keys[1] = keys[1].transpose(1, 2).contiguous().transpose(1, 2)
    before = [x.clone() for x in keys]
    OPS.rescale_cache_(keys, positions.to(device), packed.to(device), old.to(device), new.to(device))
    tolerance = TOLERANCES[dtype]
    for i, x in enumerate(plain):
        assert torch.equal(keys[i][1], before[i][1]), "a sequence whose table does not change is not touched"
        expected = rotated(x, i, new)
        # Rounded when cached and when re-rotated; relative to the pairs' norms, at most 3 times the factors' ratio.
        error = (keys[i].cpu().double() - expected).abs().max()
        assert error <= (2 * tolerance.rounding + 4 * tolerance.arithmetic) * 3 * expected.abs().max() * 2**0.5


def test_opcheck_of_rescale_cache(device):
    case = HeadCase(choice="sequence", per_table=(1, None), head_dim=16)
    index = torch.tensor([0, 1], dtype=torch.int32, device=device)
    keys = [x.contiguous() for x in case.heads_on(device)]
    opcheck(OPS.rescale_cache_.default, (keys, case.positions().to(device), case.packed().to(device), index, index))
