"""qk_norm_rotary: accuracy against float64 and transformers, gradients, schemas, torch.compile and errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_reference import EPS, OVERS, assert_normed, normed, weights_of
from op_errors import assert_refused
from rotary_cases import DTYPES, LAYOUTS, PAIRINGS, Case, cases, empty_case, table_of
from rotary_reference import HEAD_AXIS, TOLERANCES, rotated
from torch.autograd import gradcheck
from torch.library import opcheck

import mrrope

NORM = torch.ops.mrrope.qk_norm_rotary.default
NORM_ = torch.ops.mrrope.qk_norm_rotary_.default
BACKWARD = torch.ops.mrrope.qk_norm_rotary_backward.default


def call(case: Case, over: str, device: str, op=mrrope.qk_norm_rotary, **options):
    """Return (results, heads, weights, positions, table) of one call."""
    heads = [x for x in case.heads_on(device) if x is not None]
    weights = weights_of(case, over, device)
    positions, table = case.positions(device), case.table()
    q, k = (*heads, None)[:2]
    q_weight, k_weight = (*weights, None)[:2]
    options = {"eps": EPS, "over": over, "layout": case.layout, "pairing": case.pairing} | options
    before = [x.clone() for x in heads]
    return op(q, k, q_weight, k_weight, positions, table, **options), before, weights, positions, table


# --- numbers ---


@given(case=cases(), over=st.sampled_from(OVERS), offset=st.sampled_from([0.0, 1.0]), in_place=st.booleans())
def test_against_float64(device, case, over, offset, in_place):
    op = mrrope.qk_norm_rotary_ if in_place else mrrope.qk_norm_rotary
    results, heads, weights, positions, table = call(case, over, device, op, weight_offset=offset)
    assert (results[1] is None) == (case.heads[1] is None)
    kind = {"over": over, "layout": case.layout, "pairing": case.pairing, "offset": offset}
    for actual, x, weight in zip(results, heads, weights, strict=False):
        assert_normed(actual, x, weight, positions, table, **kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("over", OVERS)
def test_one_rounding_in_all(device, over, dtype):
    """In Frobenius norm over many components. Norm and rotation unfused would round two or three times."""
    case = Case(dtype=dtype, tokens=257, heads=(8, 2), head_dim=128, rotary_dim=128, reach=2**17)
    (q, _), heads, weights, positions, table = call(case, over, device)
    exact = rotated(normed(heads[0].cpu().double(), weights[0].cpu().double(), over, "bhsd", 0.0), positions, table)
    assert (q.cpu().double() - exact).norm() / exact.norm() < TOLERANCES[dtype].frobenius


def assert_infinity_stays_where_it_is(device, over, pairing, tokens, dtype, heads=(8, 2), tables=None):
    """The mean square is infinite, so all other components are 0; tail components have no partner to turn into NaN."""
    case = Case(dtype=dtype, pairing=pairing, batch=1, tokens=tokens, heads=heads, head_dim=64, rotary_dim=32)
    heads = case.heads_on(device)
    for x in heads:
        x[:, 1, 0, 40] = torch.inf
    weights = weights_of(case, over, device)
    options = {"eps": EPS, "over": over, "layout": case.layout, "pairing": pairing}
    if tables is not None:
        options["table_index"] = torch.zeros(1, dtype=torch.int32, device=device)
    table = case.table() if tables is None else tables
    for x in mrrope.qk_norm_rotary(*heads, *weights, case.positions(device), table, **options):
        assert x[0, 1, 0, 40].isnan()
        x[0, 1, 0, 40] = 0.0
        assert not x[0, 1, 0].any()
        assert x.isfinite().all()


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("tokens", [1, 64, 2048])  # one head per thread, and two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinity_in_the_unrotated_tail_stays_where_it_is(device, over, pairing, tokens, dtype):
    assert_infinity_stays_where_it_is(device, over, pairing, tokens, dtype)


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("tokens", "dtype"), [(4096, torch.float32), (8192, torch.float32), (16384, torch.bfloat16)])
def test_infinity_in_the_unrotated_tail_of_many_tokens(cuda, over, pairing, tokens, dtype):
    """2^20 threads of one head each norm four at a time, and 2^21 norm eight, by other code."""
    assert_infinity_stays_where_it_is(cuda, over, pairing, tokens, dtype, heads=(32, 8))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("tokens", [64, 4096])  # two heads per thread, and eight
def test_infinity_in_the_unrotated_tail_with_a_table_index(cuda, pairing, tokens):
    tables = [table_of("rope", 32), table_of("ntk", 32)]
    assert_infinity_stays_where_it_is(cuda, "head", pairing, tokens, torch.bfloat16, heads=(32, 8), tables=tables)


@pytest.mark.parametrize(("layout", "empty"), [("bhsd", "batch"), ("thd", "tokens"), ("bshd", "k_heads")])
@pytest.mark.parametrize("over", OVERS)
def test_nothing_to_norm(device, layout, empty, over):
    case = empty_case(layout, empty)
    heads = [x.requires_grad_() for x in case.heads_on(device)]
    counts = [x.shape[HEAD_AXIS[layout]] * case.head_dim if over == "all_heads" else case.head_dim for x in heads]
    weights = [torch.ones(count, device=device, requires_grad=True) for count in counts]
    positions = case.positions(device)
    found = mrrope.qk_norm_rotary(*heads, *weights, positions, case.table(), eps=EPS, over=over, layout=layout)
    assert [x.shape for x in found] == [x.shape for x in heads]
    sum(x.sum() for x in found).backward()
    for weight, x in zip(weights, heads, strict=True):
        assert weight.grad.shape == weight.shape
        assert x.numel() or not weight.grad.any()


def test_a_table_for_each_sequence(device):
    case = Case(batch=3, heads=(4, 2))
    q, k = case.heads_on(device)
    weights, positions = weights_of(case, "head", device), case.positions(device)
    tables = [table_of(method, 16) for method in ("rope", "yarn", "mrrope_pro")]
    index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    found = mrrope.qk_norm_rotary(q, k, *weights, positions, tables, eps=EPS, table_index=index)
    for i, chosen in enumerate(index.tolist()):
        for actual, x, weight in zip(found, (q, k), weights, strict=True):
            part = slice(i, i + 1)
            assert_normed(actual[part].clone(), x[part], weight, positions[part], tables[chosen])


# --- gradients ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("over", OVERS)
def test_gradcheck(device, over, layout, pairing):
    case = Case(dtype=torch.float64, batch=1, tokens=3, heads=(2, 1), head_dim=6, rotary_dim=4, layout=layout)
    leaves = [x.requires_grad_() for x in (*case.heads_on(device), *weights_of(case, over, device))]
    positions, table = case.positions(device), case.table()

    def op(*leaves):
        options = {"over": over, "layout": layout, "pairing": pairing, "weight_offset": 1.0}
        return mrrope.qk_norm_rotary(*leaves, positions, table, eps=1e-3, **options)

    assert gradcheck(op, leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_gradients_against_float64(device, over, dtype, rotary_dim):
    case = Case(dtype=dtype, tokens=70, heads=(4, 2), head_dim=64, rotary_dim=rotary_dim, reach=2**17)
    heads, weights = case.heads_on(device), weights_of(case, over, device)
    positions, table = case.positions(device), case.table()
    gradients = case.with_changes(seed=5).heads_on(device)
    leaves = [x.detach().requires_grad_() for x in (*heads, *weights)]
    found = mrrope.qk_norm_rotary(*leaves, positions, table, eps=EPS, over=over)
    actual = torch.autograd.grad(found, leaves, gradients)
    exact = [x.detach().cpu().double().requires_grad_() for x in (*heads, *weights)]
    # The gradient of a rotation is the inverse rotation.
    rotated_back = [rotated(x, positions, table, conjugate=True) for x in gradients]
    plain = [normed(x, weight, over, "bhsd", 0.0) for x, weight in zip(exact[:2], exact[2:], strict=True)]
    expected = torch.autograd.grad(plain, exact, rotated_back)
    limit = max(1.05 * TOLERANCES[dtype].frobenius, 1e-14)
    for i, (got, want, leaf) in enumerate(zip(actual, expected, leaves, strict=True)):
        assert (got.shape, got.dtype) == (leaf.shape, dtype)
        # Gradients of the weights sum few components, so that one rounding may exceed the average.
        assert (got.cpu().double() - want).norm() / want.norm() < limit * (1.0 if i < 2 else 1.3)


@pytest.mark.parametrize("wanted", range(4))
def test_each_gradient_by_itself(device, wanted):
    case = Case(dtype=torch.float64)
    leaves = [*case.heads_on(device), *weights_of(case, "head", device)]
    positions, table = case.positions(device), case.table()

    def gradients(numbers):
        tensors = [x.detach().clone().requires_grad_(i in numbers) for i, x in enumerate(leaves)]
        q, k = mrrope.qk_norm_rotary(*tensors, positions, table, eps=EPS)
        (q.sin().sum() + k.cos().sum()).backward()
        return [x.grad for x in tensors]

    alone, together = gradients({wanted}), gradients(range(4))
    assert torch.equal(alone[wanted], together[wanted])
    assert [i for i, gradient in enumerate(alone) if gradient is not None] == [wanted]


def test_an_output_that_is_not_used(device):
    case = Case(dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*case.heads_on(device), *weights_of(case, "head", device))]
    mrrope.qk_norm_rotary(*leaves, case.positions(device), case.table(), eps=EPS)[1].sum().backward()
    assert [x.grad is None for x in leaves] == [True, False, True, False]


def test_a_gradient_of_any_strides(device):
    case = Case(dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*case.heads_on(device), *weights_of(case, "head", device))]
    found = mrrope.qk_norm_rotary(*leaves, case.positions(device), case.table(), eps=EPS)[0]
    strided = torch.randn(*found.shape[:-1], 2 * found.shape[-1], dtype=torch.float64).to(device)[..., ::2]
    for gradient in (strided, torch.ones((), dtype=torch.float64, device=device).expand_as(found)):
        actual = torch.autograd.grad(found, leaves[::2], gradient, retain_graph=True)
        expected = torch.autograd.grad(found, leaves[::2], gradient.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_differentiated_twice_is_refused(device):
    case = Case(dtype=torch.float64, heads=(2, None))
    q, weight = case.heads_on(device)[0].requires_grad_(), weights_of(case, "head", device)[0]
    found = mrrope.qk_norm_rotary(q, None, weight, None, case.positions(device), case.table(), eps=EPS)[0]
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        torch.autograd.grad(found.square().sum(), q, create_graph=True)


def test_forward_mode_is_refused_not_dropped(device):
    case = Case(heads=(2, None))
    q, weight = case.heads_on(device)[0], weights_of(case, "head", device)[0]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            mrrope.qk_norm_rotary(dual, None, weight, None, case.positions(device), case.table(), eps=EPS)


def test_in_place_is_for_inference(device):
    case = Case()
    q, k = case.heads_on(device)
    weights, positions, table = weights_of(case, "head", device), case.positions(device), case.table()
    expected = mrrope.qk_norm_rotary(q, k, *weights, positions, table, eps=EPS)
    before = q._version, k._version
    for name, x in (("q", q), ("k_weight", weights[1])):
        x.requires_grad_()
        with pytest.raises(RuntimeError, match=rf"{name} requires grad.*torch.no_grad"):
            mrrope.qk_norm_rotary_(q, k, *weights, positions, table, eps=EPS)
        x.requires_grad_(False)
    assert (q._version, k._version) == before
    found = mrrope.qk_norm_rotary_(q, k, *weights, positions, table, eps=EPS)
    assert found[0] is q
    assert found[1] is k
    assert (q._version, k._version) == (before[0] + 1, before[1] + 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- schemas, modes and torch.compile ---


OPCHECKED = {
    "plain": (Case(), "head"),
    "q alone": (Case(heads=(3, None)), "head"),
    "over all heads": (Case(dtype=torch.bfloat16, memory="transposed"), "all_heads"),
    "partial": (Case(layout="thd", rotary_dim=12, position_dtype=torch.int32), "all_heads"),
    "empty": (Case(tokens=0, positions_shape="row"), "head"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("case", "over"), OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(device, case, over, requires_grad):
    heads = [x.requires_grad_(requires_grad) for x in case.heads_on(device) if x is not None]
    weights = [x.requires_grad_(requires_grad) for x in weights_of(case, over, device)]
    table = case.table().packed(heads[0].device)
    rest = (weights, case.positions(device), table, EPS, 1.0, over, case.layout, case.pairing)
    opcheck(NORM, (heads, *rest))
    if not requires_grad:
        opcheck(NORM_, (heads, *rest))
        gradients = [torch.randn_like(x) for x in heads]
        opcheck(BACKWARD, (gradients, heads, *rest))
        opcheck(BACKWARD, (gradients, heads, *rest), {"wants_weights": False})


def test_schemas_say_what_is_written():
    assert not NORM._schema.is_mutable
    assert [argument.name for argument in NORM_._schema.arguments if argument.is_write] == ["heads"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("over", OVERS)
def test_compiled_forward_and_backward(device, over, dynamic):
    torch._dynamo.reset()

    def scores(q, k, q_weight, k_weight, positions, table):
        q, k = mrrope.qk_norm_rotary(2.0 * q, k + 1.0, q_weight, k_weight, positions, table, eps=EPS, over=over)
        return (q[:, :2] * k).sum(-1)

    compiled = torch.compile(scores, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 9):
        case = Case(tokens=tokens, dtype=torch.float64)
        tensors = (*case.heads_on(device), *weights_of(case, over, device))
        results = []
        for function in (scores, compiled):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = function(*leaves, case.positions(device), case.table().to(device))
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)
    torch._dynamo.reset()


def test_compiled_in_place(device):
    torch._dynamo.reset()
    case = Case()
    (expected, _), heads, weights, positions, table = call(case, "head", device)

    def in_place(q, k, q_weight, k_weight):
        mrrope.qk_norm_rotary_(q, k, q_weight, k_weight, positions, table.to(device), eps=EPS)
        return q + 0.0

    compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*heads, *weights), expected)
    assert torch.equal(heads[0], expected)
    torch._dynamo.reset()


# --- on a GPU ---


@pytest.mark.parametrize("over", OVERS)
def test_graph_capture(cuda, over):
    case = Case(tokens=70, heads=(8, 2), head_dim=128, rotary_dim=128, dtype=torch.bfloat16)
    heads, weights = case.heads_on(cuda), weights_of(case, over, cuda)
    positions, table = case.positions(cuda), case.table().to(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mrrope.qk_norm_rotary(*heads, *weights, positions, table, eps=EPS, over=over)
    for x in (*heads, *weights):
        x.normal_()
    positions += 1000
    graph.replay()
    torch.cuda.synchronize()
    expected = mrrope.qk_norm_rotary(*heads, *weights, positions, table, eps=EPS, over=over)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_runs_on_the_current_stream(cuda):
    case = Case(tokens=70, heads=(8, 2), head_dim=128, rotary_dim=128, dtype=torch.bfloat16)
    heads, weights = case.heads_on(cuda), weights_of(case, "head", cuda)
    positions, table = case.positions(cuda), case.table().to(cuda)
    expected = mrrope.qk_norm_rotary(*heads, *weights, positions, table, eps=EPS)
    late = [torch.zeros_like(x) for x in heads]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # on the default stream, the op would read zeros
        for x, y in zip(late, heads, strict=True):
            x.copy_(y)
        found = mrrope.qk_norm_rotary(*late, *weights, positions, table, eps=EPS)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# --- against transformers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["qwen3", "gemma3", "olmo2"])
@torch.no_grad()
def test_against_transformers(model, dtype):
    """Within the intermediate rounding of the model's own norm and rotation, and closer to float64 than they are."""
    pytest.importorskip("transformers")
    import importlib

    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    case = Case(dtype=dtype, tokens=33, heads=(4, 2), head_dim=32, rotary_dim=32, positions_shape="broadcast", reach=50)
    over = "all_heads" if model == "olmo2" else "head"
    heads, weights = case.heads_on("cpu"), weights_of(case, over, "cpu")
    positions, table = case.positions("cpu"), case.table()
    offset = 1.0 if model == "gemma3" else 0.0
    norm_class = {"qwen3": "Qwen3RMSNorm", "gemma3": "Gemma3RMSNorm", "olmo2": "Olmo2RMSNorm"}[model]
    stock = []
    for x, weight in zip(heads, weights, strict=True):
        norm = getattr(modeling, norm_class)(weight.numel(), eps=EPS).to(dtype)
        norm.weight.data.copy_(weight)
        if over == "all_heads":
            stock.append(norm(x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2))
        else:
            stock.append(norm(x))
    angles = positions[..., None].double() * table.inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = ((f(angles) * table.attention_factor).to(dtype) for f in (torch.cos, torch.sin))
    stock = modeling.apply_rotary_pos_emb(*stock, cos, sin)
    found = mrrope.qk_norm_rotary(*heads, *weights, positions, table, eps=EPS, weight_offset=offset, over=over)
    for got, want, x, weight in zip(found, stock, heads, weights, strict=True):
        exact = rotated(normed(x.double(), weight.double(), over, "bhsd", offset), positions, table)

        def error(y, exact=exact):
            return float((y.double() - exact).norm() / exact.norm())

        assert error(got) <= error(want)
        assert (got - want).double().norm() / exact.norm() < 4 * torch.finfo(dtype).eps


# --- errors ---


def good_call() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 4, 3, 8, generator=generator),
        "k": torch.randn(2, 2, 3, 8, generator=generator),
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
        "positions": torch.arange(3),
        "table": table_of("yarn", 8),
        "eps": EPS,
    }


BAD_CALLS = {
    "over": ({"over": "token"}, ValueError, ["over must be one of head, all_heads", "'token'"]),
    "eps negative": ({"eps": -1.0}, ValueError, ["eps must be finite and not negative", "-1"]),
    "eps nan": ({"eps": float("nan")}, ValueError, ["eps must be finite"]),
    "offset": ({"weight_offset": float("inf")}, ValueError, ["weight_offset must be finite"]),
    "weight of another size": ({"k_weight": torch.ones(7)}, ValueError, ["k_weight must be [8]", "head_dim", "[7]"]),
    "weights of one head": ({"over": "all_heads"}, ValueError, ["q_weight must be [32]", "heads * head_dim", "[8]"]),
    "weight matrix": ({"q_weight": torch.ones(4, 8)}, ValueError, ["q_weight must have one dimension", "2"]),
    "weight dtype": ({"q_weight": torch.ones(8).double()}, TypeError, ["q_weight must have q's dtype", "Double"]),
    "weight device": ({"q_weight": torch.ones(8, device="meta")}, RuntimeError, ["q_weight must be on", "meta"]),
    "no weight": ({"q_weight": None}, TypeError, ["q_weight must be a tensor, got NoneType"]),
    "no weight for k": ({"k_weight": None}, TypeError, ["k_weight must be a tensor where k is one, got NoneType"]),
    "a weight without k": ({"k": None}, TypeError, ["k_weight must be None where k is, got Tensor"]),
    "k dtype": ({"k": torch.ones(2, 2, 3, 8).half()}, TypeError, ["k must have q's dtype", "Half"]),
    "layout": ({"layout": "hbsd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "'hbsd'"]),
    "pairing": ({"pairing": "thirds"}, ValueError, ["pairing must be one of halves, interleaved"]),
    "index": ({"table_index": 0}, TypeError, ["table_index must be a tensor or None, got int"]),
}


@pytest.mark.parametrize("op", [mrrope.qk_norm_rotary, mrrope.qk_norm_rotary_])
@pytest.mark.parametrize(("changes", "error", "texts"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused(op, changes, error, texts):
    arguments = good_call() | changes
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    assert_refused(lambda: op(**arguments), error, *texts)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


def test_weights_that_would_be_overwritten_are_refused():
    q = torch.randn(1, 1, 1, 16)
    with pytest.raises(RuntimeError, match="q and q_weight must not share memory"):
        mrrope.qk_norm_rotary_(q, None, q.view(-1), None, torch.arange(1), table_of("yarn", 16), eps=EPS)


def test_fake_gradients_are_checked_as_real_ones_are():
    heads, weights = [torch.ones(1, 1, 2, 16, device="meta")], [torch.ones(16, device="meta")]
    positions = torch.arange(2, device="meta")
    table = torch.ones(9, dtype=torch.int64, device="meta")
    rest = (heads, weights, positions, table, EPS, 0.0, "head", "bhsd", "halves", False, None, True)
    with pytest.raises(ValueError, match="gradients must be one for each"):
        torch.ops.mrrope.qk_norm_rotary_backward([], *rest)
    with pytest.raises(TypeError, match=r"gradients\[0\] must have the dtype"):
        torch.ops.mrrope.qk_norm_rotary_backward([heads[0].half()], *rest)
