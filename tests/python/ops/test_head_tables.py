"""Head tables ``[N, R, H, W]`` in every op: head h of n is rotated by table h / (n / H), against float64.

Query factors follow the rows of positions, one for every head of q.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from op_errors import assert_refused
from rotary_cases import DTYPES, LAYOUTS, OWN_MEMORY, PAIRINGS, onto, storage_of
from rotary_reference import HEAD_AXIS, TOLERANCES, components_of, pair_norms, pairs_of, unit_rotations
from tensor_bits import bytes_outside
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from mrrope.ops import decompositions
from mrrope.tables.position_rows import packed_rows
from mrrope.tables.query_factors import FACTOR_ROW, factor_rows, factors_in

OPS = torch.ops.mrrope
EPS = 1e-6
Q, K = 0, 1
FACTORS = pytest.mark.parametrize("query_factors", [False, True], ids=["", "factors"])


@dataclass(frozen=True)
class HeadCase:
    """One call with head tables: ``heads`` tables, and as many query and key heads for each as ``per_table`` says."""

    layout: str = "bhsd"
    pairing: str = "halves"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    tokens: int = 5
    tables: int = 3
    per_table: tuple[int, int | None] = (4, 1)
    head_dim: int = 20
    rotary_dim: int = 16
    memory: str = "contiguous"
    choice: str = "one"  # one, sequence, or index
    position_rows: int = 0
    query_factors: bool = False
    seed: int = 0

    def count(self) -> int:
        return {"one": 1, "sequence": self.batch, "index": 4}[self.choice]

    def heads_on(self, device: str) -> list[torch.Tensor]:
        """q, and k where there is one, in poisoned memory."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for per_table in self.per_table:
            if per_table is None:
                continue
            heads = self.tables * per_table
            shape = {
                "bhsd": (self.batch, heads, self.tokens, self.head_dim),
                "bshd": (self.batch, self.tokens, heads, self.head_dim),
                "thd": (self.tokens, heads, self.head_dim),
            }[self.layout]
            x = storage_of(shape, self.memory, self.dtype)
            x.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
            found.append(onto(device, x))
        return found

    def query_heads(self) -> int:
        return self.tables * self.per_table[Q]

    def packed(self) -> torch.Tensor:
        """Random phase steps and factors: any two tables differ in every word of the first row."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = 2 if self.position_rows else 1
        shape = self.count(), rows, self.tables, self.rotary_dim // 2 + 1
        words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
        words[..., -1] = (0.5 + torch.rand(shape[:-1], generator=generator, dtype=torch.float64)).view(torch.int64)
        if self.position_rows:
            words[:, 1] = packed_rows(torch.randint(self.position_rows, words[:, 1, :, 1:].shape, generator=generator))
        if not self.query_factors:
            return words
        factors = 0.5 + torch.rand(self.count(), self.query_heads(), generator=generator, dtype=torch.float64)
        behind = torch.stack([factor_rows(bits, *shape[2:]) for bits in factors.view(torch.int64)])
        return torch.cat([words, *[torch.zeros_like(words)] * (FACTOR_ROW - rows), behind], dim=1)

    def positions(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = (self.tokens,) if self.layout == "thd" else (self.batch, self.tokens)
        shape = (self.position_rows, *shape) if self.position_rows else shape
        return torch.randint(-(2**31), 2**31, shape, generator=generator)

    def index(self) -> torch.Tensor | None:
        if self.choice != "index":
            return None
        length = self.tokens if self.layout == "thd" else self.batch
        generator = torch.Generator().manual_seed(self.seed + 3)
        return torch.randint(self.count(), (length,), generator=generator, dtype=torch.int32)

    def rest(self, device: str) -> tuple[Any, ...]:
        """The op's arguments after the heads."""
        index = self.index()
        return (
            self.positions().to(device),
            self.packed().to(device),
            self.layout,
            self.pairing,
            False,
            None if index is None else index.to(device),
        )

    def rotations(self, n_heads: int, place: int) -> np.ndarray:
        """Return exp(i * angle) times the factors, in float64, ``[(batch,) tokens, heads, pairs]``."""
        table, positions = self.packed(), self.positions()
        batch = 1 if self.layout == "thd" else self.batch
        index = self.index()
        result = np.empty((batch, self.tokens, n_heads, self.rotary_dim // 2), dtype=np.complex128)
        for b in range(batch):
            for token in range(self.tokens):
                number = 0
                if self.choice == "sequence":
                    number = b
                elif index is not None:
                    number = int(index[token if self.layout == "thd" else b])
                for head in range(n_heads):
                    words = table[number, :, head * self.tables // n_heads]
                    at = (token,) if self.layout == "thd" else (b, token)
                    if self.position_rows:
                        of_pairs = torch.stack([positions[(int(row), *at)] for row in words[1, :-1] & 0xFF])
                    else:
                        of_pairs = positions[at].expand(self.rotary_dim // 2)
                    units = [unit_rotations(p, s)[0] for p, s in zip(of_pairs, words[0, :-1, None], strict=True)]
                    result[b, token, head] = np.array(units) * float(words[0, -1:].view(torch.float64))
                    if self.query_factors and place == Q:
                        factors = factors_in(table, n_heads).view(torch.float64)
                        result[b, token, head] *= float(factors[number, head])
        return result[0] if self.layout == "thd" else result

    def rotated(self, x: torch.Tensor, place: int = Q, conjugate: bool = False) -> torch.Tensor:
        """Return q or k, whichever is at that place, rotated in float64."""
        whole = x.detach().cpu().double().numpy()
        by = self.rotations(x.shape[HEAD_AXIS[self.layout]], place)
        by = np.moveaxis(by, -2, -3) if self.layout == "bhsd" else by
        dim = self.rotary_dim
        pairs = pairs_of(whole[..., :dim], self.pairing) * (by.conj() if conjugate else by)
        return torch.from_numpy(np.concatenate([components_of(pairs, self.pairing), whole[..., dim:]], axis=-1))

    def assert_near(self, actual: torch.Tensor, expected: torch.Tensor, extra: float = 0.0) -> None:
        """Assert one rounding of the float64 result, plus an arithmetic error relative to the pair's norm."""
        tolerance = TOLERANCES[actual.dtype]
        norms = pair_norms(expected, self.rotary_dim, self.pairing)
        smallest = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
        allowed = (tolerance.arithmetic + extra) * norms + tolerance.rounding * expected.abs() + smallest
        excess = (actual.detach().cpu().double() - expected).abs() - allowed
        assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"


def head_cases() -> st.SearchStrategy[HeadCase]:
    """Sizes that no vector divides, too, and every kind of choice."""
    batched = st.builds(
        HeadCase,
        layout=st.sampled_from(["bhsd", "bshd"]),
        pairing=st.sampled_from(PAIRINGS),
        dtype=st.sampled_from(DTYPES),
        batch=st.integers(1, 3),
        tokens=st.integers(1, 6),
        tables=st.integers(1, 4),
        per_table=st.tuples(st.sampled_from([1, 3, 4]), st.sampled_from([None, 1, 2])),
        head_dim=st.sampled_from([32, 33, 40, 64]),
        rotary_dim=st.sampled_from([2, 16, 30, 32]),
        memory=st.sampled_from(OWN_MEMORY),
        choice=st.sampled_from(["one", "sequence", "index"]),
        position_rows=st.sampled_from([0, 0, 1, 3]),
        query_factors=st.booleans(),
        seed=st.integers(0, 99),
    )
    packed = batched.map(
        lambda case: replace(
            case, layout="thd", batch=1, choice="one" if case.choice == "sequence" else case.choice, position_rows=0
        )
    )
    return st.one_of(batched, packed)


# --- rotary and its decomposition ---


@given(case=head_cases(), in_place=st.booleans())
@example(HeadCase(dtype=torch.bfloat16, head_dim=128, rotary_dim=128, tokens=3, choice="index"), False)
@example(HeadCase(dtype=torch.float16, tables=2, per_table=(3, 1), head_dim=64, rotary_dim=64, tokens=3), True)
@example(HeadCase(dtype=torch.bfloat16, head_dim=128, rotary_dim=128, tokens=3, query_factors=True), False)
@example(HeadCase(tables=1, per_table=(12, 3), rotary_dim=2, choice="index", query_factors=True), True)
@settings(max_examples=80)
def test_every_head_uses_its_table(device, case, in_place):
    heads = case.heads_on(device)
    before, around = [x.clone() for x in heads], [bytes_outside(x) for x in heads]
    result = heads if in_place else OPS.rotary(heads, *case.rest(device))
    if in_place:
        OPS.rotary_(heads, *case.rest(device))
    for place, (x, y) in enumerate(zip(before, result, strict=True)):
        expected = case.rotated(x, place)
        assert torch.equal(y[..., case.rotary_dim :].cpu().double(), expected[..., case.rotary_dim :])
        case.assert_near(y, expected)
    assert all(torch.equal(bytes_outside(x), y) for x, y in zip(heads, around, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_alone_in_q_place_uses_the_same_tables(device, layout):
    case = HeadCase(layout=layout, batch=1 if layout == "thd" else 2)
    heads, rest = case.heads_on(device), case.rest(device)
    together = OPS.rotary(heads, *rest)
    for x, y in zip(heads, together, strict=True):
        assert torch.equal(OPS.rotary([x], *rest)[0], y)


@pytest.mark.parametrize("rows", [0, 3])
def test_one_head_table_is_the_table(device, rows):
    case = HeadCase(tables=1, position_rows=rows, choice="sequence")
    heads, (positions, table, *rest) = case.heads_on(device), case.rest(device)
    single = table[:, :, 0] if rows else table[:, 0, 0]
    for x, y in zip(
        OPS.rotary(heads, positions, table, *rest),
        OPS.rotary(heads, positions, single.contiguous(), *rest),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_second_rows_are_ignored_with_one_position_a_token(device):
    case = HeadCase()
    heads, (positions, table, *rest) = case.heads_on(device), case.rest(device)
    two_rows = torch.cat([table, torch.full_like(table, 9)], dim=1)
    for x, y in zip(
        OPS.rotary(heads, positions, two_rows, *rest), OPS.rotary(heads, positions, table, *rest), strict=True
    ):
        assert torch.equal(x, y)


@given(case=head_cases().filter(lambda case: case.layout != "thd" and case.choice != "index"), conjugate=st.booleans())
@settings(max_examples=60)
def test_the_decomposition(device, case, conjugate):
    case = replace(case, dtype=torch.float32 if case.dtype == torch.float64 else case.dtype)
    heads, (positions, table, *_) = case.heads_on(device), case.rest(device)
    result = decompositions.rotary(heads, positions, table, case.layout, case.pairing, conjugate)
    for place, (x, y) in enumerate(zip(heads, result, strict=True)):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        case.assert_near(y, case.rotated(x, place, conjugate))


@pytest.mark.parametrize("rows", [0, 3])
@FACTORS
def test_a_negated_table_rotates_backwards(device, query_factors, rows):
    """All its words are negated; those of factors and rows of positions count by their magnitude."""
    case = HeadCase(position_rows=rows, query_factors=query_factors)
    heads, (positions, table, *rest) = case.heads_on(device), case.rest(device)
    by_op = OPS.rotary(heads, positions, -table, *rest)
    by_decomposition = decompositions.rotary(heads, positions, -table, case.layout, case.pairing, False)
    for result in (by_op, by_decomposition):
        for place, (x, y) in enumerate(zip(heads, result, strict=True)):
            case.assert_near(y, case.rotated(x, place, conjugate=True))


@FACTORS
def test_compiled(device, query_factors):
    """The op and the decomposition, each in one graph."""
    case = HeadCase(dtype=torch.bfloat16, head_dim=64, rotary_dim=64, query_factors=query_factors)
    heads, rest = case.heads_on(device), case.rest(device)

    def by_op(heads):
        return OPS.rotary([x * 2 for x in heads], *rest)

    def by_decomposition(heads):
        return decompositions.rotary([x * 2 for x in heads], rest[0], rest[1], case.layout, case.pairing, False)

    for function in (by_op, by_decomposition):
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(heads)
        for place, (x, y) in enumerate(zip(heads, result, strict=True)):
            case.assert_near(y, case.rotated(2 * x, place))


# --- gradients, and what torch asks of an op ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("choice", ["one", "index"])
@FACTORS
def test_gradcheck(device, pairing, choice, query_factors):
    case = HeadCase(dtype=torch.float64, pairing=pairing, choice=choice, tokens=2, head_dim=6, rotary_dim=4)
    case = replace(case, query_factors=query_factors)
    heads = [x.requires_grad_() for x in case.heads_on(device)]
    rest = case.rest(device)
    assert gradcheck(lambda *heads: OPS.rotary(heads, *rest), heads)
    assert gradgradcheck(lambda *heads: OPS.rotary(heads, *rest), heads)


@pytest.mark.parametrize("wanted", [Q, K])
@FACTORS
def test_the_gradient_of_one_of_q_and_k(device, wanted, query_factors):
    """The backward pass of k alone keeps the tables, which then belong to fewer heads each, without query factors."""
    case = HeadCase(dtype=torch.float64, query_factors=query_factors)
    heads = case.heads_on(device)
    heads[wanted].requires_grad_()
    result = OPS.rotary(heads, *case.rest(device))
    gradient = torch.randn(heads[wanted].shape, dtype=torch.float64, device=device)
    result[wanted].backward(gradient)
    case.assert_near(heads[wanted].grad, case.rotated(gradient, wanted, conjugate=True))


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("choice", ["one", "index"])
@FACTORS
def test_opcheck(device, choice, rows, query_factors):
    case = HeadCase(choice=choice, position_rows=rows, query_factors=query_factors)
    heads, rest = [x.requires_grad_() for x in case.heads_on(device)], case.rest(device)
    opcheck(OPS.rotary.default, (heads, *rest))
    opcheck(OPS.rotary_.default, ([x.detach() for x in heads], *rest))


# --- the other ops ---


def normed(x: torch.Tensor, weight: torch.Tensor, over: str, layout: str) -> torch.Tensor:
    dims = [-1] if over == "head" else [HEAD_AXIS[layout], -1]
    if over == "all_heads":
        heads = x.shape[HEAD_AXIS[layout]]
        weight = weight.view(heads, 1, -1) if layout == "bhsd" else weight.view(heads, -1)
    return x * (x.square().mean(dims, keepdim=True) + EPS).rsqrt() * weight


def norm_weights(case: HeadCase, heads: list[torch.Tensor], over: str) -> list[torch.Tensor]:
    axis = HEAD_AXIS[case.layout]
    sizes = [case.head_dim * (x.shape[axis] if over == "all_heads" else 1) for x in heads]
    generator = torch.Generator().manual_seed(case.seed + 4)
    return [torch.randn(size, generator=generator).to(heads[0]) for size in sizes]


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


# --- errors ---


def changed(case: HeadCase, **changes: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    heads, rest = case.heads_on("cpu"), list(case.rest("cpu"))
    return changes.get("heads", heads), (rest[0], changes.get("table", rest[1]), *rest[2:])


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        (torch.ones(1, 3, 3, 9, dtype=torch.int64), ["attention factor", "of head 0"]),
        (torch.ones(1, 0, 3, 9, dtype=torch.int64), ["table must be", "[1, 0, 3, 9]"]),
        (torch.ones(1, 1, 0, 9, dtype=torch.int64), ["table must be", "[1, 1, 0, 9]"]),
        (torch.ones(0, 1, 3, 9, dtype=torch.int64), ["table must be", "[0, 1, 3, 9]"]),
        (torch.ones(1, 1, 3, 1, dtype=torch.int64), ["table must be", "[1, 1, 3, 1]"]),
        (torch.ones(1, 1, 1, 3, 9, dtype=torch.int64), ["table must be", "[1, 1, 1, 3, 9]"]),
        (HeadCase().packed().transpose(2, 3).contiguous().transpose(2, 3), ["contiguous", "strides"]),
        (HeadCase(tables=5).packed(), ["q must have a multiple of 5 heads", "12"]),
        (HeadCase(tables=6).packed(), ["k must have a multiple of 6 heads", "3"]),
        (HeadCase(choice="index").packed(), ["table must be one", "2 sequences", "4 tables"]),
        (HeadCase().packed().clone().index_fill_(3, torch.tensor([8]), 0), ["attention factor", "of head 0"]),
    ],
)
def test_bad_tables_are_refused(table, texts):
    heads, rest = changed(HeadCase(), table=table)
    before = [x.clone() for x in heads]
    assert_refused(lambda: OPS.rotary(heads, *rest), ValueError, *texts)
    assert_refused(lambda: OPS.rotary_(heads, *rest), ValueError, *texts)
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True))


def with_factors(changes: dict[int, float], **settings: Any) -> torch.Tensor:
    """Return a table for 12 query heads, with other words behind the first ones in its last table."""
    packed = HeadCase(query_factors=True, **settings).packed()
    words = packed[-1, FACTOR_ROW:].view(-1)
    for word, factor in changes.items():
        words[word] = torch.tensor(factor, dtype=torch.float64).view(torch.int64)
    return packed


EACH_HEAD = "table must have a query factor for each of the 12 heads of q, got"
IN_RANGE = "table must have query factors that are positive finite numbers in float32's range, got"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (with_factors({11: 0.0}), f"{EACH_HEAD} 11 in table 0"),
        (with_factors({3: 0.0}), f"{EACH_HEAD} 11 in table 0"),
        (with_factors({12: 1.0}), f"{EACH_HEAD} 13 in table 0"),
        (with_factors({26: 1.0}), f"{EACH_HEAD} 13 in table 0"),
        (with_factors({12: 1.0}, choice="sequence"), f"{EACH_HEAD} 13 in table 1"),
        (with_factors({3: 0.0, 12: 1.0}), f"{IN_RANGE} 0 for head 3 in table 0"),
        (with_factors({0: torch.inf}), f"{IN_RANGE} inf for head 0 in table 0"),
        (with_factors({11: torch.nan}), f"{IN_RANGE} nan for head 11 in table 0"),
        (with_factors({5: 1e-39}, choice="sequence"), f"{IN_RANGE} 1e-39 for head 5 in table 1"),
        (with_factors({5: 1e39}), f"{IN_RANGE} 1e+39 for head 5 in table 0"),
        (with_factors({}, per_table=(3, 1)), f"{EACH_HEAD} 9 in table 0"),
    ],
)
def test_bad_query_factors_are_refused(table, text):
    case = HeadCase()
    heads, rest = changed(case, table=table)
    before = [x.clone() for x in heads]
    weights = norm_weights(case, heads, "head")
    caches = [torch.zeros(4, 5, 3, 20) for _ in range(2)]
    cached = heads[Q], heads[K], heads[K].clone()
    slots = torch.arange(10).view(2, 5)
    calls = [
        lambda: OPS.rotary(heads, *rest),
        lambda: OPS.rotary_(heads, *rest),
        lambda: OPS.qk_norm_rotary(heads, weights, *rest[:2], EPS, 0.0, "head"),
        lambda: OPS.rotary_and_cache_(*cached, *rest[:2], *caches, slots, True),
        lambda: OPS.qk_norm_rotary_and_cache_(*cached, *weights, *rest[:2], *caches, slots, True, EPS, 0.0, "head"),
    ]
    for call in calls:
        assert_refused(call, ValueError, text)
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True))
    assert not any(cache.any() for cache in caches)


def test_more_heads_than_words_for_factors_are_refused(device):
    """Also where the host cannot read the table."""
    case = HeadCase(per_table=(10, 1))
    heads, table = case.heads_on(device), HeadCase(query_factors=True).packed().to(device)
    text = "table must have a query factor for each of the 30 heads of q, got rows for at most 27"
    assert_refused(lambda: OPS.rotary(heads, case.positions().to(device), table), ValueError, text)


@pytest.mark.parametrize("query_heads", [1, 26, 27, 28, 54, 55])
def test_factors_fill_rows(device, query_heads):
    """A row of one table has 9 words, 3 heads of k leave the tables as they are."""
    case = HeadCase(tables=1, per_table=(query_heads, 3), query_factors=True)
    assert case.packed().shape[1] == FACTOR_ROW + -(-query_heads // 9)
    heads = case.heads_on(device)
    for place, (x, y) in enumerate(zip(heads, OPS.rotary(heads, *case.rest(device)), strict=True)):
        case.assert_near(y, case.rotated(x, place))


def test_position_rows_out_of_range_are_refused():
    case = HeadCase(position_rows=3)
    table = case.packed()
    rows = table[0, 1, 2, :-1] & 0xFF
    rows[5] = 3
    table[0, 1, 2] = packed_rows(rows)
    heads, rest = changed(case, table=table)
    assert_refused(lambda: OPS.rotary(heads, *rest), ValueError, "0 to 2", "got 3 for pair 5")


def test_the_cache_op_checks_k_too():
    case = HeadCase(tables=2, per_table=(3, 1))
    q, _ = case.heads_on("cpu")
    k = torch.randn(2, 3, 5, 20)
    caches = [torch.zeros(4, 5, 3, 20) for _ in range(2)]
    slots = torch.arange(10).view(2, 5)
    table, positions = case.packed(), case.positions()
    assert_refused(
        lambda: OPS.rotary_and_cache_(q, k, k.clone(), positions, table, *caches, slots, True),
        ValueError,
        "k must have a multiple of 2 heads",
        "3",
    )
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize(
    ("shape", "texts"),
    [
        ((2, 2, 1, 9), ["tables must be for one layer or for each of the 3 layers", "[2, 2, 1, 9]"]),
        ((2, 1, 2, 9), ["keys[0] must have a multiple of 2 heads", "3"]),
        ((2, 3, 9), ["tables must be a contiguous stack", "[2, 3, 9]"]),
        ((2, 0, 1, 9), ["tables must be a contiguous stack", "[2, 0, 1, 9]"]),
    ],
)
def test_bad_tables_of_rescale_cache_are_refused(shape, texts):
    tables = torch.ones(shape, dtype=torch.float64)
    keys = [torch.randn(2, 3, 4, 16) for _ in range(3)]
    index = torch.zeros(2, dtype=torch.int32)
    assert_refused(
        lambda: OPS.rescale_cache_(keys, torch.arange(4), tables.view(torch.int64), index, index), ValueError, *texts
    )
