"""qk_norm_rotary_and_cache: RMSNorm, rotation, cache write, float8 q and gate against float64, schemas and errors."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cache_calls import (
    CacheCall,
    assert_compiled_like_eager,
    cache_storage,
    cached_tokens,
    near_and_far_blocks,
    random_slots,
    written_arguments,
)
from cache_reference import (
    FLOAT8,
    assert_other_slots_unchanged,
    by_slot,
    by_token,
    divisor,
    half_ulp,
    nearest_float8,
    saturated,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from norm_reference import EPS, OVERS, normed
from op_errors import assert_refused_untouched
from rotary_cases import DTYPES, OWN_MEMORY, PAIRINGS, Case, cases, table_of, whole_memory
from rotary_reference import TOLERANCES, pair_norms, rotated, rotated_by, unit_rotations
from tensor_bits import bytes_outside, same_bits
from torch.library import opcheck

import mrrope

IN_PLACE = torch.ops.mrrope.qk_norm_rotary_and_cache_.default
INTO = torch.ops.mrrope.qk_norm_rotary_and_cache_.into
Q_SCALES = ["none", "one", "each", "computed"]
TENSORS = ("q", "k", "v", "q_weight", "k_weight", "positions", "key_cache", "value_cache", "slots", "key_scale",
           "value_scale", "q_out", "q_scale", "q_scale_out", "gate")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a call does beside the rotation."""

    over: str = "head"
    offset: float = 0.0
    norms: tuple[bool, bool] = (True, True)
    gate: bool = False
    q_out: torch.dtype | str | None = None
    q_scale: str = "none"
    paged: bool = True
    cache_layout: str = "nhd"
    cache_dtype: torch.dtype | None = None
    scales: str = "none"
    memory: str = "contiguous"


class Call(CacheCall):
    op = staticmethod(mrrope.qk_norm_rotary_and_cache_)
    inputs = ("q", "k", "v")

    def __init__(self, case: Case, options: Options, device: str) -> None:
        self.case, self.options = case, options
        self.q, self.k = case.heads_on(device)
        others = case.with_changes(seed=case.seed + 1).heads_on(device)
        self.v, self.gate = others[1], others[0] if options.gate else None
        self.positions, self.table = case.positions(device), case.table()
        rng = np.random.default_rng([case.seed, 9])
        self.q_weight, self.k_weight = (
            self._weight(rng, heads, device) if is_normed else None
            for heads, is_normed in zip(case.heads, options.norms, strict=True)
        )
        blocks, size, slots = random_slots(case, options.paged, rng)
        self.slots = slots.to(device)
        shape = (blocks, size, case.heads[1]) if options.cache_layout == "nhd" else (blocks, case.heads[1], size)
        self.key_cache, self.value_cache = (
            self._storage((*shape, case.head_dim), options.cache_dtype, device) for _ in range(2)
        )
        self.key_scale, self.value_scale = (self._scale(rng, options.scales, case.heads[1], device) for _ in range(2))
        self.q_out = None
        if options.q_out is not None:
            dtype = None if options.q_out == "same" else options.q_out
            self.q_out = self._storage(tuple(self.q.shape), dtype, device)
        self.q_scale = self._scale(rng, options.q_scale, case.heads[0], device)
        self.q_scale_out = None
        if options.q_scale == "computed":
            self.q_scale_out = torch.full((*self.q.shape[:-1], 2), -5.0, device=device)[..., 0]

    def _weight(self, rng, heads: int, device: str) -> torch.Tensor:
        count = heads * self.case.head_dim if self.options.over == "all_heads" else self.case.head_dim
        return torch.from_numpy(rng.standard_normal(count)).to(device, self.case.dtype)

    def _storage(self, shape, dtype, device) -> torch.Tensor:
        return cache_storage(shape, self.options.memory, dtype or self.case.dtype, device)

    def _scale(self, rng, kind: str, heads: int, device: str) -> torch.Tensor | None:
        count = {"one": (), "each": (heads,)}.get(kind)
        if count is None:
            return None
        return torch.from_numpy(np.asarray(rng.uniform(0.004, 0.1, count), np.float32)).to(device)

    def arguments(self) -> dict:
        given = {name: getattr(self, name) for name in TENSORS if name != "slots"}
        return given | {
            "table": self.table,
            "slots" if self.options.paged else "cache_positions": self.slots,
            "eps": EPS if any(self.options.norms) else None,
            "weight_offset": self.options.offset,
            "over": self.options.over,
            "layout": self.case.layout,
            "cache_layout": self.options.cache_layout,
            "pairing": self.case.pairing,
        }

    def raw_arguments(self) -> tuple:
        packed = self.table.packed(self.q.device)
        heads = (self.q,) if self.q_out is None else (self.q, self.q_out)
        scales = () if self.q_out is None else (self.q_scale, self.q_scale_out)
        case, options = self.case, self.options
        return (*heads, self.k, self.v, self.q_weight, self.k_weight, self.positions, packed, self.key_cache,
                self.value_cache, self.slots, options.paged, EPS, options.offset, options.over, case.layout,
                options.cache_layout, case.pairing, self.key_scale, self.value_scale, None, self.gate,
                *scales)  # fmt: skip

    def written(self) -> list[torch.Tensor]:
        q = self.q if self.q_out is None else self.q_out
        return [x for x in (q, self.key_cache, self.value_cache, self.gate, self.q_scale_out) if x is not None]

    def exact(self, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 result by token, and for each component the magnitude that its error is relative to."""
        case, options = self.case, self.options
        wide = x.detach().cpu().double()
        if weight is not None:
            wide = normed(wide, weight.detach().cpu().double(), options.over, case.layout, options.offset)
        value = rotated(wide, self.positions, self.table, case.layout, case.pairing)
        norms = pair_norms(value, self.table.rotary_dim, case.pairing)
        return by_token(value, case.layout), by_token(norms, case.layout)

    def check(self, before: "Call") -> None:
        case = self.case
        unwritten = ["k", "v", "q_weight", "k_weight", "slots", "positions"] + ([] if self.q_out is None else ["q"])
        for name in unwritten:
            if getattr(self, name) is not None:
                assert same_bits(whole_memory(getattr(self, name)), whole_memory(getattr(before, name)))
        q, was = (call.q if call.q_out is None else call.q_out for call in (self, before))
        assert same_bits(bytes_outside(q), bytes_outside(was))
        value, norms = self.exact(before.q, self.q_weight)
        scale = self.q_scale
        if self.q_scale_out is not None:
            scale = by_token(self.q_scale_out[..., None], case.layout)[..., 0]
            self.assert_computed(scale, value, norms, q.dtype)
        self.assert_stored(by_token(q, case.layout), value, norms, scale)
        if self.gate is not None:
            self.assert_gate(before.gate)
        length = self.key_cache.shape[1 if self.options.cache_layout == "nhd" else 2]
        kept, slots = cached_tokens(self.slots, None if self.options.paged else length)
        for name in ("key_cache", "value_cache"):
            cache = getattr(self, name)
            assert_other_slots_unchanged(cache, getattr(before, name), slots, self.options.cache_layout)
            rows = by_slot(cache, self.options.cache_layout)[slots].view(cache.dtype)
            if name == "key_cache":
                value, norms = self.exact(before.k, self.k_weight)
                self.assert_stored(rows, value[kept.cpu()], norms[kept.cpu()], self.key_scale)
            elif cache.dtype in FLOAT8:
                nearest = nearest_float8(by_token(before.v, case.layout)[kept].float(), self.value_scale, cache.dtype)
                assert torch.equal(rows.view(torch.uint8), nearest.view(torch.uint8))
            else:
                assert same_bits(rows, by_token(before.v, case.layout)[kept])

    def arithmetic(self) -> float:
        dtype = self.case.dtype
        # The sum of squares and the inverse root add to the rotation's own error.
        return TOLERANCES[dtype].arithmetic + 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def assert_stored(self, actual, value, norms, scale) -> None:
        """Assert one rounding of the exact results, [tokens, heads, head_dim]."""
        if actual.dtype in FLOAT8:
            scale = (
                divisor(scale).cpu().double() if scale is None or scale.dim() < 2 else scale[..., None].cpu().double()
            )
            value = saturated(value / scale, actual.dtype)
            allowed = half_ulp(value, actual.dtype) + self.arithmetic() * norms / scale
        else:
            info = torch.finfo(actual.dtype)
            allowed = self.arithmetic() * norms + TOLERANCES[actual.dtype].rounding * value.abs()
            allowed = allowed + info.smallest_normal * info.eps
        excess = (actual.float() if actual.dtype in FLOAT8 else actual).cpu().double().sub(value).abs() - allowed
        assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"

    def assert_computed(self, scale, value, norms, dtype) -> None:
        if not value.numel():
            return
        largest = torch.finfo(dtype).max
        expected = (value.abs().amax(-1) / largest).clamp(min=2.0**-126)
        allowed = self.arithmetic() * norms.amax(-1) / largest + 2.0**-22 * expected
        assert ((scale.cpu().double() - expected).abs() <= allowed).all()

    def assert_gate(self, before: torch.Tensor) -> None:
        expected = before.cpu().double().sigmoid()
        info = torch.finfo(self.gate.dtype)
        # On a GPU the exponential of 16-bit results is approximate.
        allowed = expected * (info.eps / 2 + (2e-5 if info.bits == 16 else 4 * info.eps))
        excess = (self.gate.cpu().double() - expected).abs() - allowed - info.smallest_normal * info.eps
        assert (excess <= 0).all()
        assert same_bits(bytes_outside(self.gate), bytes_outside(before))


@st.composite
def option_sets(draw) -> Options:
    cache_dtype = draw(st.sampled_from([None, *FLOAT8]))
    q_out = draw(st.sampled_from([None, "same", *FLOAT8]))
    return Options(
        over=draw(st.sampled_from(OVERS)),
        offset=draw(st.sampled_from([0.0, 1.0])),
        norms=draw(st.tuples(st.booleans(), st.booleans())),
        gate=draw(st.booleans()),
        q_out=q_out,
        q_scale=draw(st.sampled_from(Q_SCALES)) if q_out in FLOAT8 else "none",
        paged=draw(st.booleans()),
        cache_layout=draw(st.sampled_from(["nhd", "hnd"])),
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(["none", "one", "each"])) if cache_dtype else "none",
        memory=draw(st.sampled_from(OWN_MEMORY)),
    )


QWEN = Case(layout="thd", tokens=33, heads=(16, 2), head_dim=256, rotary_dim=64, dtype=torch.bfloat16)
EVERY_OPTIONS = [
    Options(over, 1.0, (True, True), gate, q_out, q_scale, paged, cache_layout, cache_dtype, scales)
    for over in OVERS
    for gate, q_out, q_scale, paged, cache_layout, cache_dtype, scales in [
        (False, None, "none", True, "nhd", None, "none"),
        (True, "same", "none", False, "hnd", None, "none"),
        (True, torch.float8_e4m3fn, "computed", True, "hnd", torch.float8_e4m3fn, "one"),
        (False, torch.float8_e5m2, "each", False, "nhd", torch.float8_e5m2, "each"),
    ]
]


# --- numbers ---


@given(case=cases(), options=option_sets(), keys=st.integers(1, 4))
@example(QWEN, Options(offset=1.0, gate=True), 2)
@example(QWEN, Options("all_heads", 1.0, gate=True, q_out=torch.float8_e4m3fn, q_scale="computed"), 2)
@settings(max_examples=200)
def test_against_float64(device, case, options, keys):
    if case.dtype == torch.float64:
        options = replace(options, q_out=None, q_scale="none", cache_dtype=None, scales="none")
    Call(case.with_changes(heads=(case.heads[0], keys)), options, device).run_and_check()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_every_option(device, pairing, dtype, options):
    case = Case(layout="thd", tokens=40, heads=(8, 2), head_dim=128, rotary_dim=96, dtype=dtype, pairing=pairing)
    Call(case, options, device).run_and_check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", OVERS)
def test_equals_the_unfused_ops(device, dtype, over):
    """To a rounding: the two kernels may contract other products."""
    call = Call(Case(dtype=dtype, head_dim=64, rotary_dim=64), Options(over, paged=False, cache_layout="hnd"), device)
    options = {"eps": EPS, "over": over}
    q, k = mrrope.qk_norm_rotary(call.q, call.k, call.q_weight, call.k_weight, call.positions, call.table, **options)
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    torch.testing.assert_close(call.q, q)
    kept = call.slots >= 0
    for sequence in range(2):
        for slot, token in zip(call.slots[sequence][kept[sequence]], kept[sequence].nonzero()[:, 0], strict=True):
            torch.testing.assert_close(call.key_cache[sequence, :, slot], k[sequence, :, token])


@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8])
def test_without_norms_it_is_rotary_and_cache(device, cache_dtype):
    case = Case(dtype=torch.bfloat16, head_dim=64, rotary_dim=48)
    call, expected = (
        Call(case, Options(norms=(False, False), gate=is_gated, cache_dtype=cache_dtype), device)
        for is_gated in (True, False)
    )
    given = ("q", "k", "v", "positions", "table", "key_cache", "value_cache", "slots", "layout", "cache_layout")
    mrrope.rotary_and_cache_(**{name: value for name, value in expected.arguments().items() if name in given})
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    for name in ("q", "key_cache", "value_cache"):
        assert same_bits(getattr(call, name), getattr(expected, name))


def test_heads_of_zeros_and_infinity_have_a_finite_scale(device):
    for dtype in FLOAT8:
        case = Case(layout="thd", tokens=3, head_dim=64, rotary_dim=64, reach=0, method="rope")
        call = Call(case, Options(norms=(False, False), q_out=dtype, q_scale="computed"), device)
        call.q[0] = 0.0
        call.q[1, 0, 5] = math.inf
        mrrope.qk_norm_rotary_and_cache_(**call.arguments())
        assert (call.q_scale_out[0] == 2.0**-126).all()
        assert not call.q_out[0].float().any()
        assert call.q_scale_out.isfinite().all()
        assert call.q_out[1, 0, 5].float() == torch.finfo(dtype).max


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 2.0**127, math.inf, math.nan])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("head_dim", [64, 36], ids=["vectors", "component by component"])
def test_an_impossible_scale_of_q_gives_nan(cuda, scale, has_norms, head_dim):
    for dtype in FLOAT8:
        case = Case(dtype=torch.bfloat16, layout="thd", head_dim=head_dim, rotary_dim=32)
        call = Call(case, Options(norms=(has_norms, has_norms), q_out=dtype, q_scale="one"), cuda)
        call.q_scale.fill_(scale)
        mrrope.qk_norm_rotary_and_cache_(**call.arguments())
        assert call.q_out.float().isnan().all()


def assert_infinity_stays_where_it_is(device, over, pairing, tokens, has_norms):
    """With norms all other components of the head are 0, without they keep their values."""
    case = Case(dtype=torch.bfloat16, pairing=pairing, layout="thd", tokens=tokens, heads=(32, 8), head_dim=64,
                rotary_dim=32, method="rope")  # fmt: skip
    call = Call(case, Options(over, norms=(has_norms, has_norms)), device)
    for x in (call.q, call.k):
        x[0, 1, 40] = math.inf
    before = call.copied()
    call.slots.copy_(torch.arange(tokens))
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    for x, found in ((before.q, call.q), (before.k, call.key_cache.flatten(0, 1)[:tokens])):
        assert found[0, 1, 40].isnan() if has_norms else found[0, 1, 40] == math.inf
        found[0, 1, 40] = 0.0
        assert found.isfinite().all()
        if has_norms:
            assert not found[0, 1].any()
        else:
            assert torch.equal(found[0, 1, 41:], x[0, 1, 41:])


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("tokens", [1, 400, 2100])  # one head per thread, two and eight
def test_infinity_in_the_unrotated_tail_stays_where_it_is(device, over, pairing, tokens, has_norms):
    assert_infinity_stays_where_it_is(device, over, pairing, tokens, has_norms)


def test_infinity_in_the_unrotated_tail_of_many_tokens(cuda):
    """Over all heads, four per thread."""
    assert_infinity_stays_where_it_is(cuda, "all_heads", "halves", 12000, has_norms=True)


@pytest.mark.parametrize("over", OVERS)
def test_rows_of_positions(device, over):
    case = Case(batch=2, tokens=6, head_dim=40, rotary_dim=32)
    call = Call(case, Options(over), device)
    tables = mrrope.AxisTables([table_of("rope", 12), table_of("ntk", 20)])
    positions = torch.randint(0, 5000, (2, 2, 6), generator=torch.Generator().manual_seed(3))
    before = call.copied()
    mrrope.qk_norm_rotary_and_cache_(**call.arguments() | {"table": tables, "positions": positions.to(device)})
    parts = [(table_of("rope", 12), 0), (table_of("ntk", 20), 1)]
    by = np.concatenate([unit_rotations(positions[row], t.turns) * t.attention_factor for t, row in parts], axis=-1)
    for weight, x, actual in ((call.q_weight, before.q, call.q), (call.k_weight, before.k, None)):
        exact = rotated_by(normed(x.cpu().double(), weight.cpu().double(), over, "bhsd", 0.0), by)
        if actual is None:
            kept = call.slots.reshape(-1) >= 0
            actual = by_slot(call.key_cache, "nhd")[call.slots.reshape(-1)[kept]]
            exact = by_token(exact, "bhsd")[kept.cpu()]
        assert (actual.cpu().double() - exact).abs().max() <= 5e-6 * exact.abs().max()


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_table_index_and_head_tables(device, over, layout):
    case = Case(layout=layout, batch=3, tokens=6, heads=(4, 2), head_dim=64, rotary_dim=64)
    call = Call(case, Options(over), device)
    stacks = [mrrope.HeadTables([table_of(m, 64), table_of("rope", 64)]) for m in ("yarn", "ntk", "mrrope_pro")]
    index = torch.tensor([2, 0, 1] if layout == "bhsd" else [0, 1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    chosen = {"table": stacks, "table_index": index}
    norm = {"eps": EPS, "over": over, "layout": layout}
    q, k = mrrope.qk_norm_rotary(call.q, call.k, call.q_weight, call.k_weight, call.positions, **chosen, **norm)
    mrrope.qk_norm_rotary_and_cache_(**call.arguments() | chosen)
    torch.testing.assert_close(call.q, q)
    kept = call.slots.reshape(-1) >= 0
    rows = by_slot(call.key_cache, "nhd")[call.slots.reshape(-1)[kept]]
    torch.testing.assert_close(rows, by_token(k, layout)[kept])


def test_views_of_one_projection_with_a_gate(device):
    """Qwen3-Next's projection yields [q | gate] for each head."""
    tokens, q_heads, kv_heads, dim = 12, 4, 2, 64
    projected = torch.randn(tokens, q_heads, 2 * dim, dtype=torch.bfloat16, device=device)
    before = projected.clone()
    q, gate = projected.split(dim, dim=-1)
    k, v = torch.randn(2, tokens, kv_heads, dim, dtype=torch.bfloat16, device=device)
    weights = torch.randn(2, dim, dtype=torch.bfloat16, device=device)
    caches = torch.zeros(2, 4, 8, kv_heads, dim, dtype=torch.bfloat16, device=device)
    slots, positions = torch.randperm(32, device=device)[:tokens], torch.arange(tokens, device=device)
    options = {"eps": EPS, "weight_offset": 1.0, "layout": "thd"}
    table = table_of("rope", 16)
    want_q, want_k = mrrope.qk_norm_rotary(before[..., :dim], k, *weights, positions, table, **options)
    mrrope.qk_norm_rotary_and_cache_(q, k, v, *weights, positions, table, *caches, slots, gate=gate, **options)
    torch.testing.assert_close(projected[..., :dim], want_q)
    torch.testing.assert_close(projected[..., dim:], before[..., dim:].sigmoid())
    torch.testing.assert_close(caches[0].flatten(0, 1)[slots], want_k)
    assert torch.equal(caches[1].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
@pytest.mark.parametrize("empty", [Case(batch=0), Case(tokens=0), Case(heads=(0, 2)), Case(heads=(2, 0))],
                         ids=["batch", "tokens", "q", "k"])  # fmt: skip
def test_empty_tensors(device, options, empty):
    Call(empty, options, device).run_and_check()


def test_blocks_more_than_two_to_the_31_elements_apart(device):
    options = Options(cache_dtype=torch.float8_e4m3fn)
    call = Call(Case(batch=2, tokens=1, head_dim=32, rotary_dim=32), options, device)
    near, far = zip(*(near_and_far_blocks((2, 1, 2, 32), device) for _ in range(2)), strict=True)
    call.slots = torch.tensor([[1], [0]], device=device)
    for key_cache, value_cache in (near, far):
        call.key_cache, call.value_cache = key_cache, value_cache
        mrrope.qk_norm_rotary_and_cache_(**call.arguments() | {"q": call.q.clone()})
    assert all(same_bits(x, y) for x, y in zip(far, near, strict=True))
    assert near[1].float().abs().sum() > 0


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_opcheck(device, options):
    call = Call(Case(dtype=torch.bfloat16, memory="padded", rotary_dim=12), options, device)
    # The other checks compute on copies of the caches, and float8 has no arithmetic.
    tests = {"test_utils": ("test_autograd_registration", "test_faketensor")} if options.cache_dtype else {}
    opcheck(IN_PLACE if call.q_out is None else INTO, call.raw_arguments(), **tests)


def test_schemas_say_what_is_written():
    assert written_arguments(IN_PLACE) == ["q", "key_cache", "value_cache", "gate"]
    assert written_arguments(INTO) == ["q_out", "key_cache", "value_cache", "gate", "q_scale_out"]
    assert IN_PLACE._schema.returns == INTO._schema.returns == []


def test_meta_tensors_write_nothing():
    call = Call(Case(), EVERY_OPTIONS[2], "cpu")
    before = call.memories()
    mrrope.qk_norm_rotary_and_cache_(
        **{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.arguments().items()}
    )
    assert all(torch.equal(x, y) for x, y in zip(call.memories(), before, strict=True))


@pytest.mark.parametrize("options", [EVERY_OPTIONS[0], EVERY_OPTIONS[1], EVERY_OPTIONS[2]], ids=str)
def test_versions_count(device, options):
    call = Call(Case(), options, device)
    versions = [x._version for x in call.written()]
    others = [call.k._version, call.v._version, call.q_weight._version]
    mrrope.qk_norm_rotary_and_cache_(**call.arguments())
    assert [x._version for x in call.written()] == [version + 1 for version in versions]
    assert [call.k._version, call.v._version, call.q_weight._version] == others


@pytest.mark.parametrize("name", ["q", "k", "v", "q_weight", "k_weight", "key_cache", "value_cache", "gate", "q_out"])
def test_gradients_are_refused(device, name):
    call = Call(Case(), EVERY_OPTIONS[1] if name == "q_out" else Options(gate=True), device)
    call.assert_gradient_refused(name)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_q_out", [False, True])
def test_compile(device, backend, has_gate, has_q_out):
    table = table_of("yarn", 16).to(device)
    weights = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)

    def attend(x, positions, slots, key_cache, value_cache):
        q, k, v, gate = (part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32, 64], dim=-1))
        q = mrrope.qk_norm_rotary_and_cache_(
            q, k, v, *weights, positions, table, key_cache, value_cache, slots, eps=EPS, layout="thd",
            gate=gate if has_gate else None, q_out=torch.empty_like(q) if has_q_out else None,
        )  # fmt: skip
        return (q * gate).sum(-1) + key_cache.sum()

    assert_compiled_like_eager(attend, 192, backend, device)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_compile_with_float8(device, backend, dtype):
    table = table_of("yarn", 16).to(device)
    weights = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    scale = torch.tensor([0.25], device=device)

    def attend(x, positions, slots, key_cache, value_cache):
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32], dim=-1))
        q_out = torch.empty_like(q, dtype=dtype)
        scales = torch.empty(q.shape[:2], device=q.device)
        mrrope.qk_norm_rotary_and_cache_(
            q, k, v, *weights, positions, table, key_cache, value_cache, slots, eps=EPS, layout="thd",
            key_scale=scale, value_scale=scale, q_out=q_out, q_scale_out=scales,
        )  # fmt: skip
        return q_out, scales

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 128, generator=generator).to(device, torch.bfloat16)
        slots = torch.randperm(16, generator=generator)[:tokens].to(device)
        caches = [[torch.zeros(4, 4, 2, 16, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        expected, actual = (
            function(x, torch.arange(tokens, device=device), slots, *written)
            for function, written in zip((attend, compiled), caches, strict=True)
        )
        for want, got in zip((*expected, *caches[0]), (*actual, *caches[1]), strict=True):
            assert want.float().abs().sum() > 0
            assert same_bits(got, want)


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_graph_capture_with_other_slots(cuda, options):
    case = Case(dtype=torch.bfloat16, head_dim=64, rotary_dim=64)
    others = (Call(case.with_changes(seed=seed), options, cuda) for seed in (3, 4))
    Call(case, options, cuda).assert_graph_replays(others)


def test_runs_on_the_current_stream(cuda):
    Call(Case(), Options(gate=True), cuda).assert_runs_on_the_current_stream()


# --- errors ---


def ones(*shape, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


def good_call() -> dict:
    return {
        "q": ones(2, 3, 4, 8),
        "k": ones(2, 1, 4, 8),
        "v": ones(2, 1, 4, 8),
        "q_weight": ones(8),
        "k_weight": ones(8),
        "positions": torch.arange(4),
        "table": table_of("yarn", 8),
        "key_cache": ones(3, 4, 1, 8),
        "value_cache": ones(3, 4, 1, 8),
        "slots": torch.arange(8).view(2, 4),
        "eps": 1e-6,
    }


Q8 = {"q_out": torch.zeros(2, 3, 4, 8, dtype=torch.float8_e4m3fn)}
SHARED = ones(2, 3, 4, 8)
ALIAS = ones(2, 1, 4, 8)
WRONG = {
    "q_weight as a list": ({"q_weight": [1.0]}, TypeError, ["q_weight must be a tensor or None, got list"]),
    "gate as a number": ({"gate": 1.0}, TypeError, ["gate must be a tensor or None, got float"]),
    "no eps": ({"eps": None}, ValueError, ["eps must be given with q_weight or k_weight, got None"]),
    "negative eps": ({"eps": -1.0}, ValueError, ["eps must be finite and not negative, got -1"]),
    "weight_offset not a number": ({"weight_offset": math.nan}, ValueError, ["weight_offset must be finite, got nan"]),
    "unknown over": ({"over": "heads"}, ValueError, ["over must be one of head, all_heads, got 'heads'"]),
    "q_weight of all heads": ({"q_weight": ones(24)}, ValueError, ["q_weight must be [8], head_dim", "got [24]"]),
    "k_weight of a head": ({"over": "all_heads", "q_weight": ones(24), "k_weight": ones(9)}, ValueError,
                           ["k_weight must be [8], heads * head_dim", "got [9]"]),
    "q_weight of two dimensions": ({"q_weight": ones(1, 8)}, ValueError, ["q_weight must have one dimension, got 2"]),
    "q_weight of another dtype": ({"q_weight": ones(8).half()}, TypeError, ["q_weight must have q's dtype Float"]),
    "k_weight on another device": ({"k_weight": ones(8, device="meta")}, RuntimeError,
                                   ["k_weight must be on q's device cpu", "got meta"]),
    "gate of another shape": ({"gate": ones(2, 3, 4, 9)}, ValueError, ["gate must have q's shape", "[2, 3, 4, 9]"]),
    "gate of another rank": ({"gate": ones(3, 4, 8)}, ValueError, ["gate must be [batch, heads, tokens, head_dim]"]),
    "gate of another dtype": ({"gate": ones(2, 3, 4, 8).half()}, TypeError, ["gate must have q's dtype Float"]),
    "strided gate": ({"gate": ones(2, 3, 4, 16)[..., ::2]}, ValueError, ["gate must be", "contiguous last dimension"]),
    "expanded gate": ({"gate": ones(1, 3, 4, 8).expand(2, 3, 4, 8)}, RuntimeError, ["gate must not overlap itself"]),
    "k is q": ({"q": ALIAS, "k": ALIAS}, RuntimeError, ["k and q must not share memory"]),
    "v is q": ({"q": ALIAS, "v": ALIAS}, RuntimeError, ["v and q must not share memory"]),
    "gate is q": ({"q": SHARED, "gate": SHARED}, RuntimeError, ["gate and q must not share memory"]),
    "a weight in q": ({"q": SHARED, "q_weight": SHARED.view(-1)[:8]}, RuntimeError,
                      ["q_weight and q must not share memory"]),
    "q_scale in place": ({"q_scale": ones(1)}, ValueError, ["q_scale must come with a q_out of float8, got q in"]),
    "q_scale_out in place": ({"q_scale_out": ones(2, 3, 4)}, ValueError, ["q_scale_out must come with a q_out"]),
    "q_scale without float8": ({"q_out": ones(2, 3, 4, 8), "q_scale": ones(1)}, ValueError,
                               ["q_scale must come with q_out of Float8_e4m3fn or Float8_e5m2, got Float"]),
    "both scales": ({**Q8, "q_scale": ones(1), "q_scale_out": ones(2, 3, 4)}, ValueError,
                    ["q_scale must come without q_scale_out", "got both"]),
    "q_scale of two": ({**Q8, "q_scale": ones(2)}, ValueError, ["q_scale must have one element, or [3]", "got [2]"]),
    "q_scale of nothing": ({**Q8, "q_scale": torch.zeros(1)}, ValueError, ["q_scale must be from 2^-126", "got 0"]),
    "q_scale_out of another shape": ({**Q8, "q_scale_out": ones(2, 4, 3)}, ValueError,
                                     ["q_scale_out must be [2, 3, 4], one a token and head of q, got [2, 4, 3]"]),
    "q_scale_out of another dtype": ({**Q8, "q_scale_out": ones(2, 3, 4).half()}, TypeError,
                                     ["q_scale_out must be float32, got Half"]),
    "q_out of another dtype": ({"q_out": ones(2, 3, 4, 8).half()}, TypeError,
                               ["q_out must have q's dtype Float or be Float8_e4m3fn or Float8_e5m2", "got Half"]),
    "float8 of float64": ({**Q8, **{n: good_call()[n].double() for n in good_call() if n[1:] in ("", "_weight")},
                           "key_cache": ones(3, 4, 1, 8).double(), "value_cache": ones(3, 4, 1, 8).double()},
                          TypeError, ["q must be float32, float16 or bfloat16 for q_out of Float8", "got Double"]),
    "caches of another dtype": ({"key_cache": ones(3, 4, 1, 8).half()}, TypeError, ["key_cache must have q's dtype"]),
    "slots and cache_positions": ({"cache_positions": torch.arange(4)}, ValueError, ["cache_positions", "got both"]),
    "a slot that is not there": ({"slots": torch.tensor([[0, 1, 2, 3], [4, 5, 12, 7]])}, IndexError,
                                 ["slots must be below 12", "got 12 for token 2 of sequence 1"]),
    "unknown pairing": ({"pairing": "pairs"}, ValueError, ["pairing must be one of halves, interleaved", "'pairs'"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), WRONG.values(), ids=WRONG.keys())
def test_errors(changes, error, texts):
    arguments = {**good_call(), **changes}
    assert_refused_untouched(mrrope.qk_norm_rotary_and_cache_, arguments, error, *texts)


def test_the_good_call_is_good():
    mrrope.qk_norm_rotary_and_cache_(**good_call())
    mrrope.qk_norm_rotary_and_cache_(**good_call() | {"gate": ones(2, 3, 4, 8), **Q8, "q_scale": ones(3)})
    mrrope.qk_norm_rotary_and_cache_(**good_call() | {**Q8, "q_scale_out": ones(2, 3, 4)})


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_scales_have_the_layout_of_q(device, layout):
    Call(Case(layout=layout, tokens=7), Options(q_out=torch.float8_e4m3fn, q_scale="computed"), device).run_and_check()
