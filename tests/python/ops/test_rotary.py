"""rotary in PyTorch: schemas, autograd, torch.compile, modes, streams and CUDA graphs."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from rotary_cases import DTYPES, LAYOUTS, PAIRINGS, Case, onto, storage_of, table_of
from rotary_reference import assert_rotated, plain_rotary
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import mrrope

ROTARY = torch.ops.mrrope.rotary.default
ROTARY_ = torch.ops.mrrope.rotary_.default
DYNAMIC = [False, True, None]


def inputs(case: Case, device: str):
    return *case.heads_on(device), case.positions(device), case.table()


def double_inputs(device: str, **changes):
    """Return small float64 q and k that require grad, positions and a table."""
    q, k, positions, table = inputs(Case(dtype=torch.float64, tokens=3, head_dim=8, rotary_dim=8, **changes), device)
    return q.requires_grad_(), k if k is None else k.requires_grad_(), positions, table


# --- schemas and fake kernels ---


OPCHECKED = {
    "plain": Case(),
    "q alone": Case(heads=(3, None)),
    "partial": Case(layout="thd", rotary_dim=12, position_dtype=torch.int32),
    "transposed": Case(layout="bshd", pairing="interleaved", memory="transposed", dtype=torch.bfloat16),
    "broadcast": Case(memory="padded", dtype=torch.float64, positions_shape="broadcast"),
    "empty": Case(tokens=0, positions_shape="row"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck_rotary(device, case, requires_grad):
    q, k, positions, table = inputs(case, device)
    heads = [x.requires_grad_(requires_grad) for x in (q, k) if x is not None]
    opcheck(ROTARY, (heads, positions, table.packed(q.device), case.layout, case.pairing))
    opcheck(ROTARY, (heads, positions, table.packed(q.device), case.layout, case.pairing), {"conjugate": True})


@pytest.mark.parametrize("case", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck_rotary_in_place(device, case):
    q, k, positions, table = inputs(case, device)
    heads = [x for x in (q, k) if x is not None]
    opcheck(ROTARY_, (heads, positions, table.packed(q.device), case.layout, case.pairing))


def test_schemas_say_what_is_written():
    assert not ROTARY._schema.is_mutable
    (mutated,) = [argument.name for argument in ROTARY_._schema.arguments if argument.is_write]
    assert mutated == "heads"


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "padded", "sliced", "expanded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors_match_real_ones(device, layout, memory):
    q, k, positions, table = inputs(Case(layout=layout, memory=memory, dtype=torch.float16), device)
    real = ROTARY([q, k], positions, table.packed(q.device), layout)
    meta = ROTARY([q.to("meta"), k.to("meta")], positions.to("meta"), table.packed(q.device).to("meta"), layout)
    assert len(real) == len(meta) == 2
    for x, actual, expected in zip((q, k), meta, real, strict=True):
        assert actual.is_meta
        assert actual.dtype == expected.dtype == x.dtype
        if memory in ("contiguous", "transposed"):
            # .to("meta") keeps only the strides of dense tensors.
            assert actual.stride() == expected.stride() == x.stride()
        assert actual.shape == expected.shape == x.shape


def test_meta_tensors_go_through_the_python_functions():
    q, positions = torch.empty(1, 2, 3, 8, device="meta"), torch.empty(3, device="meta").long()
    table = table_of("pi", 8)
    result, nothing = mrrope.rotary(q, None, positions, table)
    assert result.is_meta
    assert nothing is None
    assert mrrope.rotary_(q, None, positions, table)[0] is q


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "padded"])
def test_fake_tensors_have_the_strides_of_real_ones(device, memory):
    q, k, positions, table = inputs(Case(memory=memory), device)
    real = mrrope.rotary(q, k, positions, table.to(device))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mrrope.rotary(*(mode.from_tensor(x) for x in (q, k, positions)), table)
    for actual, expected in zip(fake, real, strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert actual.device == expected.device


# --- autograd ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_gradcheck(device, layout, pairing, rotary_dim):
    q, k, positions, _ = double_inputs(device, layout=layout, batch=1, heads=(2, 1))
    table = table_of("mrrope_pro", rotary_dim)

    def op(q, k):
        return mrrope.rotary(q, k, positions, table, layout, pairing)

    assert gradcheck(op, (q, k))
    assert gradgradcheck(op, (q, k))


def test_gradcheck_in_place(device):
    q, k, positions, table = double_inputs(device, batch=1, heads=(2, 1))

    def op(q, k):
        return mrrope.rotary_(q * 1.0, k * 1.0, positions, table)

    assert gradcheck(op, (q, k))
    assert gradgradcheck(op, (q, k))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_is_the_plain_one(device, pairing):
    q, _, positions, table = double_inputs(device, positions_shape="row")
    weights = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(0)).to(device)
    (actual,) = torch.autograd.grad((mrrope.rotary(q, None, positions, table, "bhsd", pairing)[0] * weights).sum(), q)
    (expected,) = torch.autograd.grad((plain_rotary(q, positions, table, pairing) * weights).sum(), q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_the_rotation_back(device, dtype):
    case = Case(dtype=dtype, rotary_dim=12)
    q, k, positions, table = inputs(case, device)
    grads = case.with_changes(seed=7).heads_on(device)
    result = mrrope.rotary(q.requires_grad_(), k.requires_grad_(), positions, table)
    torch.autograd.backward(result, grads)
    for x, grad in zip((q, k), grads, strict=True):
        assert_rotated(x.grad, grad, positions, table, conjugate=True)


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_only_one_requires_grad(device, wanted):
    q, k, positions, table = double_inputs(device)
    (k if wanted == "q" else q).requires_grad_(False)
    result_q, result_k = mrrope.rotary(q, k, positions, table)
    (result_q.square().sum() + 3 * result_k.square().sum()).backward()
    # Rotations preserve norms, so the gradient of the squared norm is twice the vector.
    gain = table.attention_factor**2
    x, factor, other = (q, 2 * gain, k) if wanted == "q" else (k, 6 * gain, q)
    torch.testing.assert_close(x.grad, factor * x.detach(), rtol=1e-13, atol=1e-13)
    assert other.grad is None


def test_an_output_that_is_not_used(device):
    q, k, positions, table = double_inputs(device)
    mrrope.rotary(q, k, positions, table)[1].sum().backward()
    assert q.grad is None
    assert k.grad is not None


def test_no_k(device):
    q, _, positions, table = double_inputs(device, heads=(4, None))
    result, nothing = mrrope.rotary(q, None, positions, table)
    assert nothing is None
    result.sum().backward()
    assert_rotated(q.grad, torch.ones_like(q), positions, table, conjugate=True)


@pytest.mark.parametrize("memory", ["transposed", "sliced", "expanded"])
def test_gradients_with_any_strides(device, memory):
    q, _, positions, table = double_inputs(device, heads=(4, None))
    grad = storage_of(q.shape, memory, q.dtype)
    distinct = grad[:1] if memory == "expanded" else grad
    distinct.copy_(torch.randn(distinct.shape, generator=torch.Generator().manual_seed(0), dtype=q.dtype))
    grad = onto(device, grad)
    mrrope.rotary(q, None, positions, table)[0].backward(grad)
    assert_rotated(q.grad, grad, positions, table, conjugate=True)


def test_gradient_with_a_strided_last_dimension(device):
    q, _, positions, table = double_inputs(device, heads=(4, None))
    grad = torch.randn(*q.shape[:-1], 2 * q.shape[-1], dtype=q.dtype)[..., ::2].to(device)
    mrrope.rotary(q, None, positions, table)[0].backward(grad)
    assert_rotated(q.grad, grad, positions, table, conjugate=True)


def test_in_place_on_what_has_a_history(device):
    leaves = [x.requires_grad_() for x in double_inputs(device)[:2]]
    *_, positions, table = double_inputs(device)
    q, k = (2 * x for x in leaves)
    result = mrrope.rotary_(q, k, positions, table)
    assert result[0] is q
    (result[0].sum() + result[1].sum()).backward()
    for leaf in leaves:
        assert_rotated(leaf.grad, torch.full_like(leaf, 2.0), positions, table, conjugate=True)


def test_in_place_on_a_view_reaches_its_base(device):
    leaf = torch.randn(1, 3, 6, 8, dtype=torch.float64, device=device, requires_grad=True)
    whole, positions, table = leaf * 1.0, torch.arange(3, device=device), table_of("yarn", 8)
    q, k = whole[:, :, :4].transpose(1, 2), whole[:, :, 4:].transpose(1, 2)
    mrrope.rotary_(q, k, positions, table)
    whole.sum().backward()
    assert_rotated(leaf.grad, torch.ones_like(leaf), positions, table, "bshd", conjugate=True)


def test_rotary_in_place_bumps_the_versions(device):
    q, k, positions, table = inputs(Case(), device)
    before = q._version, k._version, positions._version
    mrrope.rotary(q, k, positions, table)
    assert (q._version, k._version, positions._version) == before
    mrrope.rotary_(q, k, positions, table)
    assert (q._version, k._version, positions._version) == (before[0] + 1, before[1] + 1, before[2])


def test_autograd_notices_that_a_saved_tensor_was_rotated(device):
    q, _, positions, table = inputs(Case(), device)
    weight = torch.ones_like(q, requires_grad=True)
    product = weight * q
    mrrope.rotary_(q, None, positions, table)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_autograd_notices_that_the_positions_changed(device):
    q, _, positions, table = double_inputs(device)
    result, _ = mrrope.rotary(q, None, positions, table)
    positions += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_forward_mode_is_refused_not_dropped(device):
    q, _, positions, table = inputs(Case(), device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            mrrope.rotary(dual, None, positions, table)


def test_no_gradient_no_graph(device):
    q, k, positions, table = double_inputs(device)
    with torch.no_grad():
        result = mrrope.rotary(q, k, positions, table)
        assert not any(x.requires_grad for x in result)
        mrrope.rotary_(q, k, positions, table)
    for actual, expected in zip((q, k), result, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(device, made_inside):
    q, k, positions, table = inputs(Case(), device)
    expected = mrrope.rotary(q, k, positions, table)
    with torch.inference_mode():
        if made_inside:
            q, k, positions = q.clone(), k.clone(), positions.clone()
        result = mrrope.rotary(q, k, positions, table)
        mrrope.rotary_(q, k, positions, table)
    assert all(x.is_inference() for x in result)
    for results in (result, (q, k)):
        for actual, wanted in zip(results, expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtype(device, dtype):
    q, k, positions, table = inputs(Case(dtype=dtype), device)
    expected = mrrope.rotary(q, k, positions, table)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = mrrope.rotary(q, k, positions, table)
    for actual, wanted in zip(result, expected, strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, wanted)


# --- torch.compile ---


def scores(q, k, positions, table):
    """Return a function with ops before and after the rotation, as in a model."""
    q, k = mrrope.rotary(q * 2.0, k + 1.0, positions, table)
    return (q[:, :2] * k).sum(-1)


def scores_in_place(q, k, positions, table):
    q, k = q * 2.0, k + 1.0
    mrrope.rotary_(q, k, positions, table)
    return (q[:, :2] * k).sum(-1)


def rotate_argument(q, k, positions, table):
    mrrope.rotary_(q, k, positions, table, "bhsd", "interleaved")
    return q.sum(-1)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("function", [scores, scores_in_place])
def test_compile_forward_and_backward(device, function, dynamic):
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 9, 12):
        q, k, positions, table = inputs(Case(tokens=tokens, dtype=torch.float64), device)
        results = []
        for f in (function, compiled):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            out = f(*leaves, positions, table.to(device))
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_compile_in_place_changes_the_arguments(device, dynamic):
    compiled = torch.compile(rotate_argument, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 9):
        q, k, positions, table = inputs(Case(tokens=tokens), device)
        ours, theirs = [q.clone(), k.clone()], [q.clone(), k.clone()]
        torch.testing.assert_close(
            compiled(*theirs, positions, table.to(device)), rotate_argument(*ours, positions, table)
        )
        for actual, expected in zip(theirs, ours, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("warm", [True, False])
def test_compile_does_not_bake_the_table_in(device, warm):
    @torch.compile(fullgraph=True)
    def rotate(q, k, positions, table):
        return mrrope.rotary(q, k, positions, table)

    q, k, positions, _ = inputs(Case(), device)
    for method in ("mrrope_pro", "rope", "yarn", "mrrope_pro"):
        # A new table has no copy on the device until .to puts one there.
        table = table_of(method, 16)
        table = table.to(device) if warm else table
        for x, result in zip((q, k), rotate(q, k, positions, table), strict=True):
            assert_rotated(result, x, positions, table)


@pytest.mark.usefixtures("dynamo")
def test_compile_with_a_table_in_a_module(device):
    class Attention(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, q, k, positions):
            return mrrope.rotary(q, k, positions, self.table)

    q, k, positions, _ = inputs(Case(), device)
    module = Attention(table_of("yarn", 16))
    compiled = torch.compile(module, fullgraph=True)
    for method in ("yarn", "pi"):
        module.table = table_of(method, 16)
        for x, result in zip((q, k), compiled(q, k, positions), strict=True):
            assert_rotated(result, x, positions, module.table)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compile_only_once(device, dynamo, dynamic):
    counter = dynamo.testing.CompileCounter()
    compiled = torch.compile(scores, fullgraph=True, dynamic=dynamic, backend=counter)
    for seed in range(3):
        q, k, positions, table = inputs(Case(seed=seed), device)
        compiled(q, k, positions, table.to(device))
    assert counter.frame_count == 1
    q, k, positions, table = inputs(Case(tokens=11), device)
    compiled(q, k, positions, table.to(device))
    assert counter.frame_count == (1 if dynamic else 2)


def test_export(device):
    class Rotation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table_of("mrrope_pro", 16).to(device)

        def forward(self, q, k, positions):
            return mrrope.rotary(q, k, positions, self.table)

    q, k, positions, table = inputs(Case(), device)
    program = torch.export.export(Rotation(), (q, k, positions))
    for x, result in zip((q, k), program.module()(q, k, positions), strict=True):
        assert_rotated(result, x, positions, table)


# --- tables on devices ---


@pytest.mark.parametrize("travel", [copy.deepcopy, copy.copy, lambda table: pickle.loads(pickle.dumps(table))])
def test_tables_work_after_a_journey(device, travel):
    q, k, positions, table = inputs(Case(), device)
    expected = mrrope.rotary(q, k, positions, table)
    for actual, wanted in zip(mrrope.rotary(q, k, positions, travel(table)), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_table_goes_to_a_device_once(device):
    table = table_of("yarn", 16)
    assert table.to(device) is table
    where = torch.empty(0, device=device).device
    assert table.packed(where).device == where
    assert table.packed(where) is table.packed(where)
    assert table.packed(where).tolist()[:-1] == table.turns.tolist()


def test_import_leaves_transformers_alone(tmp_path):
    code = "import sys, mrrope; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


# --- CUDA ---


def test_graph_capture_and_replay(cuda):
    q, k, positions, table = inputs(Case(dtype=torch.bfloat16), cuda)
    table.to(cuda)
    mrrope.rotary(q, k, positions, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mrrope.rotary(q, k, positions, table)
    for seed in (3, 4):
        changed = Case(dtype=torch.bfloat16, seed=seed)
        for x, value in zip((q, k), changed.heads_on(cuda), strict=True):
            x.copy_(value)
        positions.copy_(changed.positions(cuda))
        graph.replay()
        for x, actual in zip((q, k), result, strict=True):
            assert_rotated(actual, x, positions, table)


def test_graph_capture_in_place(cuda):
    q, k, positions, table = inputs(Case(), cuda)
    table.to(cuda)
    before = q.clone(), k.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mrrope.rotary_(q, k, positions, table)
    assert torch.equal(q, before[0])
    graph.replay()
    for x, actual in zip(before, (q, k), strict=True):
        assert_rotated(actual, x, positions, table)


@pytest.mark.parametrize("in_place", [False, True])
def test_runs_on_the_current_stream(cuda, in_place):
    q, k, positions, table = inputs(Case(), cuda)
    table.to(cuda)
    op = mrrope.rotary_ if in_place else mrrope.rotary
    expected = mrrope.rotary(q, k, positions, table)
    late_q, late_k = torch.zeros_like(q), torch.zeros_like(k)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The inputs are written late on this stream, so that a kernel on another stream would read zeros.
        torch.cuda._sleep(200_000_000)
        late_q.copy_(q)
        late_k.copy_(k)
        result = op(late_q, late_k, positions, table)
    stream.synchronize()
    for actual, wanted in zip(result, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.usefixtures("cuda")
def test_runs_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    q, k, positions, table = inputs(Case(), "cuda:1")
    assert torch.cuda.current_device() == 0
    for x, result in zip((q, k), mrrope.rotary(q, k, positions, table), strict=True):
        assert_rotated(result, x, positions, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_cuda_agrees_with_the_cpu(cuda, dtype, position_dtype):
    case = Case(dtype=dtype, position_dtype=position_dtype, tokens=130, head_dim=128, rotary_dim=128)
    q, k, positions, table = inputs(case, "cpu")
    on_cpu = mrrope.rotary(q, k, positions, table)
    on_cuda = mrrope.rotary(*(x.to(cuda) for x in (q, k, positions)), table)
    eps = torch.finfo(dtype).eps
    for actual, expected in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=eps, atol=4 * eps if dtype == torch.float64 else 2e-6)


def test_a_table_first_used_in_inference_mode_can_train_later(device):
    with torch.inference_mode():
        table = table_of("yarn", 8)
        mrrope.rotary(torch.randn(1, 2, 3, 8, device=device), None, torch.arange(3, device=device), table)
    q = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    mrrope.rotary(q, None, torch.arange(3, device=device), table)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    ("make_k", "text"),
    [
        (lambda x: x[:, :1].expand(-1, 4, -1, -1), "k must not overlap itself"),
        (lambda x: x, "q and k must not share memory"),
        (lambda x: torch.randn_like(x, requires_grad=True)[:], "k is a view of a leaf tensor"),
    ],
    ids=["expanded", "the same tensor", "view of a leaf"],
)
def test_in_place_with_gradients_refuses_before_it_writes(make_k, text):
    q = torch.randn(1, 4, 3, 8, requires_grad=True) * 1.0
    before = q.detach().clone()
    with pytest.raises(RuntimeError, match=text):
        mrrope.rotary_(q, make_k(q), torch.arange(3), table_of("yarn", 8))
    assert torch.equal(q, before)
