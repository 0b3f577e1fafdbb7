"""mla_rotary_and_cache: the results of rotary, a concatenation and a scatter to the cache, with one rounding."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cache_calls import (
    CacheCall,
    cache_storage,
    cached_tokens,
    near_and_far_blocks,
    random_slots,
    written_arguments,
)
from cache_reference import assert_other_slots_unchanged, assert_rotated_float8, by_slot, nearest_float8
from hypothesis import example, given
from hypothesis import strategies as st
from op_errors import assert_refused_untouched
from rotary_cases import DTYPES, LAYOUTS, OWN_MEMORY, PAIRINGS, Case, cases, onto, storage_of, table_of, whole_memory
from rotary_reference import assert_rotated
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope

IN_PLACE = torch.ops.mrrope.mla_rotary_and_cache_.default
INTO = torch.ops.mrrope.mla_rotary_and_cache_.into
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Kept:
    """How a call's rows are cached."""

    paged: bool = True
    float8: bool = False
    has_scale: bool = False
    latent_dim: int = 24
    slot_dtype: torch.dtype = torch.int64
    memory: str = "contiguous"
    q_out: bool = False
    head_dimension: bool = False
    """Whether k_rope has a dimension of one head."""


def row_shape(case: Case, dim: int) -> tuple[int, ...]:
    return (case.tokens, dim) if case.layout == "thd" else (case.batch, case.tokens, dim)


class Call(CacheCall):
    op = staticmethod(mrrope.mla_rotary_and_cache_)
    inputs = ("q_rope", "k_rope", "latent")

    def __init__(self, case: Case, kept: Kept, device: str) -> None:
        self.case, self.kept = case, kept
        rope = case.rotary_dim
        case = self.case = case.with_changes(head_dim=rope)
        self.q_rope, _ = case.heads_on(device)
        generator = torch.Generator().manual_seed(case.seed + 1)

        def rows(dim: int) -> torch.Tensor:
            memory = "padded" if kept.memory in ("transposed", "sliced") else kept.memory
            view = storage_of(row_shape(case, dim), memory, case.dtype)
            return onto(device, view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64)))

        self.k_rope, self.latent = rows(rope), rows(kept.latent_dim)
        if kept.head_dimension:
            self.k_rope = self.k_rope.unsqueeze({"bhsd": 1, "bshd": 2, "thd": 1}[case.layout])
        self.positions, self.table = case.positions(device), case.table()
        rng = np.random.default_rng([case.seed, 7])
        blocks, block_size, slots = random_slots(case, kept.paged, rng)
        self.slots = slots.to(device, kept.slot_dtype)
        dtype = FLOAT8 if kept.float8 else case.dtype
        self.cache = cache_storage((blocks, block_size, kept.latent_dim + rope), kept.memory, dtype, device)
        self.scale = torch.tensor(rng.uniform(0.004, 0.1), dtype=torch.float32, device=device)
        if not kept.has_scale:
            self.scale = None
        self.q_out = torch.full_like(self.q_rope, -5.0) if kept.q_out else None

    def arguments(self) -> dict:
        names = ("q_rope", "k_rope", "latent", "positions", "table", "cache", "scale", "q_out")
        return {
            **{name: getattr(self, name) for name in names},
            "slots" if self.kept.paged else "cache_positions": self.slots,
            "layout": self.case.layout,
            "pairing": self.case.pairing,
        }

    def raw_arguments(self) -> tuple:
        heads = (self.q_rope,) if self.q_out is None else (self.q_rope, self.q_out)
        packed = self.table.packed(self.q_rope.device)
        options = (self.case.layout, self.case.pairing, self.scale)
        return (*heads, self.k_rope, self.latent, self.positions, packed, self.cache, self.slots, self.kept.paged,
                *options)  # fmt: skip

    def written(self) -> list[torch.Tensor]:
        return [self.q_rope if self.q_out is None else self.q_out, self.cache]

    def each_slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are cached, and their slots, counted over all blocks."""
        return cached_tokens(self.slots, None if self.kept.paged else self.cache.shape[1])

    def check(self, before: "Call") -> None:
        case, table = self.case, self.table
        assert_rotated(self.written()[0], before.q_rope, self.positions, table, case.layout, case.pairing)
        for name in ("k_rope", "latent") + (() if self.q_out is None else ("q_rope",)):
            assert same_bits(whole_memory(getattr(self, name)), whole_memory(getattr(before, name)))
        kept, slots = self.each_slot()
        assert_other_slots_unchanged(self.cache, before.cache, slots)
        positions = self.positions.expand(self.slots.shape).reshape(-1)[kept]
        latent = before.latent.reshape(self.slots.numel(), self.kept.latent_dim)[kept]
        keys = before.k_rope.reshape(self.slots.numel(), case.rotary_dim)[kept]
        rows = by_slot(self.cache, "nhd")[slots]
        latent_rows, key_rows = rows.split([self.kept.latent_dim, case.rotary_dim], dim=-1)
        if self.kept.float8:
            assert same_bits(latent_rows, nearest_float8(latent.float(), self.scale, FLOAT8))
            key_rows = key_rows.contiguous().view(FLOAT8)
            assert_rotated_float8(key_rows[:, None], keys[:, None], positions, table, case.pairing, self.scale)
        else:
            assert same_bits(latent_rows, latent)
            assert_rotated(key_rows[:, None], keys[:, None], positions, table, "thd", case.pairing)


def kept_cases():
    def build(float8, has_scale, **options):
        return Kept(float8=float8, has_scale=float8 and has_scale, **options)

    return st.builds(
        build,
        paged=st.booleans(),
        float8=st.booleans(),
        has_scale=st.booleans(),
        latent_dim=st.sampled_from([0, 3, 8, 64, 100, 512]),
        slot_dtype=st.sampled_from([torch.int32, torch.int64]),
        memory=st.sampled_from(OWN_MEMORY),
        q_out=st.booleans(),
        head_dimension=st.booleans(),
    )


EVERY_KEPT = [Kept(paged, float8, float8) for paged in (True, False) for float8 in (False, True)]


# --- numbers ---


@given(case=cases(), kept=kept_cases())
@example(Case(layout="thd", pairing="interleaved", tokens=65, heads=(128, None), rotary_dim=64, dtype=torch.bfloat16),
         Kept(latent_dim=512))  # fmt: skip
def test_every_token_goes_to_its_slot(device, case, kept):
    if case.dtype == torch.float64:
        kept = replace(kept, float8=False, has_scale=False)
    Call(case, kept, device).run_and_check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("head_dimension", [False, True])
@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_every_cache(device, layout, pairing, head_dimension, kept):
    case = Case(layout=layout, pairing=pairing, batch=2, dtype=torch.bfloat16, rotary_dim=64)
    Call(case, replace(kept, head_dimension=head_dimension), device).run_and_check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_a_rotation_a_concatenation_and_a_scatter(device, dtype):
    tokens, heads = 40, 16
    query = torch.randn(tokens, heads, 192, dtype=torch.float64).to(device, dtype)
    key = torch.randn(tokens, 576, dtype=torch.float64).to(device, dtype)
    latent, k_rope = key.split([512, 64], dim=-1)
    table = mrrope.frequency_table("yarn", rotary_dim=64, base=1e4, original_max_position=4096, scale=40.0)
    positions = torch.arange(tokens, device=device) + 100_000
    cache = torch.zeros(4, 16, 576, dtype=dtype, device=device)
    slots = torch.randperm(64)[:tokens].to(device)
    q_rope, key_rope = mrrope.rotary(query[..., 128:], k_rope[:, None], positions, table, "thd", "interleaved")
    expected_query = torch.cat([query[..., :128], q_rope], dim=-1)
    expected_cache = torch.zeros_like(cache)
    expected_cache.view(-1, 576)[slots] = torch.cat([latent, key_rope[:, 0]], dim=-1)
    result = mrrope.mla_rotary_and_cache_(
        query[..., 128:], k_rope, latent, positions, table, cache, slots, layout="thd"
    )
    assert same_bits(query, expected_query)
    assert same_bits(cache, expected_cache)
    assert same_bits(result, q_rope)


def test_the_absorbed_query_is_a_destination(device):
    query = torch.randn(6, 4, 48, dtype=torch.bfloat16, device=device)
    absorbed = torch.full((6, 4, 40), 7.0, dtype=torch.bfloat16, device=device)
    call = Call(Case(layout="thd", tokens=6, rotary_dim=16, dtype=torch.bfloat16), Kept(), device)
    before = query.clone()
    call.q_rope, call.q_out = query[..., 32:], absorbed[..., 24:]
    call.run_and_check()
    assert torch.equal(query, before)
    assert (absorbed[..., :24] == 7.0).all()


def test_a_static_cache_is_written_at_the_positions(device):
    call = Call(Case(rotary_dim=16), Kept(paged=False), device)
    positions = torch.tensor([3, 4, 5, 6, 7], device=device)
    cache = torch.zeros(2, 9, 40, device=device)
    _, keys = mrrope.rotary(call.q_rope, call.k_rope[:, None], positions, call.table)
    mrrope.mla_rotary_and_cache_(call.q_rope, call.k_rope, call.latent, positions, call.table, cache, pairing="halves")
    expected = torch.zeros_like(cache).index_copy(1, positions, torch.cat([call.latent, keys[:, 0]], dim=-1))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float8_saturates_and_keeps_nan(device, dtype):
    call = Call(Case(layout="thd", tokens=2, dtype=dtype, reach=0), Kept(float8=True), device)
    call.table = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    call.slots = torch.tensor([3, 4], device=device)
    special = [0.0, -0.0, 448.0, 464.0, 465.0, -480.0, 1e4, -1e4, float("inf"), -float("inf"), float("nan")]
    call.latent[0, : len(special)] = torch.tensor(special, dtype=dtype, device=device)
    mrrope.mla_rotary_and_cache_(**call.arguments())
    row = call.cache.view(-1, 40)[3].float().cpu()
    assert row[:10].tolist() == [0.0, -0.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 448.0, -448.0]
    assert row[10].isnan()


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 2.0**127, math.inf, math.nan])
def test_an_impossible_float8_scale_gives_nan(cuda, scale):
    """The latent's and the key's part; the host does not read scales on a GPU."""
    call = Call(Case(layout="thd", tokens=2, dtype=torch.bfloat16), Kept(float8=True), cuda)
    call.slots = torch.tensor([3, 4], device=cuda)
    call.scale = torch.tensor([scale], device=cuda)
    mrrope.mla_rotary_and_cache_(**call.arguments())
    assert call.cache.view(-1, 40)[3:5].float().isnan().all()


def test_e5m2_caches(device):
    call = Call(Case(layout="thd", tokens=2, dtype=torch.float32, reach=0), Kept(), device)
    call.table = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    call.slots = torch.tensor([3, 4], device=device)
    call.cache = torch.zeros(call.cache.shape, device=device).to(torch.float8_e5m2)
    call.scale = torch.full((1,), 0.25, device=device)
    call.latent[0, :4] = torch.tensor([1.1, -3.3, 1e9, float("nan")], device=device)
    positions = call.positions.clone().zero_()
    mrrope.mla_rotary_and_cache_(**{**call.arguments(), "positions": positions})
    rows = call.cache.view(torch.uint8).view(-1, 40)[3:5].cpu()
    wanted = torch.cat([call.latent, call.k_rope.reshape(2, -1)], dim=-1).cpu() / 0.25
    nearest = wanted.clamp(-57344, 57344).to(torch.float8_e5m2).view(torch.uint8)
    finite = ~wanted.isnan()
    assert torch.equal(rows[finite], nearest[finite])
    assert rows.view(torch.float8_e5m2).float()[~finite].isnan().all()


# --- tables and shapes ---


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("indexed", [False, True])
def test_several_tables(device, layout, indexed):
    if layout == "thd" and not indexed:
        pytest.skip("packed tokens have no sequences")
    case = Case(layout=layout, batch=3, tokens=6, dtype=torch.bfloat16)
    call = Call(case, Kept(), device)
    tables = [table_of(method, 16) for method in ("rope", "yarn", "mrrope_pro")]
    index = torch.tensor([2, 0, 1] if layout == "bhsd" else [0, 1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    index = index if indexed else None
    head = 1  # of both layouts
    q, k = mrrope.rotary(call.q_rope, call.k_rope.unsqueeze(head), call.positions, tables, layout, table_index=index)
    mrrope.mla_rotary_and_cache_(**call.arguments() | {"table": tables, "table_index": index})
    assert same_bits(call.q_rope, q)
    kept, slots = call.each_slot()
    rows = call.cache.flatten(0, 1)[slots]
    assert same_bits(rows[:, 24:], k.reshape(-1, 16)[kept])


def test_head_tables_of_one_are_taken(device):
    one = Call(Case(), Kept(), device)
    other = one.copied()
    mrrope.mla_rotary_and_cache_(**one.arguments())
    mrrope.mla_rotary_and_cache_(**other.arguments() | {"table": mrrope.HeadTables([other.table])})
    assert all(same_bits(x, y) for x, y in zip(one.written(), other.written(), strict=True))


@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
@pytest.mark.parametrize("empty", [Case(batch=0), Case(tokens=0), Case(heads=(0, None))], ids=["batch", "tokens", "q"])
def test_empty_tensors(device, kept, empty):
    Call(empty, kept, device).run_and_check()


def test_blocks_more_than_two_to_the_31_elements_apart(device):
    call = Call(Case(layout="thd", tokens=2), Kept(float8=True), device)
    near, far = near_and_far_blocks((2, 1, 40), device)
    call.slots = torch.tensor([1, 0], device=device)
    for cache in (near, far):
        call.cache = cache
        mrrope.mla_rotary_and_cache_(**call.arguments() | {"q_rope": call.q_rope.clone()})
    assert same_bits(far, near)
    assert near.float().abs().sum() > 0


# --- schemas, modes and torch.compile ---


@pytest.mark.parametrize("q_out", [False, True])
@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_opcheck(device, kept, q_out):
    call = Call(Case(dtype=torch.bfloat16, memory="padded"), replace(kept, q_out=q_out), device)
    # The other checks compute on copies of the caches, and float8 has no arithmetic.
    tests = {"test_utils": ("test_autograd_registration", "test_faketensor")} if kept.float8 else {}
    opcheck(INTO if q_out else IN_PLACE, call.raw_arguments(), **tests)


def test_schemas_say_what_is_written():
    assert written_arguments(IN_PLACE) == ["q_rope", "cache"]
    assert written_arguments(INTO) == ["q_out", "cache"]


def test_versions_count(device):
    call = Call(Case(), Kept(), device)
    versions = [x._version for x in call.written()]
    others = [call.k_rope._version, call.latent._version]
    mrrope.mla_rotary_and_cache_(**call.arguments())
    assert [x._version for x in call.written()] == [version + 1 for version in versions]
    assert [call.k_rope._version, call.latent._version] == others


@pytest.mark.parametrize("name", ["q_rope", "k_rope", "latent", "cache", "q_out"])
def test_gradients_are_refused(device, name):
    call = Call(Case(), Kept(q_out=name == "q_out"), device)
    call.assert_gradient_refused(name)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("q_out", [False, True])
def test_compile(device, backend, q_out):
    table = table_of("yarn", 16).to(device)

    def attend(query, key, positions, slots, cache):
        q_rope = (query * 2.0)[..., 8:]
        latent, k_rope = (key * 3.0).split([24, 16], dim=-1)
        out = torch.empty_like(q_rope) if q_out else None
        q = mrrope.mla_rotary_and_cache_(
            q_rope, k_rope, latent, positions, table, cache, slots, layout="thd", q_out=out
        )
        return q.sum(-1) + cache.sum()

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        generator = torch.Generator().manual_seed(tokens)
        query = torch.randn(tokens, 4, 24, generator=generator, dtype=torch.float64).to(device)
        key = torch.randn(tokens, 40, generator=generator, dtype=torch.float64).to(device)
        slots = torch.randperm(16, generator=generator)[:tokens].to(device)
        positions = torch.arange(tokens, device=device)
        caches = [torch.zeros(4, 4, 40, dtype=torch.float64, device=device) for _ in range(2)]
        expected = attend(query, key, positions, slots, caches[0])
        actual = compiled(query, key, positions, slots, caches[1])
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)
        assert caches[0].abs().sum() > 0
        torch.testing.assert_close(*caches, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kept", EVERY_KEPT, ids=str)
def test_graph_capture_with_other_slots(cuda, kept):
    case = Case(dtype=torch.bfloat16, rotary_dim=64)
    others = (Call(case.with_changes(seed=seed), kept, cuda) for seed in (3, 4))
    Call(case, kept, cuda).assert_graph_replays(others)


def test_runs_on_the_current_stream(cuda):
    Call(Case(), Kept(), cuda).assert_runs_on_the_current_stream()


# --- errors ---


def ones(*shape, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


def good_call() -> dict:
    return {
        "q_rope": ones(2, 3, 4, 8),
        "k_rope": ones(2, 4, 8),
        "latent": ones(2, 4, 16),
        "positions": torch.arange(4),
        "table": table_of("yarn", 8),
        "cache": ones(3, 4, 24),
        "slots": torch.arange(8).view(2, 4),
    }


CACHE8 = torch.zeros(3, 4, 24, dtype=FLOAT8)
SHARED = ones(3, 4, 24)
ALIAS = ones(2, 1, 4, 8)
TABLE = table_of("yarn", 8)
WRONG = {
    # types
    "q_rope is a list": ({"q_rope": [1.0]}, TypeError, ["q_rope must be a tensor", "got list"]),
    "k_rope is None": ({"k_rope": None}, TypeError, ["k_rope must be a tensor", "NoneType"]),
    "latent is a number": ({"latent": 3}, TypeError, ["latent must be a tensor", "got int"]),
    "cache is a tuple": ({"cache": ()}, TypeError, ["cache must be a tensor", "got tuple"]),
    "scale is a number": ({"cache": CACHE8, "scale": 0.5}, TypeError, ["scale must be a tensor or None", "float"]),
    "table is a name": ({"table": "yarn"}, TypeError, ["table must be a FrequencyTable", "got str"]),
    "slots and cache_positions": ({"cache_positions": torch.arange(4)}, ValueError, ["cache_positions must", "both"]),
    # tables
    "head tables": ({"table": mrrope.HeadTables([TABLE, TABLE, TABLE])}, ValueError,
                    ["table must be one for all heads", "share the rope part of the key", "got 3 head tables"]),
    "a smaller table": ({"table": table_of("yarn", 6)}, ValueError,
                        ["q_rope must have table.rotary_dim (6) components", "[2, 3, 4, 8]"]),
    "a larger table": ({"table": table_of("yarn", 10)}, ValueError, ["table.rotary_dim must be at most", "q_rope"]),
    # shapes
    "q_rope of rank 3": ({"q_rope": ones(3, 4, 8)}, ValueError, ["q_rope must be [batch, heads", "3 dimensions"]),
    "k_rope of rank 2": ({"k_rope": ones(4, 8)}, ValueError,
                         ["k_rope must be [batch, tokens, dim], or [batch, heads, tokens, head_dim] with one head",
                          "2 dimensions"]),
    "k_rope of other tokens": ({"k_rope": ones(2, 5, 8)}, ValueError,
                               ["k_rope must be [batch, tokens, dim]", "2 sequences of 4 tokens", "[2, 5, 8]"]),
    "k_rope of two heads": ({"k_rope": ones(2, 2, 4, 8)}, ValueError, ["k_rope must be", "one head", "[2, 2, 4, 8]"]),
    "k_rope of another dim": ({"k_rope": ones(2, 4, 6)}, ValueError, ["k_rope must have table.rotary_dim (8)", "6"]),
    "latent of rank 4": ({"latent": ones(2, 1, 4, 16)}, ValueError, ["latent must be [batch, tokens, dim]", "4 dim"]),
    "latent of another batch": ({"latent": ones(1, 4, 16)}, ValueError, ["latent must be", "2 sequences", "[1, 4, "]),
    "cache of rank 4": ({"cache": ones(3, 4, 1, 24)}, ValueError, ["cache must be [blocks, block_size", "4 dim"]),
    "cache of another dim": ({"cache": ones(3, 4, 25)}, ValueError, ["cache must be [blocks, block_size, 24]", "25]"]),
    "static of another batch": ({"slots": None}, ValueError, ["cache must hold q_rope's 2 sequences", "[3, 4, 24]"]),
    "too few slots": ({"slots": torch.arange(4)}, ValueError, ["slots must be 8, one for each token", "got [4]"]),
    "too few positions": ({"positions": torch.arange(3)}, ValueError, ["positions must be [4]", "q_rope", "got [3]"]),
    "rows of positions": ({"positions": torch.zeros(3, 2, 4).long()}, ValueError, ["positions must be one", "3 dim"]),
    "q_out of another shape": ({"q_out": ones(2, 3, 4, 9)}, ValueError, ["q_out must have q_rope's shape", "9]"]),
    "scale of two": ({"cache": CACHE8, "scale": ones(2)}, ValueError, ["scale must have one element", "got [2]"]),
    "table_index too short": ({"table": [TABLE, TABLE], "table_index": torch.zeros(1).int()}, ValueError,
                              ["table_index must be [2]", "for q_rope of", "got [1]"]),
    # strides and memory
    "strided latent": ({"latent": ones(2, 4, 32)[..., ::2]}, ValueError, ["latent must be", "contiguous last dim"]),
    "strided cache": ({"cache": ones(3, 4, 48)[..., ::2]}, ValueError, ["cache must have a contiguous last dim"]),
    "expanded cache": ({"cache": ones(1, 4, 24).expand(3, 4, 24)}, RuntimeError, ["cache must not overlap itself"]),
    "expanded q_rope": ({"q_rope": ones(1, 3, 4, 8).expand(2, 3, 4, 8)}, RuntimeError, ["q_rope must not overlap"]),
    "k_rope is q_rope": ({"q_rope": ALIAS, "k_rope": ALIAS}, RuntimeError, ["k_rope and q_rope must not share memory"]),
    "latent in q_rope": ({"q_rope": ALIAS, "latent": ALIAS[:, 0], "cache": ones(3, 4, 16)}, RuntimeError,
                         ["latent and q_rope must not share memory"]),
    "k_rope in the cache": ({"k_rope": SHARED.view(-1)[:64].view(2, 4, 8), "cache": SHARED}, RuntimeError,
                            ["k_rope and cache must not share memory"]),
    # dtypes
    "latent of another dtype": ({"latent": ones(2, 4, 16).half()}, TypeError, ["latent must have q_rope's dtype"]),
    "cache of another dtype": ({"cache": SHARED.half()}, TypeError,
                               ["cache must have q_rope's dtype Float or be Float8_e4m3fn", "got Half"]),
    "float8 of float64": ({"cache": CACHE8, **{name: good_call()[name].double() for name in
                                               ("q_rope", "k_rope", "latent")}}, TypeError,
                          ["q_rope must be float32, float16 or bfloat16 for cache of Float8", "got Double"]),
    "slots of floats": ({"slots": ones(2, 4)}, TypeError, ["slots must be int32 or int64", "got Float"]),
    "scale of float64": ({"cache": CACHE8, "scale": ones(1).double()}, TypeError, ["scale must be float32"]),
    "scale of nothing": ({"cache": CACHE8, "scale": torch.tensor([0.0])}, ValueError, ["scale must be from 2^-126"]),
    "scale of infinity": ({"cache": CACHE8, "scale": torch.tensor([math.inf])}, ValueError, ["scale must be from"]),
    "a scale without float8": ({"scale": ones(1)}, ValueError, ["scale must come with a cache of Float8"]),
    # options, devices, values
    "unknown pairing": ({"pairing": "quarters"}, ValueError, ["pairing must be one of halves, interleaved"]),
    "unknown layout": ({"layout": "sbhd"}, ValueError, ["layout must be one of"]),
    "cache on another device": ({"cache": ones(3, 4, 24, device="meta")}, RuntimeError, ["cache must be on q_rope's"]),
    "latent on another device": ({"latent": ones(2, 4, 16, device="meta")}, RuntimeError, ["latent must be on"]),
    "a slot too large": ({"slots": torch.full((2, 4), 12)}, IndexError, ["slots must be below 12", "got 12 for"]),
    "a position past a static cache": ({"slots": None, "cache": ones(2, 3, 24)}, IndexError,
                                       ["cache_positions, or else positions, must be below 3", "got 3 for token 3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_nothing_is_written(name):
    changes, error, texts = WRONG[name]
    arguments = good_call() | changes
    assert_refused_untouched(mrrope.mla_rotary_and_cache_, arguments, error, *texts)


def test_the_good_call_is_good():
    assert isinstance(mrrope.mla_rotary_and_cache_(**good_call()), torch.Tensor)
