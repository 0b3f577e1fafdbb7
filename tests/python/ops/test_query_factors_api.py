"""Query factors in the ops of the Python API, against each head's table in float64 times its factor."""

import pytest
import torch
from layer_tables import head_by_head, random_heads, random_table
from op_errors import assert_refused
from query_factor_tables import EACH_KIND, FACTORS, KINDS, MIXED, for_all, of_three
from rotary_cases import LAYOUTS, PAIRINGS
from rotary_reference import HEAD_AXIS, TOLERANCES, rotated

import mrrope
from mrrope import HeadTables, TableSet
from mrrope.ops import decompositions
from mrrope.tables.frequency_table import packed_stack

# --- numbers ---


def qk(layout: str, device: str, dtype=torch.float64, q_heads: int = 6, k_heads: int = 3):
    generator = torch.Generator().manual_seed(3)
    shapes = {"bhsd": (2, 0, 5, 20), "bshd": (2, 5, 0, 20), "thd": (5, 0, 20)}
    of_q, of_k = ([size or heads for size in shapes[layout]] for heads in (q_heads, k_heads))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in (of_q, of_k)]


def positions_on(device: str) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (5,), generator=torch.Generator().manual_seed(9)).to(device)


def expected(x, positions, tables, factors, layout="bhsd", pairing="halves"):
    """Return the rotation by each head's table in float64, times its factor but for the tail."""
    whole = torch.empty(x.shape, dtype=torch.float64)
    per_head = tables if len(tables) > 1 else tables[0]
    for index, table in head_by_head(x, per_head, layout):
        whole[index] = rotated(x[index], positions, table, layout, pairing).cpu()
    shape = [1] * x.dim()
    shape[HEAD_AXIS[layout]] = -1
    if factors is not None:
        whole[..., : tables.rotary_dim] *= torch.tensor(factors, dtype=torch.float64).view(shape)
    return whole


def assert_near(actual, exact):
    # Factors are at most 1.5 each.
    bound = 8 * (TOLERANCES[actual.dtype].arithmetic + TOLERANCES[actual.dtype].rounding) * exact.abs().max()
    assert (actual.detach().cpu().double() - exact).abs().max() <= bound


@EACH_KIND
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotary(device, layout, pairing, heads, dtype):
    q, k = qk(layout, device, dtype)
    positions = positions_on(device)
    found = mrrope.rotary(q, k, positions, heads, layout, pairing)
    in_place = mrrope.rotary_(q.clone(), k.clone(), positions, heads, layout, pairing)
    for actual, again, x, factors in zip(found, in_place, (q, k), (FACTORS, None), strict=True):
        assert torch.equal(actual, again)
        assert torch.equal(actual[..., 16:], x[..., 16:])
        assert_near(actual, expected(x, positions, heads, factors, layout, pairing))
    alone, _ = mrrope.rotary(q, None, positions, heads, layout, pairing)
    assert torch.equal(alone, found[0])
    keys, _ = mrrope.rotary(k, None, positions, heads.without_query_factors(), layout, pairing)
    assert torch.equal(keys, found[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_with_an_index(device, layout):
    q, k = qk(layout, device)
    positions = positions_on(device)
    numbers = [2, 0] if layout != "thd" else [3, 1, 2, 0, 3]
    index = torch.tensor(numbers, dtype=torch.int32, device=device)
    found = mrrope.rotary(q, k, positions, MIXED, layout, table_index=index)
    for i, number in enumerate(numbers):
        of_token = positions[i : i + 1] if layout == "thd" else positions
        table = MIXED[number] if isinstance(MIXED[number], HeadTables) else HeadTables([MIXED[number]])
        for actual, x, factors in zip(found, (q, k), (table.query_factors, None), strict=True):
            assert_near(actual[i : i + 1], expected(x[i : i + 1], of_token, table, factors, layout))


@EACH_KIND
def test_gradients(device, heads):
    q, k = (x.requires_grad_() for x in qk("bhsd", device))
    positions = positions_on(device)
    upstream = [torch.randn_like(x) for x in (q, k)]
    gradients = torch.autograd.grad(mrrope.rotary(q, k, positions, heads), (q, k), upstream)
    factors = HeadTables(heads, [1.0] * 6)
    for gradient, x, of_heads in zip(gradients, upstream, (FACTORS, None), strict=True):
        assert_near(gradient, expected(x, -positions, factors, of_heads))


def test_rotating_there_and_back(device):
    q, k = qk("bhsd", device)
    positions, heads = positions_on(device), of_three()
    back = mrrope.rotary(*mrrope.rotary(q, k, positions, heads), positions, heads.inverse())
    for actual, x in zip(back, (q, k), strict=True):
        torch.testing.assert_close(actual, x, rtol=0.0, atol=1e-13)


def test_rescale_cache_ignores_factors(device):
    _, k = qk("bhsd", device)
    positions = positions_on(device)
    old, new = of_three(), of_three(FACTORS[::-1], seed=1)
    cached, _ = mrrope.rotary(k, None, positions, old.without_query_factors())
    by_factors, plain, by_sets = cached.clone(), cached.clone(), cached.clone()
    mrrope.rescale_cache_(by_factors, positions, old, new)
    mrrope.rescale_cache_(plain, positions, old.without_query_factors(), new.without_query_factors())
    mrrope.rescale_cache_([by_sets], positions, TableSet([old]), TableSet([new]))
    assert torch.equal(by_factors, plain)
    assert torch.equal(by_sets, plain)
    assert_near(plain, expected(k, positions, new, None))
    unchanged = cached.clone()
    mrrope.rescale_cache_(unchanged, positions, [old, for_all()], [of_three(FACTORS[::-1]), for_all([1.0])])
    assert torch.equal(unchanged, cached), "keys that differ in query factors alone"
    mixed = cached.clone()
    mrrope.rescale_cache_(mixed, positions, [old, new], [for_all(seed=4), old])
    one = for_all(seed=4)
    assert_near(mixed[:1], expected(k[:1], positions, one, None))


OTHER_HEADS = "q must have 6 heads, one for each of table's query_factors, got 3"


def calls_of(q, k, table):
    """Every op of the Python API that takes query factors."""
    positions, weight = positions_on("cpu"), torch.ones(20, dtype=q.dtype)
    cache = lambda: torch.zeros(2, k.shape[1], 5, 20, dtype=q.dtype)  # noqa: E731
    x, qkv = torch.ones(2, 5, 24, dtype=q.dtype), torch.ones((q.shape[1] + 2 * k.shape[1]) * 20, 24, dtype=q.dtype)
    return {
        "rotary": lambda: mrrope.rotary(q, k, positions, table),
        "rotary_": lambda: mrrope.rotary_(q, k, positions, table),
        "qk_norm_rotary": lambda: mrrope.qk_norm_rotary(q, k, weight, weight, positions, table, eps=1e-6),
        "qk_norm_rotary_": lambda: mrrope.qk_norm_rotary_(q, k, weight, weight, positions, table, eps=1e-6),
        "rotary_and_cache_": lambda: mrrope.rotary_and_cache_(
            q, k, k.clone(), positions.abs() % 5, table, cache(), cache()
        ),
        "qk_norm_rotary_and_cache_": lambda: mrrope.qk_norm_rotary_and_cache_(
            q, k, k.clone(), weight, weight, positions.abs() % 5, table, cache(), cache(), eps=1e-6
        ),
        "qkv_rotary": lambda: mrrope.qkv_rotary(x, qkv, None, positions, table, q.shape[1], k.shape[1]),
    }


@pytest.mark.parametrize("table", [of_three(), for_all(), MIXED[2:], [for_all(), random_heads(3)]])
@pytest.mark.parametrize("name", calls_of(*qk("bhsd", "cpu"), None))
def test_other_numbers_of_query_heads_are_refused(name, table):
    q, k = qk("bhsd", "cpu", q_heads=3)
    before = q.clone()
    assert_refused(calls_of(q, k, table)[name], ValueError, OTHER_HEADS)
    assert torch.equal(q, before)


@EACH_KIND
@pytest.mark.parametrize("name", calls_of(*qk("bhsd", "cpu"), None))
def test_every_op_takes_factors(name, heads):
    """Against rotary with q's heads multiplied: the ops' own tests compare with float64."""
    q, k = qk("bhsd", "cpu")
    plain_q, plain_k = q.clone(), k.clone()
    found = calls_of(q, k, heads)[name]()
    plain = calls_of(plain_q, plain_k, heads.without_query_factors())[name]()
    with_factors, without = (x[0] if isinstance(x, tuple) else x for x in (found, plain))
    by = torch.tensor(FACTORS, dtype=torch.float64).view(6, 1, 1)
    torch.testing.assert_close(with_factors[..., :16], without[..., :16] * by, rtol=1e-14, atol=0.0)
    assert torch.equal(with_factors[..., 16:], without[..., 16:])
    if isinstance(found, tuple):
        assert torch.equal(found[1], plain[1]), "keys"


def test_keys_alone_are_refused():
    _, k = qk("bhsd", "cpu")
    assert_refused(lambda: mrrope.rotary(k, None, positions_on("cpu"), of_three()), ValueError, OTHER_HEADS)


def test_several_positions_a_token_are_refused():
    q, k = qk("bhsd", "cpu")
    text = "positions must be one a token with table's query_factors, [batch, tokens] or [tokens], got [3, 2, 5]"
    positions = torch.zeros(3, 2, 5, dtype=torch.int64)
    assert_refused(lambda: mrrope.rotary(q, k, positions, of_three()), ValueError, text)
    x, weight = torch.ones(2, 5, 24), torch.ones(12 * 20, 24)
    assert_refused(lambda: mrrope.qkv_rotary(x, weight, None, positions, of_three(), 6, 3), ValueError, text)


@pytest.mark.parametrize("table", [for_all([1.5, 1.0]), [random_table(0), for_all([1.5, 1.0])]])
def test_latent_attention_refuses_factors(table):
    """Its heads share one key; tables of its ops are for all heads."""
    q, nope, rope = torch.ones(1, 2, 3, 20), torch.ones(1, 2, 3, 4), torch.ones(1, 3, 16)
    text = "table must be one for all heads, without query_factors, got"
    assert_refused(lambda: mrrope.mla_rotary(q, nope, rope, torch.arange(3), table), ValueError, text)
    cache = torch.zeros(1, 4, 24)
    assert_refused(
        lambda: mrrope.mla_rotary_and_cache_(
            torch.ones(3, 2, 16), torch.ones(3, 8), torch.ones(3, 16), torch.arange(3), table, cache, torch.arange(3)
        ),
        ValueError,
        text,
    )


# --- torch.compile ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("form", ["a table per head", "a table for all", "a list"])
def test_compile(device, backend, form):
    table = [of_three(), random_table(4)] if form == "a list" else KINDS[form]
    q, k = (x.float().requires_grad_() for x in qk("bhsd", device))
    positions = positions_on(device)[None].expand(2, -1)
    torch._dynamo.reset()  # one function is compiled again for every table and backend
    expected_heads = mrrope.rotary(q, k, positions, table)
    found = torch.compile(mrrope.rotary, fullgraph=True, backend=backend)(q, k, positions, table)
    for ours, theirs in zip(found, expected_heads, strict=True):
        assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad([x.square().sum() for x in heads], (q, k)) for heads in (found, expected_heads)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_of_rescale_cache(device, backend):
    _, k = qk("bhsd", device)
    positions, old, new = positions_on(device), of_three(), of_three(seed=1)
    by_op, compiled = k.clone(), k.clone()
    mrrope.rescale_cache_(by_op, positions, old, [new, old])
    torch.compile(mrrope.rescale_cache_, fullgraph=True, backend=backend)(compiled, positions, old, [new, old])
    assert torch.equal(compiled, by_op)
    assert not torch.equal(compiled, k)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("table", [of_three(), for_all(), [of_three(), random_table(4)]])
def test_the_decomposition_is_the_op(device, layout, table):
    heads = [x.float() for x in qk(layout, device)]
    positions = positions_on(device)[None].expand(2, -1)
    packed = packed_stack(table, heads[0].device) if isinstance(table, list) else table.packed(heads[0].device)
    for conjugate in (False, True):
        arguments = heads, positions, packed, layout, "halves", conjugate
        for x, y in zip(decompositions.rotary(*arguments), torch.ops.mrrope.rotary(*arguments), strict=True):
            torch.testing.assert_close(x, y, rtol=0.0, atol=4e-6)
