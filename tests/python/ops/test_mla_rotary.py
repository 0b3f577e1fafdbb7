"""mla_rotary: rotation of q's and the key's rope parts and the assembly of the key, with their gradients."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from large_memory import addresses_past_31_bits, skip_unless_free
from op_errors import assert_refused
from rotary_cases import DTYPES, LAYOUTS, OWN_MEMORY, PAIRINGS, onto, storage_of, table_of, whole_memory
from rotary_reference import TOLERANCES, assert_rotated, components_of, pairs_of, rotated
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope

OP = torch.ops.mrrope.mla_rotary.default
BACKWARD = torch.ops.mrrope.mla_rotary_backward.default
HEAD = {"bhsd": 1, "bshd": 2, "thd": 1}
TOKEN = {"bhsd": 2, "bshd": 1, "thd": 0}


@dataclass(frozen=True)
class Case:
    """One call."""

    layout: str = "bhsd"
    pairing: str = "interleaved"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    tokens: int = 5
    q_heads: int = 4
    k_heads: int = 4
    nope: int = 24
    rope: int = 16
    memory: str = "contiguous"
    head_dimension: bool = False
    seed: int = 0

    def shape(self, heads: int, dim: int) -> tuple[int, ...]:
        return {
            "bhsd": (self.batch, heads, self.tokens, dim),
            "bshd": (self.batch, self.tokens, heads, dim),
            "thd": (self.tokens, heads, dim),
        }[self.layout]

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k_nope and k_rope."""
        generator = torch.Generator().manual_seed(self.seed)

        def one(heads: int, dim: int) -> torch.Tensor:
            view = storage_of(self.shape(heads, dim), self.memory, self.dtype)
            return onto(device, view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64)))

        q, k_nope, k_rope = one(self.q_heads, self.nope + self.rope), one(self.k_heads, self.nope), one(1, self.rope)
        return q, k_nope, k_rope if self.head_dimension else k_rope.squeeze(HEAD[self.layout])

    def positions(self, device: str) -> torch.Tensor:
        shape = (self.tokens,) if self.layout == "thd" else (self.batch, self.tokens)
        values = np.random.default_rng([self.seed, 1]).integers(-(2**31), 2**31, size=shape)
        return torch.from_numpy(values).to(device)

    @property
    def options(self) -> dict[str, str]:
        return {"layout": self.layout, "pairing": self.pairing}

    def with_heads(self, k_rope: torch.Tensor) -> torch.Tensor:
        return k_rope if self.head_dimension else k_rope.unsqueeze(HEAD[self.layout])


def cases():
    return st.builds(
        Case,
        layout=st.sampled_from(LAYOUTS),
        pairing=st.sampled_from(PAIRINGS),
        dtype=st.sampled_from(DTYPES),
        batch=st.integers(1, 3),
        tokens=st.sampled_from([1, 2, 7, 65]),
        q_heads=st.integers(1, 5),
        k_heads=st.integers(1, 20),
        nope=st.sampled_from([0, 1, 8, 32, 100, 128]),
        rope=st.sampled_from([2, 6, 16, 48, 64, 128]),
        memory=st.sampled_from(OWN_MEMORY),
        head_dimension=st.booleans(),
        seed=st.integers(0, 2**16),
    )


DEEPSEEK = Case(dtype=torch.bfloat16, q_heads=16, k_heads=16, nope=128, rope=64, tokens=9)
TABLE = table_of("mrrope_pro", 16)


# --- numbers ---


def assert_rotated_and_assembled(case, results, inputs, positions, table):
    (out, key), (q, k_nope, k_rope) = results, inputs
    assert_rotated(out[..., case.nope :], q[..., case.nope :], positions, table, case.layout, case.pairing)
    assert torch.equal(out[..., : case.nope], q[..., : case.nope])
    assert torch.equal(key[..., : case.nope], k_nope)
    rotated_key = key[..., case.nope :]
    shared = case.with_heads(k_rope).expand_as(rotated_key)
    assert_rotated(rotated_key, shared, positions, table, case.layout, case.pairing)


def assert_gradients(case, gradients, given, positions, table):
    """Assert the gradients of q, k_nope and k_rope from those given of q and the key."""
    q_gradient, k_nope_gradient, k_rope_gradient = gradients
    arguments = (positions, table, case.layout, case.pairing, True)
    assert_rotated(q_gradient[..., case.nope :], given[0][..., case.nope :], *arguments)
    assert torch.equal(q_gradient[..., : case.nope], given[0][..., : case.nope])
    assert torch.equal(k_nope_gradient, given[1][..., : case.nope])
    of_heads = given[1][..., case.nope :].detach().double()
    head = HEAD[case.layout]
    exact = rotated(of_heads.sum(head, keepdim=True), *arguments)
    magnitudes = pairs_of(of_heads.abs().sum(head, keepdim=True).cpu().numpy(), case.pairing)
    magnitudes = (magnitudes.real + magnitudes.imag) * table.attention_factor
    magnitudes = torch.from_numpy(components_of(magnitudes + 1j * magnitudes, case.pairing))
    tolerance = TOLERANCES[case.dtype]
    unit = 2.0**-53 if case.dtype == torch.float64 else 2.0**-24
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    allowed = (tolerance.arithmetic + case.k_heads * unit) * magnitudes + tolerance.rounding * exact.abs() + smallest
    actual = case.with_heads(k_rope_gradient).cpu().double()
    assert ((actual - exact).abs() <= allowed).all()


@given(case=cases())
@example(DEEPSEEK)
def test_rotates_and_assembles(device, case):
    q, k_nope, k_rope = case.tensors(device)
    before = [whole_memory(x).clone() for x in (q, k_nope, k_rope)]
    positions, table = case.positions(device), table_of("mrrope_pro", case.rope)
    results = mrrope.mla_rotary(q, k_nope, k_rope, positions, table, **case.options)
    assert_rotated_and_assembled(case, results, (q, k_nope, k_rope), positions, table)
    assert results[1].is_contiguous()
    for x, y in zip((q, k_nope, k_rope), before, strict=True):
        assert same_bits(whole_memory(x), y)


@given(case=cases())
@example(DEEPSEEK)
def test_gradients_are_one_rounding_of_the_exact_ones(device, case):
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    positions, table = case.positions(device), table_of("mrrope_pro", case.rope)
    results = mrrope.mla_rotary(*inputs, positions, table, **case.options)
    given = [torch.randn_like(x) for x in results]
    gradients = torch.autograd.grad(results, inputs, given)
    assert gradients[2].shape == inputs[2].shape
    assert_gradients(case, gradients, given, positions, table)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("head_dimension", [False, True])
def test_gradcheck(device, layout, pairing, head_dimension):
    case = Case(layout=layout, pairing=pairing, dtype=torch.float64, tokens=2, q_heads=2, k_heads=3, nope=3, rope=4,
                head_dimension=head_dimension)  # fmt: skip
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    positions, table = case.positions(device), table_of("yarn", 4)

    def op(q, k_nope, k_rope):
        return mrrope.mla_rotary(q, k_nope, k_rope, positions, table, **case.options)

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("wanted", ["q", "k_nope", "k_rope"])
@pytest.mark.parametrize("result", [0, 1])
def test_gradients_of_one_input_and_one_result(device, wanted, result):
    case = Case(dtype=torch.float64)
    inputs = dict(zip(("q", "k_nope", "k_rope"), case.tensors(device), strict=True))
    inputs[wanted].requires_grad_()
    out = mrrope.mla_rotary(**inputs, positions=case.positions(device), table=TABLE)[result]
    (gradient,) = torch.autograd.grad(out.sum(), [inputs[wanted]], materialize_grads=True)
    is_connected = (wanted == "q") == (result == 0)
    assert (gradient.abs().sum() > 0) == is_connected


def test_equals_the_ops_apart(device):
    q, k_nope, k_rope = DEEPSEEK.tensors(device)
    positions, table = DEEPSEEK.positions(device), table_of("yarn", 64)
    out, key = mrrope.mla_rotary(q, k_nope, k_rope, positions, table)
    q_rope, shared = mrrope.rotary(q[..., 128:], k_rope[:, None], positions, table, pairing="interleaved")
    assert same_bits(out, torch.cat([q[..., :128], q_rope], dim=-1))
    assert same_bits(key, torch.cat([k_nope, shared.expand(*k_nope.shape[:-1], 64)], dim=-1))


def test_scores_are_those_of_halves_of_deinterleaved_weights(device):
    """transformers moves pairs to halves and rotates those: q and k in another order, and the same scores."""
    case = Case(dtype=torch.float64)
    q, k_nope, k_rope = case.tensors(device)
    positions = case.positions(device)

    def deinterleaved(x, dim):
        rope = x[..., -dim:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat([x[..., :-dim], rope], dim=-1)

    out, key = mrrope.mla_rotary(q, k_nope, k_rope, positions, TABLE)
    halves = mrrope.mla_rotary(
        deinterleaved(q, 16), k_nope, deinterleaved(k_rope, 16), positions, TABLE, pairing="halves"
    )
    torch.testing.assert_close(out @ key.mT, halves[0] @ halves[1].mT, rtol=1e-12, atol=1e-12)


def test_the_up_projection_needs_no_copy(device):
    """k_nope and the values are views of one tensor, and so is the gradient of the former of the key's."""
    up = torch.randn(2, 5, 4, 24 + 16, device=device, requires_grad=True)
    q, _, k_rope = Case(layout="bshd").tensors(device)
    k_nope, values = up.split([24, 16], dim=-1)
    positions = torch.arange(5, device=device)
    _, key = mrrope.mla_rotary(q, k_nope, k_rope, positions, TABLE, layout="bshd")
    assert torch.equal(key[..., :24], k_nope)
    (gradient,) = torch.autograd.grad(key.sum() + 2.0 * values.sum(), [up])
    assert torch.equal(gradient, torch.cat([torch.ones_like(k_nope), 2.0 * torch.ones_like(values)], dim=-1))


# --- tables, shapes ---


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_table_index(device, layout):
    case = Case(layout=layout, batch=3, tokens=6, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    tables = [table_of(method, 16) for method in ("rope", "yarn", "mrrope_pro")]
    index = torch.tensor([2, 0, 1] if layout == "bhsd" else [0, 1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    positions = case.positions(device)
    out, key = mrrope.mla_rotary(*inputs, positions, tables, **case.options, table_index=index)
    q_rope, shared = mrrope.rotary(
        inputs[0][..., 24:], case.with_heads(inputs[2]), positions, tables, **case.options, table_index=index
    )
    assert torch.equal(out[..., 24:], q_rope)
    assert torch.equal(key[..., 24:], shared.expand(case.shape(4, 16)))
    weights = torch.randn_like(shared.expand(case.shape(4, 16)))
    ours = torch.autograd.grad((key[..., 24:] * weights).sum(), [inputs[2]])[0]
    theirs = torch.autograd.grad((shared * weights).sum(), [inputs[2]])[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("empty", ["batch", "tokens", "q_heads", "k_heads", "nope"])
def test_empty_tensors(device, empty):
    case = replace(Case(), **{empty: 0})
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    out, key = mrrope.mla_rotary(*inputs, case.positions(device), TABLE)
    assert out.shape == inputs[0].shape
    assert key.shape == case.shape(case.k_heads, case.nope + 16)
    gradients = torch.autograd.grad(out.sum() + key.sum(), inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    if empty == "k_heads":
        assert (gradients[2] == 0).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_offsets_past_31_bits_on_the_cpu(layout):
    case = Case(layout=layout, dtype=torch.bfloat16)
    inputs, positions = case.tensors("cpu"), case.positions("cpu")
    results = mrrope.mla_rotary(*inputs, positions, TABLE, layout=layout)
    memory, start, far = addresses_past_31_bits(), 0, []
    for x in (*inputs, *results):
        far.append(memory.as_strided(x.shape, (2**31, *x.stride()[1:]), start).copy_(x))
        start += x[0].numel()
    leaves = [x.requires_grad_() for x in far[:3]]
    again = mrrope.mla_rotary(*leaves, positions, TABLE, layout=layout)
    assert_rotated_and_assembled(case, again, inputs, positions, TABLE)
    assert_gradients(case, torch.autograd.grad(again, leaves, far[3:]), results, positions, TABLE)


@pytest.mark.parametrize("layout", ["thd", "bhsd"])
def test_more_than_2_to_the_31_elements(cuda, layout):
    skip_unless_free(24)
    case = Case(layout=layout, dtype=torch.bfloat16, batch=1, tokens=2**22 + 3, nope=64, rope=64, head_dimension=True)

    def random_heads(heads, dim):
        return torch.empty(case.shape(heads, dim), dtype=case.dtype, device=cuda).normal_().requires_grad_()

    inputs = [random_heads(case.q_heads, 128), random_heads(case.k_heads, 64), random_heads(1, 64)]
    positions, table = torch.arange(case.tokens, device=cuda), table_of("mrrope_pro", 64)
    results = mrrope.mla_rotary(*inputs, positions, table, **case.options)
    assert all(x.numel() > 2**31 for x in results)
    gradients = torch.autograd.grad(results, inputs, results)
    for start in (0, case.tokens // 2, case.tokens - 64):
        of_inputs, of_results, of_gradients = (
            [x.narrow(TOKEN[layout], start, 64) for x in tensors] for tensors in (inputs, results, gradients)
        )
        at = positions[start : start + 64]
        assert_rotated_and_assembled(case, of_results, of_inputs, at, table)
        assert_gradients(case, of_gradients, of_results, at, table)


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dimension", [False, True])
def test_opcheck(device, layout, head_dimension):
    case = Case(layout=layout, memory="padded", head_dimension=head_dimension)
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    packed = TABLE.packed(torch.device(device))
    opcheck(OP, (*inputs, case.positions(device), packed, layout))
    gradients = [torch.randn(case.shape(4, 40), device=device, requires_grad=True) for _ in range(2)]
    opcheck(BACKWARD, (*gradients, case.positions(device), packed, layout))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compile(device, backend):
    def attend(q, k_nope, k_rope, positions):
        out, key = mrrope.mla_rotary(q * 2.0, k_nope, k_rope, positions, TABLE)
        return (out @ key.mT).sum(-1)

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        case = Case(dtype=torch.float64, tokens=tokens)
        positions = case.positions(device)
        ours, theirs = ([x.requires_grad_() for x in case.tensors(device)] for _ in range(2))
        expected, actual = attend(*ours, positions), compiled(*theirs, positions)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-11)
        for x, y in zip(
            torch.autograd.grad(actual.sum(), theirs), torch.autograd.grad(expected.sum(), ours), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-11)


def test_gradients_are_deterministic(device):
    case = replace(DEEPSEEK, k_heads=128, tokens=65)
    inputs = [x.requires_grad_() for x in case.tensors(device)]
    results = mrrope.mla_rotary(*inputs, case.positions(device), table_of("yarn", 64))
    given = [torch.randn_like(x) for x in results]
    first, second = (torch.autograd.grad(results, inputs, given, retain_graph=True) for _ in range(2))
    assert all(same_bits(x, y) for x, y in zip(first, second, strict=True))


def test_one_launch_each_way(cuda):
    inputs = [x.requires_grad_() for x in DEEPSEEK.tensors(cuda)]
    positions, table = DEEPSEEK.positions(cuda), table_of("yarn", 64).to(cuda)
    results = mrrope.mla_rotary(*inputs, positions, table)
    given = [torch.randn_like(x) for x in results]
    torch.cuda.synchronize()

    def kernels(call):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    assert len(kernels(lambda: mrrope.mla_rotary(*inputs, positions, table))) == 1
    assert len(kernels(lambda: torch.autograd.grad(results, inputs, given))) == 1


def test_graph_capture(cuda):
    q, k_nope, k_rope = DEEPSEEK.tensors(cuda)
    positions, table = DEEPSEEK.positions(cuda), table_of("yarn", 64).to(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = mrrope.mla_rotary(q, k_nope, k_rope, positions, table)
    for x in (q, k_nope, k_rope):
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = mrrope.mla_rotary(q, k_nope, k_rope, positions, table)
    assert all(same_bits(x, y) for x, y in zip(results, expected, strict=True))


def rotated_with_gradients(inputs, positions, table):
    """Return q and the key, and the gradients of the inputs where those of q and the key are q and the key."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = mrrope.mla_rotary(*leaves, positions, table)
    return [*results, *torch.autograd.grad(results, leaves, results)]


def test_runs_on_the_current_stream(cuda):
    inputs, positions, table = DEEPSEEK.tensors(cuda), DEEPSEEK.positions(cuda), table_of("yarn", 64).to(cuda)
    expected = rotated_with_gradients(inputs, positions, table)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The inputs are written late on this stream, so that a kernel on another stream would read zeros.
        torch.cuda._sleep(200_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        found = rotated_with_gradients(late, positions, table)
    stream.synchronize()
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


def test_threads_may_call_on_streams_of_their_own(cuda):
    cases = [replace(DEEPSEEK, tokens=300, seed=seed) for seed in range(8)]
    table = table_of("yarn", 64).to(cuda)
    calls = [(case.tensors(cuda), case.positions(cuda), table) for case in cases]
    expected = [rotated_with_gradients(*call) for call in calls]
    torch.cuda.synchronize()

    def on_its_own_stream(call):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # until the kernels of all threads are queued, to run at once
            found = rotated_with_gradients(*call)
        stream.synchronize()
        return found

    with ThreadPoolExecutor(len(calls)) as threads:
        for found, wanted in zip(threads.map(on_its_own_stream, calls), expected, strict=True):
            assert all(same_bits(x, y) for x, y in zip(found, wanted, strict=True))


# --- errors ---


def ones(*shape, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


WRONG = {
    "q is a list": ({"q": [1.0]}, TypeError, ["q must be a tensor", "got list"]),
    "k_nope is None": ({"k_nope": None}, TypeError, ["k_nope must be a tensor", "NoneType"]),
    "k_rope is None": ({"k_rope": None}, TypeError, ["k_rope must be a tensor", "NoneType"]),
    "head tables": ({"table": mrrope.HeadTables([TABLE, TABLE])}, ValueError,
                    ["table must be one for all heads", "got 2 head tables"]),
    "a larger table": ({"table": table_of("yarn", 64)}, ValueError, ["table.rotary_dim must be at most", "64"]),
    "a smaller table": ({"table": table_of("yarn", 8)}, ValueError, ["k_rope must have table.rotary_dim (8)", "16]"]),
    "k_nope of another dim": ({"k_nope": ones(2, 4, 5, 25)}, ValueError,
                              ["k_nope must be [batch, heads, tokens, head_dim]", "24 components", "[2, 4, 5, 25]"]),
    "k_nope of other tokens": ({"k_nope": ones(2, 4, 6, 24)}, ValueError, ["k_nope must be", "[2, 4, 6, 24]"]),
    "k_nope of rank 3": ({"k_nope": ones(2, 5, 24)}, ValueError, ["k_nope must be", "3 dimensions"]),
    "k_rope of two heads": ({"k_rope": ones(2, 2, 5, 16)}, ValueError, ["k_rope must be", "one head", "[2, 2, 5, 16]"]),
    "k_rope of rank 5": ({"k_rope": ones(1, 2, 1, 5, 16)}, ValueError, ["k_rope must be", "5 dimensions"]),
    "strided k_rope": ({"k_rope": ones(2, 5, 32)[..., ::2]}, ValueError, ["k_rope must be", "contiguous last dim"]),
    "k_rope of another dtype": ({"k_rope": ones(2, 5, 16).half()}, TypeError, ["k_rope must have q's dtype Float"]),
    "k_nope on another device": ({"k_nope": ones(2, 4, 5, 24, device="meta")}, RuntimeError, ["k_nope must be on q's"]),
    "rows of positions": ({"positions": torch.zeros(3, 2, 5).long()}, ValueError, ["positions must be one", "3 dim"]),
    "too few positions": ({"positions": torch.arange(4)}, ValueError, ["positions must be [5]", "got [4]"]),
    "unknown pairing": ({"pairing": "quarters"}, ValueError, ["pairing must be one of halves, interleaved"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    changes, error, texts = WRONG[name]
    case = Case()
    arguments = dict(zip(("q", "k_nope", "k_rope"), case.tensors("cpu"), strict=True))
    arguments |= {"positions": case.positions("cpu"), "table": TABLE}
    assert_refused(lambda: mrrope.mla_rotary(**arguments | changes), error, *texts)


@pytest.mark.parametrize("words", [0, 1])
def test_gradients_by_an_empty_table_are_refused(words):
    gradient = ones(2, 4, 5, 40)
    table = torch.zeros(words, dtype=torch.int64)
    assert_refused(
        lambda: torch.ops.mrrope.mla_rotary_backward(gradient, gradient, torch.arange(5), table),
        ValueError,
        "table must be a contiguous int64 tensor",
        f"got [{words}]",
    )


def test_forward_mode_is_refused(device):
    q, k_nope, k_rope = Case().tensors(device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            mrrope.mla_rotary(dual, k_nope, k_rope, torch.arange(5, device=device), TABLE)
