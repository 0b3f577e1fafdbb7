"""qkv_rotary: accuracy against float64, gradients, schemas, torch.compile, autocast and errors."""

import math

import pytest
import torch
from op_errors import assert_refused
from rotary_cases import DTYPES, LAYOUTS, PAIRINGS, table_of
from rotary_reference import TOLERANCES, rotated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.nn.functional import linear

import mrrope
from mrrope.ops.qkv_rotary import deinterleave_heads, interleave_heads, pack_qkv, unpack_qkv

OP = torch.ops.mrrope.qkv_rotary.default
LARGEST = 2**31 - 1
TABLE = table_of("mrrope_pro", 16)


class Call:
    """One call: random tensors and a table."""

    def __init__(
        self,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch: int = 2,
        tokens: int = 5,
        inputs: int = 24,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        rotary_dim: int | None = None,
        layout: str = "bhsd",
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

        self.heads, self.layout = heads, layout
        rows = (tokens,) if layout == "thd" else (batch, tokens)
        outputs = (heads[0] + 2 * heads[1]) * head_dim
        self.x = random(*rows, inputs)
        self.weight = random(outputs, inputs)
        self.bias = random(outputs) if bias else None
        self.positions = torch.randint(0, LARGEST, rows, generator=generator).to(device)
        self.positions.view(-1)[-1] = LARGEST
        self.table = table_of("mrrope_pro", rotary_dim or head_dim)

    def run(self, **options):
        given = self.x, self.weight, self.bias, self.positions, self.table, *self.heads
        return mrrope.qkv_rotary(*given, **{"layout": self.layout} | options)

    def op_arguments(self, pairing: str = "halves"):
        packed = self.table.packed(self.x.device)
        return self.x, self.weight, self.bias, self.positions, packed, *self.heads, pairing

    def exact(self, pairing: str = "halves"):
        """Return (q, k, v) in float64, the unrotated projections, and the size of each component's summands."""
        x, weight = (t.detach().cpu().double() for t in (self.x, self.weight))
        bias = torch.zeros(len(weight), dtype=torch.float64) if self.bias is None else self.bias.detach().cpu().double()
        results = []
        for product in (linear(x, weight, bias), linear(x.abs(), weight.abs(), bias.abs())):
            parts = product.unflatten(-1, (self.heads[0] + 2 * self.heads[1], -1)).split(
                [self.heads[0], self.heads[1], self.heads[1]], dim=-2
            )
            results.append([part.transpose(1, 2) if self.layout == "bhsd" else part for part in parts])
        projected, sizes = results
        result = [rotated(part, self.positions, self.table, self.layout, pairing) for part in projected[:2]]
        return [*result, projected[2]], projected, sizes

    def assert_right(self, found, pairing: str = "halves") -> None:
        """Assert one rounding of the product, one of the rotation, and the float32 summation error, per component."""
        expected, projected, sizes = self.exact(pairing)
        dtype = self.x.dtype
        tolerance = TOLERANCES[dtype]
        arithmetic = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (self.x.shape[-1] + 16)
        for i, (got, want) in enumerate(zip(found, expected, strict=True)):
            assert (got.shape, got.dtype, got.device) == (want.shape, dtype, self.x.device)
            # A pair's norm bounds the rotated errors of its two components.
            spread = partner_norm(projected[i], self.table.rotary_dim, pairing) if i < 2 else projected[i].abs()
            size = partner_norm(sizes[i], self.table.rotary_dim, pairing) if i < 2 else sizes[i]
            gain = self.table.attention_factor if i < 2 else 1.0
            allowed = gain * (tolerance.rounding * spread + (arithmetic + tolerance.arithmetic) * size)
            allowed = allowed + tolerance.rounding * want.abs() + torch.finfo(dtype).smallest_normal
            excess = (got.detach().cpu().double() - want).abs() - allowed
            assert (excess <= 0).all(), f"{'qkv'[i]}: {(excess > 0).sum()} off, by up to {excess.max():.3g} too much"


def partner_norm(x: torch.Tensor, rotary_dim: int, pairing: str) -> torch.Tensor:
    """Return the norm of every component's pair; the absolute value of components that are not rotated."""
    pairs, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    if pairing == "halves":
        first, second = pairs.chunk(2, dim=-1)
        norms = torch.hypot(first, second).repeat(*[1] * (x.dim() - 1), 2)
    else:
        norms = torch.hypot(pairs[..., ::2], pairs[..., 1::2]).repeat_interleave(2, dim=-1)
    return torch.cat([norms, tail.abs()], dim=-1)


# --- numbers ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(device, dtype, layout, pairing):
    for rotary_dim, bias in ((16, True), (8, False)):
        call = Call(device, dtype, layout=layout, rotary_dim=rotary_dim, bias=bias)
        call.assert_right(call.run(pairing=pairing), pairing)


def assert_fused(call: Call, kernel: str) -> None:
    """Assert that the fused kernel runs on a GPU that supports it."""
    if torch.cuda.get_device_capability() == (9, 0):
        index, *_ = torch.ops.mrrope.qkv_rotary_plan.default(*call.op_arguments(kernel.split()[0]))
        assert index >= 0
        assert torch.ops.mrrope.qkv_rotary_kernels.default()[index] == kernel


FUSED = {
    "halves": {"tokens": 2048, "inputs": 256, "heads": (32, 8)},
    "halves transposed": {"tokens": 8192, "inputs": 4096, "heads": (8, 1)},
    "interleaved": {"tokens": 8192, "inputs": 4096, "heads": (8, 1)},
}
"""Shapes that are rotated inside the product, by kernel."""


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows(cuda, dtype, kernel):
    call = Call(cuda, dtype, batch=1, head_dim=128, **FUSED[kernel])
    assert_fused(call, kernel)
    pairing = kernel.split()[0]
    call.assert_right(call.run(pairing=pairing), pairing)


@pytest.mark.parametrize("kernel", ["halves", "interleaved"])
def test_many_rows_of_which_a_part_rotates(cuda, kernel):
    call = Call(cuda, torch.float16, batch=1, head_dim=128, rotary_dim=64, **FUSED["interleaved"])
    assert_fused(call, kernel)
    call.assert_right(call.run(pairing=kernel), kernel)


@pytest.mark.parametrize("kernel", ["halves", "halves transposed"])
def test_rows_with_gaps_between_them(cuda, kernel):
    call = Call(cuda, torch.bfloat16, batch=1, head_dim=128, **FUSED[kernel])
    want = call.run()
    for name in ("x", "weight"):
        rows = getattr(call, name)
        padded = torch.full((*rows.shape[:-1], rows.shape[-1] + 8), math.nan, dtype=rows.dtype, device=cuda)
        padded[..., : rows.shape[-1]] = rows
        setattr(call, name, padded[..., : rows.shape[-1]])
    assert_fused(call, kernel)
    for got, expected in zip(call.run(), want, strict=True):
        assert torch.equal(got, expected)


def test_small_m_is_not_fused(cuda):
    call = Call(cuda, torch.bfloat16, batch=1, tokens=256, inputs=256, heads=(32, 8), head_dim=128)
    index, *_ = torch.ops.mrrope.qkv_rotary_plan.default(*call.op_arguments())
    assert index < 0


def test_rows_that_overlap(device):
    """One row for all tokens, and overlapping rows."""
    call = Call(device)
    row = call.x[:, :1].clone()
    long = torch.randn(5 + call.x.shape[-1], device=device)
    for x in (row.expand(2, 5, -1), long.unfold(0, call.x.shape[-1], 1)[None, :5].expand(2, -1, -1)):
        call.x = x.contiguous()
        want = call.run()
        call.x = x
        for got, expected in zip(call.run(), want, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_kernel_rounds_once(cuda, dtype):
    """In Frobenius norm over many components. Product and rotation unfused would round twice."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90a")
    call = Call(cuda, dtype, 1, 1000, inputs=512, heads=(4, 1), head_dim=128)
    for kernel, name in enumerate(torch.ops.mrrope.qkv_rotary_kernels.default()):
        pairing = name.split()[0]
        packed = torch.ops.mrrope.qkv_rotary_planned.default(*call.op_arguments(pairing), [kernel, 4, 0])
        found = [part.transpose(1, 2) for part in mrrope.ops.qkv_rotary.split_qkv(packed, *call.heads)]
        call.assert_right(found, pairing)
        for got, want in zip(found, call.exact(pairing)[0], strict=True):
            error = float((got.cpu().double() - want).norm() / want.norm())
            assert error < TOLERANCES[dtype].frobenius, name


def test_the_same_as_product_and_rotation(device):
    call = Call(device, torch.float64)
    product = linear(call.x, call.weight, call.bias).unflatten(-1, (8, 16)).transpose(1, 2)
    q, k, v = call.run()
    want_q, want_k = mrrope.rotary(product[:, :4], product[:, 4:6], call.positions, call.table)
    for got, want in ((q, want_q), (k, want_k), (v, product[:, 6:])):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_results_are_views_of_one_tensor(device):
    q, k, v = Call(device).run()
    assert len({part.untyped_storage().data_ptr() for part in (q, k, v)}) == 1


@pytest.mark.parametrize("shape", ["row", "broadcast"])
def test_positions_for_all_sequences(device, shape):
    call = Call(device)
    call.positions = call.positions[0] if shape == "row" else call.positions[:1]
    got = call.run()
    call.positions = call.positions.view(1, -1).expand(2, -1).contiguous()
    for a, b in zip(got, call.run(), strict=True):
        assert torch.equal(a, b)


def test_int32_positions(device):
    call = Call(device)
    want = call.run()
    call.positions = call.positions.int()
    for got, expected in zip(call.run(), want, strict=True):
        assert torch.equal(got, expected)


def test_a_table_for_each_sequence(device):
    call = Call(device)
    tables = [table_of("rope", 16), table_of("yarn", 16)]
    call.table = tables
    together = call.run()
    for i, table in enumerate(tables):
        call.table = table
        for got, want in zip(together, call.run(), strict=True):
            torch.testing.assert_close(got[i], want[i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("memory", ["transposed", "sliced", "padded"])
def test_any_strides(device, memory):
    call = Call(device)
    want = call.run()
    if memory == "transposed":
        call.x = call.x.transpose(0, 1).contiguous().transpose(0, 1)
        call.weight = call.weight.t().contiguous().t()
    elif memory == "sliced":
        call.x = call.x.repeat_interleave(2, dim=1)[:, ::2]
        call.bias = call.bias.repeat_interleave(2)[::2]
    else:
        call.x = torch.cat([call.x, call.x], dim=-1)[..., : call.x.shape[-1]]
        call.weight = torch.cat([call.weight, call.weight], dim=1)[:, : call.weight.shape[1]]
    for got, expected in zip(call.run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(device, tokens):
    call = Call(device, tokens=1)
    call.x, call.positions = call.x[:, :tokens], call.positions[:, :tokens]
    found = call.run()
    assert [tuple(part.shape) for part in found] == [(2, heads, tokens, 16) for heads in (4, 2, 2)]
    if tokens:
        call.assert_right(found)


# --- weights ---


def test_interleaved_weights_give_the_same_scores(device):
    """q and k permuted alike have the same products."""
    call = Call(device, torch.float64, rotary_dim=8)
    q, k, v = call.run()
    for name in ("weight", "bias"):
        parts = unpack_qkv(getattr(call, name), *call.heads)
        both = [interleave_heads(p, n, 8) for p, n in zip(parts, call.heads, strict=False)]
        setattr(call, name, pack_qkv(*both, parts[2]))
    q2, k2, v2 = call.run(pairing="interleaved")
    torch.testing.assert_close(q2[:, ::2] @ k2.mT, q[:, ::2] @ k.mT, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(q2, q)
    assert torch.equal(v2, v)


@pytest.mark.parametrize("rotary_dim", [None, 2, 6, 16])
def test_interleaving_is_undone(rotary_dim):
    weight = torch.randn(4 * 16, 3)
    interleaved = interleave_heads(weight, 4, rotary_dim)
    half = (rotary_dim or 16) // 2
    assert torch.equal(interleaved[16], weight[16])
    assert torch.equal(interleaved[17], weight[16 + half])
    assert torch.equal(deinterleave_heads(interleaved, 4, rotary_dim), weight)


def test_packing_is_undone():
    q, k, v = torch.randn(32, 3), torch.randn(8, 3), torch.randn(8, 3)
    for got, want in zip(unpack_qkv(pack_qkv(q, k, v), 4, 1), (q, k, v), strict=True):
        assert torch.equal(got, want)


# --- gradients ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(device, layout, pairing):
    call = Call(device, torch.float64, tokens=2, inputs=3, heads=(2, 1), head_dim=6, rotary_dim=4, layout=layout)
    packed = call.table.packed(call.x.device)

    def run(x, weight, bias):
        return OP(x, weight, bias, call.positions, packed, *call.heads, pairing)

    leaves = [t.requires_grad_() for t in (call.x, call.weight, call.bias)]
    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves)
    assert gradcheck(run, [*leaves[:2], None]), "without a bias"


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_what_is_wanted_gets_a_gradient(device, wanted):
    call = Call(device)
    getattr(call, wanted).requires_grad_()
    sum(part.sum() for part in call.run()).backward()
    for name in ("x", "weight", "bias"):
        assert (getattr(call, name).grad is not None) == (name == wanted)


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_opcheck(device, layout):
    call = Call(device, layout=layout)
    opcheck(OP, call.op_arguments())
    x, weight, bias, *rest = call.op_arguments("interleaved")
    opcheck(OP, (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), *rest))


def test_compiles_whole(device):
    call = Call(device)
    want = call.run()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x, positions):
        q, k, v = mrrope.qkv_rotary(x, call.weight, call.bias, positions, call.table, *call.heads)
        return q * 2, k, v

    for tokens in (5, 3):
        got = compiled(call.x[:, :tokens], call.positions[:, :tokens])
        torch.testing.assert_close(got[0], want[0][:, :, :tokens] * 2)
        torch.testing.assert_close(got[2], want[2][:, :, :tokens])


# --- autocast ---


AUTOCAST_DTYPE = torch.bfloat16


def leaves_of(call: Call) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (call.x, call.weight, call.bias)]


# Few rows, and as many as are fused on Hopper.
@pytest.mark.parametrize("sizes", [{"tokens": 5}, {"tokens": 2048, "inputs": 256, "heads": (32, 8), "head_dim": 128}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_linear_does(device, dtype, sizes):
    if device == "cpu" and sizes["tokens"] > 5:
        pytest.skip("a CPU has one path for all sizes")
    call = Call(device, dtype, layout="bshd", **sizes)
    rounded = Call(device, dtype, layout="bshd", **sizes)
    rounded.x, rounded.weight, rounded.bias = (t.to(AUTOCAST_DTYPE) for t in (call.x, call.weight, call.bias))
    with torch.autocast(device, AUTOCAST_DTYPE):
        got = call.run()
    rounded.assert_right(got)
    assert all(part.dtype == AUTOCAST_DTYPE for part in got)


def test_autocast_leaves_float64_alone(device):
    call = Call(device, torch.float64)
    with torch.autocast(device, AUTOCAST_DTYPE):
        call.assert_right(call.run())


@pytest.mark.parametrize("in_autocast", [False, True])
def test_gradients_under_autocast(device, in_autocast):
    call = Call(device, layout="bshd", tokens=7)
    grads = [torch.randn_like(part).to(AUTOCAST_DTYPE) for part in call.run()]
    exact = [t.to(AUTOCAST_DTYPE).double() for t in leaves_of(call)]
    exact = [t.detach().cpu().requires_grad_() for t in exact]
    product = linear(*exact).unflatten(-1, (sum(call.heads) + call.heads[1], -1))
    q, k, v = product.split([call.heads[0], call.heads[1], call.heads[1]], dim=-2)
    result = mrrope.rotary(q, k, call.positions.cpu(), call.table, layout="bshd")
    want = torch.autograd.grad((*result, v), exact, [grad.cpu().double() for grad in grads])

    leaves = leaves_of(call)
    with torch.autocast(device, AUTOCAST_DTYPE):
        out = mrrope.qkv_rotary(*leaves, call.positions, call.table, *call.heads, layout="bshd")
        got = torch.autograd.grad(out, leaves, grads) if in_autocast else None
    got = got or torch.autograd.grad(out, leaves, grads)
    for leaf, actual, expected in zip(leaves, got, want, strict=True):
        assert actual.dtype == leaf.dtype == torch.float32
        # The gradient of the product is rounded once, each gradient again; sums are over at most 128 components.
        error = (actual.cpu().double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(AUTOCAST_DTYPE).eps


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast_is_one_for_eager_fake_and_compiled(device, requires_grad):
    torch._dynamo.reset()
    call = Call(device, layout="bshd")
    leaves = [t.requires_grad_(requires_grad) for t in leaves_of(call)]

    def run(x, weight, bias):
        with torch.autocast(device, AUTOCAST_DTYPE):
            return mrrope.qkv_rotary(x, weight, bias, call.positions, call.table, *call.heads, layout="bshd")

    eager = run(*leaves)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    for x, y in zip(eager, compiled, strict=True):
        assert x.dtype == y.dtype == AUTOCAST_DTYPE
        assert torch.equal(x, y)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = run(*(mode.from_tensor(t) for t in leaves))
    assert [(x.dtype, x.shape, x.stride()) for x in fake] == [(x.dtype, x.shape, x.stride()) for x in eager]
    if requires_grad:
        by_eager, by_compiled = (torch.autograd.grad([x.sum() for x in out], leaves) for out in (eager, compiled))
        assert all(torch.equal(x, y) for x, y in zip(by_eager, by_compiled, strict=True))


def test_a_number_of_heads_may_be_traced():
    class Projection(torch.nn.Module):
        def forward(self, x, weight, positions):
            heads = weight.shape[0] // 32
            return mrrope.qkv_rotary(x, weight, None, positions, TABLE, heads, heads // 2)

    given = torch.randn(1, 3, 8), torch.randn(128, 8), torch.arange(3)
    dynamic = {"x": None, "weight": {0: torch.export.Dim.AUTO}, "positions": None}
    exported = torch.export.export(Projection(), given, dynamic_shapes=dynamic, strict=False)
    for got, want in zip(exported.module()(*given), Projection()(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", [None, "halves", "halves transposed"])
def test_captured_in_a_graph(cuda, kernel):
    call = Call(
        cuda, torch.bfloat16, batch=1, head_dim=128, **(FUSED[kernel] if kernel else {"tokens": 4, "inputs": 256})
    )
    if kernel is not None:
        assert_fused(call, kernel)
    want = call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    for part in got:
        part.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    for part, expected in zip(got, want, strict=True):
        assert torch.equal(part, expected)


# --- errors ---

ERRORS = {
    "x of one dimension": ({"x": torch.ones(24)}, ValueError, "x must be [batch, tokens, inputs]", "1 dimensions"),
    "x of integers": ({"x": torch.ones(2, 5, 24).int()}, TypeError, "x must be float64", "Int"),
    "x no tensor": ({"x": 3}, TypeError, "x must be a tensor", "int"),
    "weight of three dimensions": ({"weight": torch.ones(2, 2, 2)}, ValueError, "weight must be [outputs, inputs]"),
    "weight of another dtype": ({"weight": torch.ones(128, 24).half()}, TypeError, "weight must have x's dtype Float"),
    "weight of other inputs": (
        {"weight": torch.ones(128, 25)},
        ValueError,
        "weight must be [outputs, 24]",
        "[128, 25]",
    ),
    "weight of other heads": ({"weight": torch.ones(129, 24)}, ValueError, "a multiple of 8", "129 rows"),
    "bias no tensor": ({"bias": 1.0}, TypeError, "bias must be a tensor or None", "float"),
    "bias of two dimensions": (
        {"bias": torch.ones(128, 1)},
        ValueError,
        "bias must be [outputs] or None",
        "2 dimensions",
    ),
    "bias of another size": ({"bias": torch.ones(127)}, ValueError, "bias must be [128]", "[127]"),
    "bias of another dtype": (
        {"bias": torch.ones(128).double()},
        TypeError,
        "bias must have x's dtype Float",
        "Double",
    ),
    "positions of floats": ({"positions": torch.ones(5)}, TypeError, "positions must be int32 or int64"),
    "positions of another length": ({"positions": torch.ones(4).long()}, ValueError, "positions must be [5]", "[4]"),
    "table no table": ({"table": "yarn"}, TypeError, "table must be"),
    "table too wide": ({"table": table_of("yarn", 18)}, ValueError, "rotary_dim must be at most head_dim", "18"),
    "no heads of q": ({"num_q_heads": 0}, ValueError, "num_q_heads must be at least 1, got 0"),
    "more heads than can be counted": (
        {"num_kv_heads": 2**63 - 1},
        ValueError,
        "num_q_heads and num_kv_heads must be no more than weight's 128 rows",
        "got 4 and 9223372036854775807",
    ),
    "a fraction of q's heads": ({"num_q_heads": 4.0}, TypeError, "num_q_heads must be an integer, got 4.0"),
    "heads of k in words": ({"num_kv_heads": "2"}, TypeError, "num_kv_heads must be an integer, got '2'"),
    "heads of k not known": ({"num_kv_heads": None}, TypeError, "num_kv_heads must be an integer, got None"),
    "a truth for q's heads": ({"num_q_heads": True}, TypeError, "num_q_heads must be an integer, got True"),
    "no heads of k": ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1, got 0"),
    "unknown layout": ({"layout": "sbhd"}, ValueError, "layout must be one of bhsd, bshd, thd", "'sbhd'"),
    "layout of other x": ({"layout": "thd"}, ValueError, "x must be [tokens, inputs] for layout thd", "3 dimensions"),
    "unknown pairing": (
        {"pairing": "quarters"},
        ValueError,
        "pairing must be one of halves, interleaved",
        "'quarters'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    changed, error, *texts = ERRORS[name]
    call = Call()
    given = {name: getattr(call, name) for name in ("x", "weight", "bias", "positions", "table")}
    given |= {"num_q_heads": 4, "num_kv_heads": 2} | changed
    assert_refused(lambda: mrrope.qkv_rotary(**given), error, *texts)


def test_errors_of_weights():
    weight = torch.ones(12, 3)
    assert_refused(lambda: interleave_heads(weight, 5), ValueError, "multiple of num_heads (5)", "12")
    for rotary_dim in (0, 3, 14):
        assert_refused(
            lambda rotary_dim=rotary_dim: interleave_heads(weight, 1, rotary_dim),
            ValueError,
            "rotary_dim must be even and from 2 to 12",
            f"got {rotary_dim}",
        )
    assert_refused(lambda: pack_qkv(weight, weight[:, :2], weight), ValueError, "k must have q's inputs, (3,)")
    assert_refused(lambda: pack_qkv(weight, weight[:3], weight), ValueError, "v must have k's shape (3, 3)")
    assert_refused(lambda: unpack_qkv(weight, 3, 1), ValueError, "a multiple of 5 rows", "got 12")


@pytest.mark.parametrize("number", [0, -4])
def test_heads_of_weights_are_counted_from_one(number):
    weight = torch.ones(12, 3)
    expected = f"must be at least 1, got {number}"
    assert_refused(lambda: unpack_qkv(weight, number, 1), ValueError, f"num_q_heads {expected}")
    assert_refused(lambda: unpack_qkv(weight, 1, number), ValueError, f"num_kv_heads {expected}")
    assert_refused(lambda: interleave_heads(weight, number), ValueError, f"num_heads {expected}")
    assert_refused(lambda: deinterleave_heads(weight, number), ValueError, f"num_heads {expected}")


def test_weights_must_be_alike():
    weight = torch.ones(12, 3)
    assert_refused(lambda: pack_qkv(None, weight, weight), TypeError, "q must be a tensor, got NoneType")
    assert_refused(lambda: pack_qkv(weight, weight, [1]), TypeError, "v must be a tensor, got list")
    assert_refused(
        lambda: pack_qkv(weight, weight.half(), weight.half()),
        TypeError,
        "k must be torch.float32 on cpu, as q is, got torch.float16 on cpu",
    )
    one = torch.tensor(1.0)
    assert_refused(lambda: pack_qkv(one, one, one), ValueError, "q must have rows", "0 dimensions")
    assert_refused(lambda: unpack_qkv("w", 1, 1), TypeError, "packed must be a tensor, got str")
    assert_refused(lambda: unpack_qkv(weight, 4.0, 1), TypeError, "num_q_heads must be an integer, got 4.0")
    assert_refused(lambda: unpack_qkv(weight, 4, "1"), TypeError, "num_kv_heads must be an integer, got '1'")
    assert_refused(lambda: interleave_heads(weight, "1"), TypeError, "num_heads must be an integer, got '1'")
    assert_refused(lambda: deinterleave_heads(weight, 1, "8"), TypeError, "rotary_dim must be an integer, got '8'")
    assert_refused(lambda: interleave_heads(None, 1), TypeError, "weight must be a tensor, got NoneType")
