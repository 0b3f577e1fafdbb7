"""learnable_rotary with factors of query heads: results and gradients against float64, torch.compile, fake tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learnable_rotary_cases import assert_close_to_rotation, leaves_of, options_of, table_of, with_tables
from learnable_rotary_reference import of_every_head, rotated
from rotary_cases import DTYPES, LAYOUTS, PAIRINGS, Case, cases, empty_case
from tensor_bits import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

import mrrope


def query_factors_of(case: Case, dtype=torch.float64, device: str = "cpu") -> torch.Tensor:
    """Return a random factor for every query head."""
    generator = torch.Generator().manual_seed(case.seed + 11)
    factors = 0.5 + torch.rand(case.heads[0], generator=generator, dtype=torch.float64)
    return factors.to(device, dtype).requires_grad_()


def table_of_query_heads(frequencies, factor, query_factors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row and an attention factor for every query head, the product rounded as the op's."""
    tables, heads = max(len(frequencies), len(factor)), len(query_factors)
    rows = of_every_head(frequencies, tables, heads)
    return rows, (of_every_head(factor, tables, heads) * query_factors).to(factor.dtype)


@given(case=cases(), tables=st.integers(1, 3), table_dtype=st.sampled_from([torch.float32, torch.float64]))
def test_query_factors_against_float64(device, case, tables, table_dtype):
    case = with_tables(case, tables)
    heads, positions, table = case.heads_on(device), case.positions(device), table_of(case, tables, table_dtype)
    factors = query_factors_of(case, table_dtype).detach()
    on_device = [x.to(device) for x in (*table, factors)]
    found = mrrope.learnable_rotary(*heads, positions, *on_device[:2], **options_of(case), query_factors=on_device[2])
    tables_of_heads = table_of_query_heads(*table, factors), table
    for actual, x, of_heads in zip(found, heads, tables_of_heads, strict=True):
        if x is not None:
            expected = rotated(x.cpu(), positions.cpu(), *of_heads, **options_of(case))
            assert_close_to_rotation(actual, expected, case.rotary_dim // 2, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_factors_rotate_as_rotary_does(device, dtype):
    case = Case(dtype=dtype, tokens=65, head_dim=80, rotary_dim=64, reach=2**17)
    q, k = case.heads_on(device)
    table, factors = case.table(), query_factors_of(case).detach()
    positions, factor = case.positions(device), torch.tensor([table.attention_factor], dtype=torch.float64)
    learned = [x.to(device) for x in (table.inv_freq[None], factor, factors)]
    found = mrrope.learnable_rotary(q, k, positions, *learned[:2], query_factors=learned[2])
    expected = mrrope.rotary(q, k, positions, mrrope.HeadTables([table], query_factors=factors.tolist()))
    for actual, wanted in zip(found, expected, strict=True):
        error = (actual.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error <= max(2.0 * torch.finfo(dtype).eps, 2.0**-35)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tables", "factors"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_gradcheck_of_query_factors(device, layout, pairing, tables, factors):
    case = Case(dtype=torch.float64, batch=1, tokens=3, heads=(4, 2), head_dim=6, rotary_dim=4, layout=layout, reach=9)
    table = [x.to(device) for x in table_of(case, tables, factors=factors)]
    leaves = [x.requires_grad_() for x in (*case.heads_on(device), *table)]

    def op(q, k, *table):
        options = {"layout": layout, "pairing": pairing, "query_factors": table[2]}
        return mrrope.learnable_rotary(q, k, case.positions(device), *table[:2], **options)

    assert gradcheck(op, [*leaves, query_factors_of(case, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_k", [False, True])
def test_query_factors_multiply_what_is_rotated(device, layout, has_k):
    """Values and all gradients against a product after the op; the tail past rotary_dim is not multiplied."""
    heads = (6, 3 if has_k else None)
    case = Case(dtype=torch.float64, heads=heads, head_dim=16, rotary_dim=12, layout=layout, reach=2**17)
    given = [x.requires_grad_() for x in case.heads_on(device) if x is not None]
    leaves = [
        *given,
        *(x.to(device).requires_grad_() for x in table_of(case, 3)),
        query_factors_of(case, device=device),
    ]
    q, k = (*given, None)[:2]
    factors = leaves[-1]
    rest = (q, k, case.positions(device), *leaves[-3:-1], layout)
    found = mrrope.learnable_rotary(*rest, query_factors=factors)
    plain, plain_k = mrrope.learnable_rotary(*rest)
    gain = torch.cat([factors[:, None].expand(-1, 12), torch.ones_like(factors)[:, None].expand(-1, 4)], dim=-1)
    expected = plain * (gain[:, None] if layout == "bhsd" else gain), plain_k
    results = []
    for outputs in (found, expected):
        outputs = [x for x in outputs if x is not None]
        results.append((*outputs, *torch.autograd.grad([x.sin().sum() for x in outputs], leaves)))
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12 * float(wanted.detach().abs().max()))
    assert torch.equal(found[0][..., 12:], q[..., 12:])


def test_query_factors_alone_have_a_gradient(device):
    case = Case(dtype=torch.float64)
    q, k = case.heads_on(device)
    table, factors = [x.to(device) for x in table_of(case, 2)], query_factors_of(case, device=device)
    rotated_q, rotated_k = mrrope.learnable_rotary(q, k, case.positions(device), *table, query_factors=factors)
    assert not rotated_k.requires_grad
    (gradient,) = torch.autograd.grad(rotated_q.square().sum(), factors)
    # The squares are those of the factors.
    expected = 2 * rotated_q.detach().square().sum((0, 2, 3)) / factors.detach()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0.0)


def test_query_factors_keep_no_other_copy_of_q(device):
    case = Case(heads=(4, 2))
    q, k, frequencies, factor = leaves_of(case, 2, device, torch.float32)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        factors = query_factors_of(case, torch.float32, device)
        mrrope.learnable_rotary(q, k, case.positions(device), frequencies, factor, query_factors=factors)
    assert [shapes.count(x.shape) for x in (q, k)] == [1, 1]


def test_gradients_of_query_factors_are_the_same_bits_every_time(device):
    case = Case(dtype=torch.bfloat16, tokens=1000, heads=(6, 3), head_dim=64, rotary_dim=64, reach=2**17)
    leaves = [*leaves_of(case, 3, device, torch.float32), query_factors_of(case, torch.float32, device)]
    gradients = [x.detach() for x in case.with_changes(seed=3).heads_on(device)]
    runs = []
    for _ in range(3):
        found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:4], query_factors=leaves[4])
        runs.append(torch.autograd.grad(found, leaves, gradients))
    for again in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("empty", ["batch", "tokens"])
def test_query_factors_of_nothing_to_rotate(device, empty):
    case = empty_case("bhsd", empty)
    leaves = [*leaves_of(case, 1, device), query_factors_of(case, device=device)]
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:4], query_factors=leaves[4])
    gradients = torch.autograd.grad([x.sum() for x in found], leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert not gradients[-1].any()


def test_query_factors_may_have_another_dtype_than_frequencies(device):
    case = Case(dtype=torch.float32)
    leaves = leaves_of(case, 2, device, torch.float32)
    factors = query_factors_of(case, torch.float64, device)
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:], query_factors=factors)
    gradient = torch.autograd.grad(found[0].square().sum(), factors)[0]
    assert (gradient.dtype, gradient.shape) == (torch.float64, factors.shape)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_query_factors_compiled(device, dynamo, layout, dynamic):
    def scores(q, k, positions, exponents, factor, query_factors):
        table = exponents.exp(), factor
        q, k = mrrope.learnable_rotary(2.0 * q, k, positions, *table, layout, query_factors=query_factors.exp())
        return q.square().sum(-1).cos().sum() + k.sin().sum()

    compiled = torch.compile(scores, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 9):
        case = Case(tokens=tokens, dtype=torch.float64, reach=2**17, layout=layout, rotary_dim=12)
        q, k, frequencies, factor = leaves_of(case, 2, device)
        results = []
        for function in (scores, compiled):
            logarithms = (frequencies.log(), factor, query_factors_of(case, device=device).log())
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, *logarithms)]
            out = function(*leaves[:2], case.positions(device), *leaves[2:])
            results.append((out, *torch.autograd.grad(out, leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)


def test_query_factors_of_fake_tensors():
    case = Case(heads=(6, 3), rotary_dim=12)
    with FakeTensorMode() as mode:
        given = [*case.heads_on("cpu"), case.positions("cpu"), *table_of(case, 3), query_factors_of(case).detach()]
        q, k, positions, *table, factors = (mode.from_tensor(x) for x in given)
        found = mrrope.learnable_rotary(q, k, positions, *table, query_factors=factors)
        assert [(x.shape, x.stride(), x.dtype) for x in found] == [(x.shape, x.stride(), x.dtype) for x in (q, k)]
