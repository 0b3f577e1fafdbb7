"""rotary_cos_sin: results and gradients against float64, schemas, torch.compile and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_errors import assert_refused
from rotary_cases import DTYPES, EMPTY_DIMENSIONS, LAYOUTS, PAIRINGS, Case, cases, empty_case, onto, storage_of
from rotary_reference import assert_rotated_by, rotated_by
from tensor_bits import same_bits
from torch.autograd import gradcheck
from torch.library import opcheck

import mrrope

OP = torch.ops.mrrope.rotary_cos_sin.default


def columns_of(case: Case, device: str, dtype=None, full_width=True, memory="contiguous") -> list[torch.Tensor]:
    """Return cos and sin: any numbers, where a pair's second column is noise that must not be read."""
    rows = {"row": (), "broadcast": (1,), "matrix": (case.batch,)}[case.positions_shape]
    rows = () if case.layout == "thd" else rows
    shape = (*rows, case.tokens, case.rotary_dim if full_width else case.rotary_dim // 2)
    generator = torch.Generator().manual_seed(case.seed + 3)
    columns = []
    for _ in range(2):
        view = storage_of(shape, memory, dtype or case.dtype)
        columns.append(onto(device, view.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))))
    return columns


def rotations_of(case: Case, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Return the complex numbers that pairs are multiplied by."""
    half = case.rotary_dim // 2
    if cos.shape[-1] == case.rotary_dim:
        cos, sin = (x[..., :half] if case.pairing == "halves" else x[..., ::2] for x in (cos, sin))
    return cos.cpu().double().numpy() + 1j * sin.cpu().double().numpy()


def options_of(case: Case) -> dict:
    return {"layout": case.layout, "pairing": case.pairing, "rotary_dim": case.rotary_dim}


# --- numbers ---


@given(
    case=cases(),
    full_width=st.booleans(),
    float32=st.booleans(),
    memory=st.sampled_from(["contiguous", "padded", "unaligned"]),
)
def test_against_float64(device, case, full_width, float32, memory):
    heads = case.heads_on(device)
    cos, sin = columns_of(case, device, torch.float32 if float32 else None, full_width, memory)
    found = mrrope.rotary_cos_sin(*heads, cos, sin, **options_of(case))
    by = rotations_of(case, cos, sin)
    for actual, x in zip(found, heads, strict=True):
        if x is None:
            assert actual is None
        else:
            assert_rotated_by(actual, x, by, case.layout, case.pairing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], ids=hex)
def test_nan_stays_nan(device, dtype, bits):
    """Rounding a NaN with many bits set to bfloat16 must not carry into its exponent and sign."""
    case = Case(dtype=dtype)
    q, k = case.heads_on(device)
    columns_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = columns_of(case, device, columns_dtype)
    cos[..., :] = torch.tensor([bits], dtype=torch.int32).view(torch.float32).to(device)
    for found in mrrope.rotary_cos_sin(q, k, cos, sin, **options_of(case)):
        assert found[..., : case.rotary_dim].isnan().all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotates_as_rotary_does(device, dtype, pairing):
    """Give the cosines and sines of a table: the results differ by the rounding of those."""
    case = Case(dtype=dtype, pairing=pairing, head_dim=24, reach=1000)
    q, k = case.heads_on(device)
    unit = torch.ones(case.batch, case.tokens, 1, case.rotary_dim // 2, dtype=torch.float64, device=device)
    both = torch.cat([unit, 0 * unit], -1) if pairing == "halves" else torch.stack([unit, 0 * unit], -1).flatten(-2)
    rotated, _ = mrrope.rotary(both, None, case.positions(device), case.table(), "bshd", pairing)
    half = case.rotary_dim // 2
    parts = (
        rotated[:, :, 0].split(half, -1) if pairing == "halves" else rotated[:, :, 0].unflatten(-1, (-1, 2)).unbind(-1)
    )
    cos, sin = (x.contiguous().to(torch.float64 if dtype == torch.float64 else torch.float32) for x in parts)
    found = mrrope.rotary_cos_sin(q, k, cos, sin, **options_of(case))
    expected = mrrope.rotary(q, k, case.positions(device), case.table(), pairing=pairing)
    eps = torch.finfo(dtype).eps
    for actual, want in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, want, rtol=eps, atol=4 * max(eps / 8, 2.0**-53 if eps < 1e-10 else 2.0**-24))


def test_as_transformers_writes_it(device):
    """Rotate a view of a projection by Llama's formula."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 7, h, 16, generator=generator).to(device).transpose(1, 2) for h in (4, 2))
    cos, sin = (torch.randn(2, 7, 8, generator=generator).to(device).repeat(1, 1, 2) for _ in range(2))

    def apply(x):
        half = torch.cat([-x[..., 8:], x[..., :8]], -1)
        return x * cos[:, None] + half * sin[:, None]

    found = mrrope.rotary_cos_sin(q, k, cos, sin)
    for actual, x in zip(found, (q, k), strict=True):
        torch.testing.assert_close(actual, apply(x), rtol=1e-6, atol=1e-5)
        assert actual.stride() == x.stride()


@pytest.mark.parametrize(("layout", "empty"), EMPTY_DIMENSIONS)
def test_nothing_to_rotate(device, layout, empty):
    case = empty_case(layout, empty)
    heads = case.heads_on(device)
    found = mrrope.rotary_cos_sin(*heads, *columns_of(case, device), layout=layout)
    assert [x.shape for x in found] == [x.shape for x in heads]


# --- gradients ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(device, layout, pairing):
    case = Case(layout=layout, pairing=pairing, dtype=torch.float64, tokens=3, head_dim=8, rotary_dim=6)
    heads = [x.requires_grad_() for x in case.heads_on(device)]
    columns = columns_of(case, device)
    call = lambda q, k: mrrope.rotary_cos_sin(q, k, *columns, **options_of(case))  # noqa: E731
    assert gradcheck(call, heads)
    assert torch.autograd.gradgradcheck(call, heads)


@given(case=cases(), full_width=st.booleans())
def test_gradients_against_float64(device, case, full_width):
    heads = [x.detach().requires_grad_() for x in case.heads_on(device) if x is not None]
    cos, sin = columns_of(case, device, full_width=full_width)
    found = [x for x in mrrope.rotary_cos_sin(*(*heads, None)[:2], cos, sin, **options_of(case)) if x is not None]
    gradients = [torch.randn_like(x) for x in found]
    by = rotations_of(case, cos, sin).conj()
    for actual, gradient in zip(torch.autograd.grad(found, heads, gradients), gradients, strict=True):
        assert_rotated_by(actual, gradient, by, case.layout, case.pairing)


def test_a_gradient_of_any_strides_and_an_output_that_is_not_used(device):
    case = Case(dtype=torch.float64)
    q, k = (x.requires_grad_() for x in case.heads_on(device))
    cos, sin = columns_of(case, device)
    out, _ = mrrope.rotary_cos_sin(q, k, cos, sin)
    of_q, of_k = torch.autograd.grad(out.sum(), [q, k], allow_unused=True)
    expected = rotated_by(torch.ones_like(q), rotations_of(case, cos, sin).conj())
    torch.testing.assert_close(of_q.cpu(), expected)
    assert of_k is None


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_columns_have_no_gradient(device, name):
    case = Case()
    columns = dict(zip(("cos", "sin"), columns_of(case, device), strict=True))
    columns[name].requires_grad_()
    q, k = case.heads_on(device)
    assert_refused(
        lambda: mrrope.rotary_cos_sin(q, k, **columns), RuntimeError, f"{name} requires grad", "q and k only", "detach"
    )
    with torch.no_grad():
        mrrope.rotary_cos_sin(q, k, **columns)


# --- schemas, compilation and graphs ---

OPCHECKED = {
    "plain": (Case(), True),
    "q alone": (Case(heads=(3, None), pairing="interleaved"), True),
    "16 bits": (Case(dtype=torch.bfloat16, memory="transposed"), False),
    "partial": (Case(layout="thd", rotary_dim=12), True),
    "empty": (Case(tokens=0, positions_shape="row"), True),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("case", "full_width"), OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(device, case, full_width, requires_grad):
    heads = [x.requires_grad_(requires_grad) for x in case.heads_on(device) if x is not None]
    opcheck(OP, (heads, *columns_of(case, device, full_width=full_width)), options_of(case))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward(device, dynamo, dynamic):
    def scores(q, k, cos, sin):
        q, k = mrrope.rotary_cos_sin(2.0 * q, k + 1.0, cos.sin(), sin)
        return (q[:, :2] * k).sum(-1)

    compiled = torch.compile(scores, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 9):
        case = Case(tokens=tokens, dtype=torch.float64)
        results = []
        for function in (scores, compiled):
            leaves = [x.requires_grad_() for x in case.heads_on(device)]
            out = function(*leaves, *columns_of(case, device))
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)


def test_in_a_cuda_graph(cuda):
    case = Case(dtype=torch.bfloat16, tokens=300, heads=(9, 3), head_dim=64, rotary_dim=64)
    leaves = [x.requires_grad_() for x in case.heads_on(cuda)]
    columns = columns_of(case, cuda)

    def step():
        found = mrrope.rotary_cos_sin(*leaves, *columns)
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


def test_more_than_2_to_31_elements(cuda):
    heads, tokens = 34, 2**20
    if torch.cuda.mem_get_info()[0] < 5 * heads * tokens * 128:
        pytest.skip("needs 23 GB of GPU memory")
    q = torch.randn(1, tokens, 1, 64, device=cuda, dtype=torch.bfloat16).expand(1, tokens, heads, 64).contiguous()
    cos, sin = (torch.randn(1, tokens, 64, device=cuda) for _ in range(2))
    found, _ = mrrope.rotary_cos_sin(q, None, cos, sin, "bshd")
    last = slice(tokens - 3, None)
    expected, _ = mrrope.rotary_cos_sin(q[:, last], None, cos[:, last], sin[:, last], "bshd")
    assert same_bits(found[:, last], expected)


# --- errors ---


def good_call() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 4, 3, 8, generator=generator),
        "k": torch.randn(2, 2, 3, 8, generator=generator),
        "cos": torch.randn(2, 3, 8, generator=generator),
        "sin": torch.randn(2, 3, 8, generator=generator),
    }


def both(*shape: int, **options) -> dict:
    return {"cos": torch.ones(shape, **options), "sin": torch.ones(shape, **options)}


BAD_CALLS = {
    "q no tensor": ({"q": [1.0]}, TypeError, ["q must be a tensor, got list"]),
    "k no tensor": ({"k": 3}, TypeError, ["k must be a tensor or None, got int"]),
    "no cosines": ({"cos": None}, TypeError, ["cos must be a tensor, got NoneType"]),
    "a number": ({"sin": 1.0}, TypeError, ["sin must be a tensor, got float"]),
    "half cosines": (both(2, 3, 8, dtype=torch.half), TypeError, ["cos must be float32 or have q's dtype", "got Half"]),
    "integers": (both(2, 3, 8, dtype=torch.long), TypeError, ["cos must be float32", "got Long"]),
    "two dtypes": (
        {"q": torch.ones(2, 4, 3, 8).half(), "k": None, "cos": torch.ones(2, 3, 8).half()},
        TypeError,
        ["sin must have cos's dtype Half, got Float"],
    ),
    "other tokens": (both(2, 4, 8), ValueError, ["cos must be [3, columns]", "layout bhsd", "[2, 4, 8]"]),
    "other batch": (both(3, 3, 8), ValueError, ["cos must be", "[2, 3, columns]", "[3, 3, 8]"]),
    "heads": (both(2, 1, 3, 8), ValueError, ["cos must be", "[2, 1, 3, 8]"]),
    "sin's tokens": ({"sin": torch.ones(2, 1, 8)}, ValueError, ["sin must be", "[2, 1, 8]"]),
    "sin's columns": ({"sin": torch.ones(2, 3, 4)}, ValueError, ["sin must have cos's 8 columns, got 4"]),
    "strides": ({"cos": torch.ones(2, 3, 16)[..., ::2]}, ValueError, ["cos must be", "contiguous last dimension"]),
    "too many columns": (both(2, 3, 10), ValueError, ["cos must have rotary_dim columns", "(8)", "got 10"]),
    "an odd number": (both(2, 3, 7), ValueError, ["cos must have rotary_dim columns", "got 7"]),
    "no columns": (both(2, 3, 0), ValueError, ["cos must have rotary_dim columns", "got 0"]),
    "rotary_dim too large": ({"rotary_dim": 16}, ValueError, ["rotary_dim must be even", "(8)", "got 16"]),
    "rotary_dim odd": ({"rotary_dim": 7}, ValueError, ["rotary_dim must be even", "got 7"]),
    "rotary_dim zero": ({"rotary_dim": 0}, ValueError, ["rotary_dim must be", "positive", "got 0"]),
    "columns of neither": ({"rotary_dim": 6}, ValueError, ["cos must have rotary_dim (6)", "/ 2 columns, got 8"]),
    "elsewhere": (both(2, 3, 8, device="meta"), RuntimeError, ["cos must be on q's device cpu, got meta"]),
    "k dtype": ({"k": torch.ones(2, 2, 3, 8).half()}, TypeError, ["k must have q's dtype", "Half"]),
    "k tokens": ({"k": torch.ones(2, 2, 4, 8)}, ValueError, ["k must be", "number of heads only"]),
    "q dtype": ({"q": torch.ones(2, 4, 3, 8).long(), "k": None}, TypeError, ["q must be float64", "Long"]),
    "q strides": ({"q": torch.ones(2, 4, 3, 16)[..., ::2]}, ValueError, ["q must be", "contiguous last dimension"]),
    "layout": ({"layout": "hbsd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "'hbsd'"]),
    "pairing": ({"pairing": "thirds"}, ValueError, ["pairing must be one of halves, interleaved"]),
}


@pytest.mark.parametrize(("changes", "error", "texts"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused(changes, error, texts):
    arguments = good_call() | changes
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    assert_refused(lambda: mrrope.rotary_cos_sin(**arguments), error, *texts)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


def test_packed_layout_has_no_batch():
    q = torch.ones(3, 2, 8)
    assert_refused(
        lambda: mrrope.rotary_cos_sin(q, None, *both(1, 3, 8).values(), layout="thd"),
        ValueError,
        "cos must be [3, columns]",
        "layout thd",
    )
