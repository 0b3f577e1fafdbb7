"""learnable_rotary: results and gradients against float64, schemas, torch.compile and errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learnable_rotary_cases import assert_close_to_rotation, leaves_of, options_of, table_of, with_tables
from learnable_rotary_reference import exact_turns, pair_norms, rotated
from op_errors import assert_refused
from rotary_cases import DTYPES, EMPTY_DIMENSIONS, LAYOUTS, PAIRINGS, Case, cases, empty_case
from rotary_reference import TOLERANCES
from tensor_bits import bytes_outside, same_bits
from torch.autograd import gradcheck
from torch.library import opcheck

import mrrope

LEARNABLE = torch.ops.mrrope.learnable_rotary.default
BACKWARD = torch.ops.mrrope.learnable_rotary_backward.default


def magnitudes(case: Case, positions, heads, gradients, frequencies, factor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of the absolute terms of both gradients of the table."""
    tables, pairs = max(len(frequencies), len(factor)), frequencies.shape[1]
    of_frequencies, of_factors = torch.zeros(tables, pairs).double(), torch.zeros(tables).double()
    for x, gradient in zip(heads, gradients, strict=True):
        terms = pair_norms(x, pairs, *options_of(case).values()) * pair_norms(
            gradient, pairs, *options_of(case).values()
        )
        by_position = terms * positions.cpu().double().abs()[..., None, None]
        per_table = (tables, x.shape[-3 if case.layout == "bhsd" else -2] // tables)
        dims = tuple(range(terms.dim() - 2))
        of_frequencies += by_position.sum(dims).unflatten(0, per_table).sum(1)
        of_factors += terms.sum((*dims, -1)).unflatten(0, per_table).sum(1)
    return of_frequencies * factor.detach().cpu().double().abs()[:, None], of_factors


# --- numbers ---


@given(case=cases(), tables=st.integers(1, 3), table_dtype=st.sampled_from([torch.float32, torch.float64]))
def test_against_float64(device, case, tables, table_dtype):
    case = with_tables(case, tables)
    q, k = case.heads_on(device)
    positions, table = case.positions(device), table_of(case, tables, table_dtype)
    outside = [bytes_outside(x) for x in (q, k) if x is not None]
    before = [x.clone() for x in (q, k) if x is not None]
    found = mrrope.learnable_rotary(q, k, positions, *(x.to(device) for x in table), **options_of(case))
    assert (found[1] is None) == (k is None)
    for actual, x, same, around in zip(found, (q, k), before, outside, strict=False):
        expected = rotated(x.cpu(), positions.cpu(), *table, **options_of(case))
        assert_close_to_rotation(actual, expected, case.rotary_dim // 2, case)
        assert same_bits(x, same)
        assert torch.equal(bytes_outside(x), around)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotates_as_rotary_does(device, dtype):
    """By phase steps that differ by the rounding of a float64 frequency."""
    case = Case(dtype=dtype, tokens=65, head_dim=64, rotary_dim=64, reach=2**17)
    q, k = case.heads_on(device)
    positions, table = case.positions(device), case.table()
    factor = torch.tensor([table.attention_factor], dtype=torch.float64, device=device)
    found = mrrope.learnable_rotary(q, k, positions, table.inv_freq[None].to(device), factor)
    assert ((exact_turns(table.inv_freq) - table.turns).abs() <= 2.0**-53 * table.turns + 1).all()
    for actual, expected in zip(found, mrrope.rotary(q, k, positions, table), strict=True):
        # 2^17 positions of 2^-53 radians, and the last bit where that changes it.
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert error <= max(2.0 * torch.finfo(dtype).eps, 2.0**-35)


def test_far_positions_keep_their_bits(device):
    """At position p an error of 2^-53 in the frequency's own rounding is p * 2^-53 radians; the op adds none."""
    case = Case(dtype=torch.float64, tokens=130, head_dim=64, rotary_dim=64, reach=2**31 - 1)
    q, k = case.heads_on(device)
    table = table_of(case, 2)
    found = mrrope.learnable_rotary(q, k, case.positions(device), *(x.to(device) for x in table))
    for actual, x in zip(found, (q, k), strict=True):
        assert_close_to_rotation(actual, rotated(x.cpu(), case.positions("cpu"), *table), 32, case)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**50])
def test_what_is_no_frequency_gives_nan(device, value):
    case = Case(heads=(2, None))
    frequencies, factor = (x.to(device) for x in table_of(case, 1))
    frequencies[0, 3] = value
    found = mrrope.learnable_rotary(case.heads_on(device)[0], None, case.positions(device), frequencies, factor)[0]
    assert found[..., [3, 11]].isnan().all()


def test_a_negative_factor_gives_nan(device):
    """A packed table holds no sign; the heads of other tables are as they were."""
    case = Case(heads=(2, None))
    frequencies, factor = (x.to(device) for x in table_of(case, 2))
    q, positions = case.heads_on(device)[0], case.positions(device)
    expected = mrrope.learnable_rotary(q, None, positions, frequencies, factor)[0]
    factor[0] *= -1
    found = mrrope.learnable_rotary(q, None, positions, frequencies, factor)[0]
    assert found[:, 0, :, : case.rotary_dim].isnan().all()
    assert same_bits(found[:, 1], expected[:, 1])


@pytest.mark.parametrize(("layout", "empty"), EMPTY_DIMENSIONS)
def test_nothing_to_rotate(device, layout, empty):
    case = empty_case(layout, empty)
    leaves = leaves_of(case, 1, device)
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:], layout=layout)
    assert [x.shape for x in found] == [x.shape for x in leaves[:2]]
    gradients = torch.autograd.grad([x.sum() for x in found], leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    if empty in ("batch", "tokens"):
        assert not any(x.any() for x in gradients[2:])


# --- gradients ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tables", "factors"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_gradcheck(device, layout, pairing, tables, factors):
    case = Case(dtype=torch.float64, batch=1, tokens=3, heads=(4, 2), head_dim=6, rotary_dim=4, layout=layout, reach=9)
    table = [x.to(device) for x in table_of(case, tables, factors=factors)]
    leaves = [x.requires_grad_() for x in (*case.heads_on(device), *table)]

    def op(q, k, *table):
        return mrrope.learnable_rotary(q, k, case.positions(device), *table, layout=layout, pairing=pairing)

    assert gradcheck(op, leaves)


@given(case=cases(), tables=st.integers(1, 3), table_dtype=st.sampled_from([torch.float32, torch.float64]))
def test_gradients_against_float64(device, case, tables, table_dtype):
    case = with_tables(case, tables)
    reach = min(case.reach, 2**31 - 1)  # from 2^53 on, float64 does not hold every position
    case = case.with_changes(reach=reach)
    heads = [x.detach().requires_grad_() for x in case.heads_on(device) if x is not None]
    positions, table = case.positions(device), table_of(case, tables, table_dtype)
    gradients = [x for x in case.with_changes(seed=case.seed + 1).heads_on(device) if x is not None]
    leaves = [*heads, *(x.to(device).requires_grad_() for x in table)]
    found = mrrope.learnable_rotary(*(*heads, None)[:2], positions, *leaves[-2:], **options_of(case))[: len(heads)]
    actual = torch.autograd.grad(found, leaves, gradients)

    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    plain = [rotated(x, positions.cpu(), *exact[-2:], **options_of(case)) for x in exact[:-2]]
    expected = torch.autograd.grad(plain, exact, [x.cpu().double() for x in gradients])
    for got, want in zip(actual[:-2], expected[:-2], strict=True):
        assert_close_to_rotation(got, want, case.rotary_dim // 2, case)
    terms = sum(x.numel() for x in heads)
    arithmetic = (
        TOLERANCES[case.dtype].arithmetic + 16 * torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    )
    arithmetic += terms * 2.0**-53
    sizes = magnitudes(case, positions, heads, gradients, *leaves[-2:])
    for got, want, size in zip(actual[-2:], expected[-2:], sizes, strict=True):
        assert (got.shape, got.dtype) == (want.shape, table_dtype)
        excess = (got.cpu().double() - want).abs() - arithmetic * size - torch.finfo(table_dtype).eps * want.abs()
        assert (excess <= 0).all(), f"off by up to {excess.max():.3g} too much"


@pytest.mark.parametrize("shared", ["frequencies", "factors"])
def test_a_shared_part_gets_the_sum_of_the_gradients(device, shared):
    case = Case(dtype=torch.float64, heads=(6, 3))
    q, k, frequencies, factor = leaves_of(case, 3, device)
    one = (frequencies if shared == "frequencies" else factor)[:1].detach().clone().requires_grad_()
    three = one.detach().expand(3, *one.shape[1:]).clone().requires_grad_()
    found = []
    for part in (one, three):
        table = (part, factor) if shared == "frequencies" else (frequencies, part)
        rotated_heads = mrrope.learnable_rotary(q, k, case.positions(device), *table)
        found.append(torch.autograd.grad([x.sin().sum() for x in rotated_heads], part)[0])
    assert found[0].shape == one.shape
    torch.testing.assert_close(found[0], found[1].sum(0, keepdim=True), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 3}])
def test_some_gradients(device, wanted):
    case = Case(dtype=torch.float64, reach=2**17)
    leaves = leaves_of(case, 2, device)

    def gradients(numbers):
        tensors = [x.detach().clone().requires_grad_(i in numbers) for i, x in enumerate(leaves)]
        q, k = mrrope.learnable_rotary(*tensors[:2], case.positions(device), *tensors[2:])
        (q.sin().sum() + k.cos().sum()).backward()
        return [x.grad for x in tensors]

    alone, together = gradients(wanted), gradients(range(4))
    assert {i for i, gradient in enumerate(alone) if gradient is not None} == wanted
    for i in wanted:
        if i >= 2:
            assert torch.equal(alone[i], together[i])
        else:  # without the table's gradient the factor is rounded into cosines and sines
            torch.testing.assert_close(alone[i], together[i], rtol=0.0, atol=1e-14)


def test_heads_are_saved_for_the_table_only(device):
    case = Case(heads=(2, None))
    q, _, frequencies, factor = (*case.heads_on(device), *(x.to(device) for x in table_of(case, 1)))
    q.requires_grad_()
    saved = []
    for learns in (False, True):
        frequencies.requires_grad_(learns)
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, count=count: count.append(x) or x, lambda x: x):
            mrrope.learnable_rotary(q, None, case.positions(device), frequencies, factor)
        saved.append(sum(x.shape == q.shape for x in count))
    assert saved == [0, 1]


def test_an_output_that_is_not_used(device):
    case = Case(dtype=torch.float64)
    leaves = leaves_of(case, 2, device)
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:])
    q_gradient, *others = torch.autograd.grad(found[1].square().sum(), leaves, allow_unused=True)
    assert q_gradient is None
    k_alone = mrrope.learnable_rotary(leaves[1], None, case.positions(device), *leaves[2:])[0]
    for got, want in zip(others, torch.autograd.grad(k_alone.square().sum(), leaves[1:]), strict=True):
        assert torch.equal(got, want)


def test_a_gradient_of_any_strides(device):
    case = Case(dtype=torch.float64)
    leaves = leaves_of(case, 2, device)
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:])[0]
    strided = torch.randn(*found.shape[:-1], 2 * found.shape[-1], dtype=torch.float64).to(device)[..., ::2]
    wanted = [leaves[0], *leaves[2:]]
    for gradient in (strided, torch.ones((), dtype=torch.float64, device=device).expand_as(found)):
        actual = torch.autograd.grad(found, wanted, gradient, retain_graph=True)
        expected = torch.autograd.grad(found, wanted, gradient.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits_every_time(device, dtype):
    case = Case(dtype=dtype, tokens=1000, heads=(6, 3), head_dim=64, rotary_dim=64, reach=2**17)
    leaves = leaves_of(case, 3, device, torch.float32)
    gradients = [x.detach() for x in case.with_changes(seed=3).heads_on(device)]
    runs = []
    for _ in range(3):
        found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:])
        runs.append(torch.autograd.grad(found, leaves, gradients))
    for again in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], again, strict=True))


def test_a_factor_of_zero_has_a_gradient(device):
    case = Case(dtype=torch.float64)
    q, k, frequencies, factor = leaves_of(case, 1, device)
    zero = torch.zeros_like(factor).requires_grad_()
    found = mrrope.learnable_rotary(q, k, case.positions(device), frequencies, zero)
    weights = [torch.randn_like(x) for x in found]
    of_heads, of_frequencies, of_factor = torch.autograd.grad(found, [q, frequencies, zero], weights)
    # The op is linear in the factor.
    at_one = mrrope.learnable_rotary(q, k, case.positions(device), frequencies, torch.ones_like(factor))
    expected = sum((x * weight).sum() for x, weight in zip(at_one, weights, strict=True))
    torch.testing.assert_close(of_factor[0], expected, rtol=1e-12, atol=1e-12)
    assert not of_heads.any()
    assert not of_frequencies.any()


def test_the_table_is_differentiated_once(device):
    case = Case(dtype=torch.float64)
    leaves = leaves_of(case, 2, device)
    found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:])[0]
    with pytest.raises(NotImplementedError, match="learnable_rotary cannot be differentiated twice"):
        torch.autograd.grad(found.square().sum(), leaves[2], create_graph=True)


def test_heads_alone_are_differentiated_twice(device):
    case = Case(dtype=torch.float64, batch=1, tokens=2, heads=(2, None), head_dim=4, rotary_dim=4, reach=9)
    q, table = case.heads_on(device)[0].requires_grad_(), [x.to(device) for x in table_of(case, 2)]

    def op(q):
        return mrrope.learnable_rotary(q, None, case.positions(device), *table)[0].sin()

    assert torch.autograd.gradgradcheck(op, [q])


def test_forward_mode_is_refused_not_dropped(device):
    case = Case(heads=(2, None))
    q, table = case.heads_on(device)[0], [x.to(device) for x in table_of(case, 1)]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table[0], torch.ones_like(table[0]))
        with pytest.raises(RuntimeError, match="jvp"):
            mrrope.learnable_rotary(q, None, case.positions(device), dual, table[1])


# --- schemas, modes and torch.compile ---


OPCHECKED = {
    "plain": (Case(), 2, 2),
    "q alone": (Case(heads=(3, None)), 3, 1),
    "16 bits": (Case(dtype=torch.bfloat16, memory="transposed"), 1, 1),
    "partial": (Case(layout="thd", rotary_dim=12, position_dtype=torch.int32), 1, 2),
    "empty": (Case(tokens=0, positions_shape="row"), 1, 1),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("case", "tables", "factors"), OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(device, case, tables, factors, requires_grad):
    heads = [x.requires_grad_(requires_grad) for x in case.heads_on(device) if x is not None]
    table = [x.to(device).requires_grad_(requires_grad) for x in table_of(case, tables, factors=factors)]
    rest = (case.positions(device), *table, case.layout, case.pairing)
    opcheck(LEARNABLE, (heads, *rest))
    if not requires_grad:
        gradients = [torch.randn_like(x) for x in heads]
        packed_tables = LEARNABLE(heads, *rest)[-1]
        opcheck(BACKWARD, (gradients, packed_tables, heads, *rest))
        opcheck(BACKWARD, (gradients, packed_tables, heads, *rest), {"wants_heads": False})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward(device, dynamo, dynamic):
    def scores(q, k, positions, exponents, factor):
        q, k = mrrope.learnable_rotary(2.0 * q, k + 1.0, positions, exponents.exp(), factor)
        return (q[:, :2] * k).sum(-1)

    compiled = torch.compile(scores, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 9):
        case = Case(tokens=tokens, dtype=torch.float64, reach=2**17)
        q, k, frequencies, factor = leaves_of(case, 2, device)
        results = []
        for function in (scores, compiled):
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, frequencies.log(), factor)]
            out = function(*leaves[:2], case.positions(device), *leaves[2:])
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)


def test_gradients_of_more_columns_than_a_grid_has_rows(cuda):
    """The sums of 2^18 frequencies take 65537 blocks, and y and z of a grid end at 65535."""
    generator = torch.Generator().manual_seed(0)
    pairs = 2**18
    x, gradient = (torch.randn(1, 1, 3, 2 * pairs, generator=generator).double() for _ in range(2))
    q = x.float().to(cuda)
    frequencies = torch.rand(1, pairs, generator=generator, dtype=torch.float64)
    given = frequencies.to(cuda).requires_grad_()
    factor = torch.ones(1, dtype=torch.float64, device=cuda, requires_grad=True)
    positions = torch.tensor([1, 5, 1000])
    rotated_q, _ = mrrope.learnable_rotary(q, None, positions.to(cuda), given, factor)
    rotated_q.backward(gradient.float().to(cuda))
    # Of y = R(p f) x: the frequency's gradient is the sum of p * (g x y), over positions.
    angles = positions[:, None] * frequencies
    first, second = x[0, 0].chunk(2, dim=-1)
    y_first, y_second = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    g_first, g_second = gradient[0, 0].chunk(2, dim=-1)
    exact = (positions[:, None] * (g_second * y_first - g_first * y_second)).sum(0)
    torch.testing.assert_close(given.grad.cpu()[0], exact, rtol=0.0, atol=1e-2)  # of terms up to 1e4 in float32
    assert (given.grad.cpu()[0] - exact).norm() / exact.norm() < TOLERANCES[torch.float32].frobenius


def test_in_a_cuda_graph(cuda):
    case = Case(dtype=torch.bfloat16, tokens=300, heads=(9, 3), head_dim=64, rotary_dim=64, reach=2**17)
    leaves = leaves_of(case, 3, cuda, torch.float32)
    positions = case.positions(cuda)

    def step():
        found = mrrope.learnable_rotary(*leaves[:2], positions, *leaves[2:])
        return torch.autograd.grad([x.square().sum() for x in found], leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for x in found:
        x.fill_(float("nan"))
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tables", [1, 3])
def test_cuda_and_cpu_agree(cuda, tables):
    case = Case(dtype=torch.float32, tokens=3000, heads=(9, 3), head_dim=64, rotary_dim=48, reach=2**17)
    gradients = case.with_changes(seed=5).heads_on("cpu")
    results = []
    for device in ("cpu", cuda):
        leaves = leaves_of(case, tables, device)
        found = mrrope.learnable_rotary(*leaves[:2], case.positions(device), *leaves[2:])
        results.append(torch.autograd.grad(found, leaves, [x.to(device) for x in gradients]))
    for on_cpu, on_cuda in zip(*results, strict=True):
        torch.testing.assert_close(on_cuda.cpu().double(), on_cpu.double(), rtol=1e-4, atol=1e-6 * on_cpu.abs().max())


# --- errors ---


def good_call() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 4, 3, 8, generator=generator),
        "k": torch.randn(2, 2, 3, 8, generator=generator),
        "positions": torch.arange(3),
        "frequencies": torch.rand(2, 4, generator=generator),
        "attention_factor": torch.ones(2),
    }


BAD_CALLS = {
    "q no tensor": ({"q": [1.0]}, TypeError, ["q must be a tensor, got list"]),
    "k no tensor": ({"k": 3}, TypeError, ["k must be a tensor or None, got int"]),
    "no frequencies": ({"frequencies": None}, TypeError, ["frequencies must be a tensor, got NoneType"]),
    "a number": ({"attention_factor": 1.0}, TypeError, ["attention_factor must be a tensor, got float"]),
    "a packed table": (
        {"frequencies": torch.ones(2, 4).long()},
        TypeError,
        ["frequencies must be float32 or float64, got Long"],
    ),
    "half frequencies": ({"frequencies": torch.ones(2, 4).half()}, TypeError, ["frequencies must be", "Half"]),
    "factor dtype": (
        {"attention_factor": torch.ones(2).double()},
        TypeError,
        ["attention_factor must have the dtype of frequencies, Float, got Double"],
    ),
    "frequencies of one table": (
        {"frequencies": torch.ones(4)},
        ValueError,
        ["frequencies must be [key heads", "1 dim"],
    ),
    "factors of two dimensions": (
        {"attention_factor": torch.ones(2, 1)},
        ValueError,
        ["attention_factor must be", "2"],
    ),
    "no tables": ({"frequencies": torch.ones(0, 4)}, ValueError, ["frequencies must be", "not empty", "[0, 4]"]),
    "no pairs": ({"frequencies": torch.ones(2, 0)}, ValueError, ["frequencies must be", "not empty", "[2, 0]"]),
    "factors of other tables": (
        {"attention_factor": torch.ones(3)},
        ValueError,
        ["attention_factor must be [1] or [2]", "[3]"],
    ),
    "no factors": ({"attention_factor": torch.ones(0)}, ValueError, ["attention_factor must be [1] or [2]", "[0]"]),
    "heads of q": (
        {"frequencies": torch.ones(3, 4), "attention_factor": torch.ones(1)},
        ValueError,
        ["q must have a multiple of 3 heads", "got 4"],
    ),
    "heads of k": (
        {"frequencies": torch.ones(4, 4), "attention_factor": torch.ones(4)},
        ValueError,
        ["k must have a multiple of 4 heads", "got 2"],
    ),
    "too many pairs": (
        {"frequencies": torch.ones(2, 5)},
        ValueError,
        ["frequencies must have at most", "(4)", "got 5"],
    ),
    "frequencies elsewhere": (
        {"frequencies": torch.ones(2, 4, device="meta")},
        RuntimeError,
        ["frequencies must be on q's device cpu, got meta"],
    ),
    "factor elsewhere": (
        {"attention_factor": torch.ones(2, device="meta")},
        RuntimeError,
        ["attention_factor must be on q's device cpu, got meta"],
    ),
    "k dtype": ({"k": torch.ones(2, 2, 3, 8).half()}, TypeError, ["k must have q's dtype", "Half"]),
    "k tokens": ({"k": torch.ones(2, 2, 4, 8)}, ValueError, ["k must be", "number of heads only"]),
    "q dtype": ({"q": torch.ones(2, 4, 3, 8).long(), "k": None}, TypeError, ["q must be float64", "Long"]),
    "q strides": ({"q": torch.ones(2, 4, 3, 16)[..., ::2]}, ValueError, ["q must be", "contiguous last dimension"]),
    "positions dtype": ({"positions": torch.arange(3.0)}, TypeError, ["positions must be int32 or int64, got Float"]),
    "positions shape": ({"positions": torch.arange(4)}, ValueError, ["positions must be [3]", "[4]"]),
    "query factors no tensor": (
        {"query_factors": [1.0] * 4},
        TypeError,
        ["query_factors must be a tensor or None, got list"],
    ),
    "half query factors": (
        {"query_factors": torch.ones(4).half()},
        TypeError,
        ["query_factors must be float32 or float64, got torch.float16"],
    ),
    "query factors of key heads": (
        {"query_factors": torch.ones(2)},
        ValueError,
        ["query_factors must be [4], one for each of q's heads, got [2]"],
    ),
    "query factors of two dimensions": (
        {"query_factors": torch.ones(2, 2)},
        ValueError,
        ["query_factors must be [4]", "got [2, 2]"],
    ),
    "query factors elsewhere": (
        {"query_factors": torch.ones(4, device="meta")},
        RuntimeError,
        ["query_factors must be on q's device cpu, got meta"],
    ),
    "layout": ({"layout": "hbsd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "'hbsd'"]),
    "pairing": ({"pairing": "thirds"}, ValueError, ["pairing must be one of halves, interleaved"]),
}


@pytest.mark.parametrize(("changes", "error", "texts"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused(changes, error, texts):
    arguments = good_call() | changes
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    assert_refused(lambda: mrrope.learnable_rotary(**arguments), error, *texts)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize(("changes", "error", "texts"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused_with_query_factors(changes, error, texts):
    arguments = good_call() | {"query_factors": torch.ones(4)} | changes
    assert_refused(lambda: mrrope.learnable_rotary(**arguments), error, *texts)


def test_bad_gradients_are_refused():
    call = good_call()
    heads, rest = [call["q"], call["k"]], (call["positions"], call["frequencies"], call["attention_factor"])
    packed = LEARNABLE(heads, *rest)[-1]

    def refused(gradients, packed_tables, error, text):
        assert_refused(lambda: BACKWARD(gradients, packed_tables, heads, *rest), error, text)

    refused(heads[:1], packed, ValueError, "gradients must be one for each of the 2")
    refused(heads[::-1], packed, ValueError, "gradients[0] must be [2, 4, 3, 8]")
    refused([x.half() for x in heads], packed, TypeError, "gradients[0] must have the dtype of heads[0]")
    refused(heads, packed.double(), TypeError, "packed_tables must be int64, got Double")
    refused(heads, packed.to("meta"), RuntimeError, "packed_tables must be on q's device cpu, got meta")
    refused(heads, packed[:1], ValueError, "packed_tables must be contiguous and [2, 5]")
    refused(heads, packed.mT.contiguous().mT, ValueError, "packed_tables must be contiguous and [2, 5]")
