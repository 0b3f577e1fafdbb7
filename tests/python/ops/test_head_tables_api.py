"""HeadTables: the class, and every op of the Python API with it, head by head against float64."""

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
from layer_tables import MODEL, head_by_head, random_heads, random_table
from norm_reference import assert_normed
from op_errors import assert_refused
from rotary_cases import DTYPES, LAYOUTS, PAIRINGS
from rotary_reference import TOLERANCES, assert_rotated, rotated

import mrrope
from mrrope import FrequencyTable, HeadTables
from mrrope.tables.frequency_table import packed_stack

CPU = torch.device("cpu")


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qk(layout: str, q_heads: int, k_heads: int, dtype=torch.float32, batch=2, tokens=5, head_dim=20):
    shapes = {
        "bhsd": lambda n: (batch, n, tokens, head_dim),
        "bshd": lambda n: (batch, tokens, n, head_dim),
        "thd": lambda n: (tokens, n, head_dim),
    }
    return [random_tensor(n, *shapes[layout](n), dtype=dtype) for n in (q_heads, k_heads)]


def positions_of(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(9))


def assert_rotated_by_heads(actual, x, positions, tables, layout="bhsd", pairing="halves"):
    for index, table in head_by_head(x, tables, layout):
        assert_rotated(actual[index], x[index], positions, table, layout, pairing)


# --- the class ---


def test_it_is_like_a_tuple():
    tables = [random_table(i) for i in range(3)]
    heads = HeadTables(tables)
    assert len(heads) == heads.key_heads == 3
    assert list(heads) == tables
    assert heads[1] is tables[1]
    assert heads[-1] is tables[2]
    with pytest.raises(IndexError):
        heads[3]
    assert (heads.rotary_dim, heads.base, heads.original_max_position, heads.scale) == (16, 1e4, 2048, 8.0)
    for text in ("HeadTables(3 key heads", "rotary_dim=16", "base=10000", "original_max_position=2048", "scale=8"):
        assert text in repr(heads)


def test_equality_and_hash():
    heads = random_heads(3)
    assert heads == random_heads(3)
    assert hash(heads) == hash(random_heads(3))
    assert heads != HeadTables([heads[0], heads[2], heads[1]])
    assert heads != HeadTables([heads[0], heads[1]])
    assert HeadTables([heads[0]]) != heads[0]
    assert heads != list(heads)
    assert len({heads, random_heads(3), random_heads(3, seed=1)}) == 2


BAD_TABLES = {
    "none": ([], ValueError, ["tables must hold a FrequencyTable per key head, got none"]),
    "a table": (random_table(0), TypeError, ["tables must be a FrequencyTable per key head, got FrequencyTable"]),
    "a name": ([random_table(0), "rope"], TypeError, ["tables[1] must be a FrequencyTable, got str"]),
    "nested": ([random_heads(2)], TypeError, ["tables[0] must be a FrequencyTable, got HeadTables"]),
    **{f"another {name}": ([random_table(0), random_table(1), random_table(2, **{name: value})], ValueError,
                           [f"tables[2] must have tables[0]'s {name} {MODEL[name]:g}, got {value:g}"])
       for name, value in (("rotary_dim", 18), ("base", 2e4), ("original_max_position", 4096), ("scale", 4.0))},
}  # fmt: skip


@pytest.mark.parametrize(("tables", "error", "texts"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_what_is_no_set_of_heads_is_refused(tables, error, texts):
    assert_refused(lambda: HeadTables(tables), error, *texts)


def test_packed_words():
    heads = random_heads(3)
    packed = heads.packed(CPU)
    assert (packed.shape, packed.dtype, packed.is_contiguous()) == ((1, 1, 3, 9), torch.int64, True)
    for table, words in zip(heads, packed[0, 0], strict=True):
        assert torch.equal(words[:-1], table.turns)
        assert words[-1:].view(torch.float64).item() == table.attention_factor
    assert heads.packed(CPU) is packed


def test_device_copies_are_cached(device):
    heads = random_heads(2)
    on_device = torch.empty(0, device=device).device
    assert heads.to(device) is heads
    assert heads.packed(on_device).device == on_device
    assert heads.packed(on_device) is heads.packed(on_device)


def test_made_in_inference_mode():
    with torch.inference_mode():
        heads = random_heads(2)
        stack = packed_stack([heads, heads], CPU)
    assert not heads.packed(CPU).is_inference()
    assert not stack.is_inference()


def test_relative_and_inverse_tables():
    old, new = random_heads(3), random_heads(3, seed=1)
    change = new.relative_to(old)
    assert list(change) == [b.relative_to(a) for a, b in zip(old, new, strict=True)]
    assert list(new.relative_to(old[0])) == [table.relative_to(old[0]) for table in new]
    assert list(old.inverse()) == [table.inverse() for table in old]
    assert_refused(
        lambda: old.relative_to(random_heads(2)), ValueError, "other must hold tables for 3 key heads, got 2"
    )
    assert_refused(lambda: old.relative_to("rope"), TypeError, "other must be a FrequencyTable or HeadTables, got str")


def test_is_like():
    heads, table = random_heads(3), random_table(0)
    renamed = HeadTables(FrequencyTable.from_dict({**one.to_dict(), "bounds": [0, 1]}) for one in heads)
    assert heads != renamed
    assert heads.is_like(renamed)
    assert not heads.is_like(random_heads(3, seed=1))
    assert not heads.is_like(random_heads(2))
    alike = HeadTables([table] * 3)
    assert alike.is_like(table)
    assert table.is_like(alike)
    assert not heads.is_like(table)
    assert not table.is_like(heads)


# --- JSON ---


@pytest.mark.parametrize(
    "heads",
    [random_heads(3), random_heads(1), random_heads(2).relative_to(random_heads(2, seed=1)),
     HeadTables([mrrope.frequency_table(name, **MODEL) for name in ("yarn", "mrrope_pro", "rope")])],
    ids=["found", "one", "relative", "methods"],
)  # fmt: skip
def test_round_trips_are_exact(tmp_path, heads):
    heads.save(tmp_path / "heads.json")
    copies = {
        "dict": HeadTables.from_dict(heads.to_dict()),
        "json": HeadTables.from_dict(json.loads(json.dumps(heads.to_dict(), allow_nan=False))),
        "file": HeadTables.load(tmp_path / "heads.json"),
        "pickle": pickle.loads(pickle.dumps(heads)),
        "copy": copy.copy(heads),
        "deepcopy": copy.deepcopy(heads),
    }
    for name, copied in copies.items():
        assert copied == heads, name
        assert hash(copied) == hash(heads), name
        assert [table.to_dict() for table in copied] == [table.to_dict() for table in heads], name
        assert torch.equal(copied.packed(CPU), heads.packed(CPU)), name
    assert json.loads((tmp_path / "heads.json").read_text()) == heads.to_dict()


def test_dicts_state_once_what_is_shared():
    heads = random_heads(3)
    data = heads.to_dict()
    assert data["format"] == "mrrope.HeadTables/1"
    assert data["rotary_dim"] == 16
    assert all(set(row) == {"attention_factor", "cumulative_scale"} for row in data["heads"])
    assert [row["cumulative_scale"] for row in data["heads"]] == [table.cumulative_scale.tolist() for table in heads]


def without(data: dict, name: str) -> dict:
    return {key: value for key, value in data.items() if key != name}


def bad_dicts() -> dict[str, tuple]:
    data = random_heads(2).to_dict()
    first, second = data["heads"]
    return {
        "a list": ([1], TypeError, ["data must be a dict as to_dict makes it, got list"]),
        "a table's": (random_table(0).to_dict(), ValueError,
                      ["format must be 'mrrope.HeadTables/1'", "'mrrope.FrequencyTable/1'", "mrrope.FrequencyTable"]),
        "no format": (without(data, "format"), ValueError, ["format must be 'mrrope.HeadTables/1', got None"]),
        "no heads": (without(data, "heads"), ValueError, ["heads must be a list with a table per key head, got None"]),
        "empty heads": ({**data, "heads": []}, ValueError, ["heads must be a list", "got []"]),
        "heads of numbers": ({**data, "heads": [first, 3]}, TypeError, ["heads[1] must be a JSON object", "got int"]),
        "a missing field": (without(data, "base"), ValueError, ["heads[0]: a table needs the fields ['base']"]),
        "an unknown field": ({**data, "theta": 1}, ValueError, ["heads[0]: a table has no fields ['theta']"]),
        "a repeated field": ({**data, "heads": [first, {**second, "base": 1e4}]}, ValueError,
                             ["heads[1] must not repeat the fields of all tables, got ['base']"]),
        "too few scales": ({**data, "heads": [first, {**second, "cumulative_scale": [1.0]}]}, ValueError,
                           ["heads[1]: ", "must hold rotary_dim / 2 = 8 cumulative scales", "got 1"]),
        "a scale of zero": ({**data, "heads": [{**first, "cumulative_scale": [0.0] * 8}, second]}, ValueError,
                            ["heads[0]: ", "must be positive finite numbers", "got 0"]),
        "only turns": ({**data, "heads": [{**first, "turns": [0] * 8}, second]}, ValueError,
                       ["heads[0]: a table needs the fields ['inv_freq']"]),
        "two scales": ({**without(data, "scale"), "heads": [{**first, "scale": 2.0}, {**second, "scale": 4.0}]},
                       ValueError, ["tables[1] must have tables[0]'s scale 2, got 4"]),
    }  # fmt: skip


@pytest.mark.parametrize(("data", "error", "texts"), bad_dicts().values(), ids=bad_dicts().keys())
def test_corrupted_dicts(data, error, texts):
    assert_refused(lambda: HeadTables.from_dict(data), error, *texts)


def test_other_kinds_of_files_are_refused(tmp_path):
    path = tmp_path / "tables.json"
    random_heads(2).save(path)
    assert_refused(
        lambda: FrequencyTable.load(path), ValueError, "mrrope.HeadTables/1", "which mrrope.HeadTables reads"
    )
    random_table(0).save(path)
    assert_refused(lambda: HeadTables.load(path), ValueError, "which mrrope.FrequencyTable reads")
    assert_refused(lambda: HeadTables.load("no-such-table"), FileNotFoundError, "path must be", "'no-such-table'")


def test_compact_dicts_leave_out_only_what_is_implied():
    implied = {"inv_freq", "turns"}
    found, formula = random_table(0), mrrope.frequency_table("yarn", **MODEL)
    # longrope on a model's own frequencies multiplies two scales in more than double precision.
    extended = mrrope.frequency_table("longrope", **MODEL, factors=[1.1] * 8, native=found)
    for table, is_compact in ((found, True), (formula, False), (extended, False), (found.inverse(), False)):
        compact = table.to_dict(compact=True)
        assert table.to_dict().keys() - compact.keys() == (implied if is_compact else set())
        assert FrequencyTable.from_dict(compact) == table


# --- stacks ---


def test_a_mixed_stack_has_rows_for_every_head():
    table, heads = random_table(7), random_heads(3)
    stack = packed_stack([table, heads], CPU)
    assert (stack.shape, stack.is_contiguous()) == ((2, 1, 3, 9), True)
    assert torch.equal(stack[0, 0], table.packed(CPU).expand(3, -1))
    assert torch.equal(stack[1], heads.packed(CPU)[0])
    assert packed_stack([table, heads], CPU) is stack


def test_a_stack_is_forgotten_with_its_tables():
    first, heads = random_table(7), random_heads(3)
    stack = weakref.ref(packed_stack([first, heads], CPU))
    assert stack() is not None
    del heads
    gc.collect()
    assert stack() is None
    assert not first._stacks


def test_stacks_of_different_heads_are_refused():
    tables = [random_table(0), random_heads(3), random_heads(2)]
    text = "table[2] must hold tables for 3 key heads, as those before it do, got 2"
    assert_refused(lambda: packed_stack(tables, CPU), ValueError, text)
    tables[2] = random_heads(3, rotary_dim=18)
    assert_refused(lambda: packed_stack(tables, CPU), ValueError, "table[2] must have table[0]'s rotary_dim 16, got 18")
    tables[2] = mrrope.TableSet([random_heads(3)])
    text = "table[2] must be a FrequencyTable, HeadTables or AxisTables, got TableSet"
    assert_refused(lambda: packed_stack(tables, CPU), TypeError, text)


# --- ops ---


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(device, layout, pairing, dtype):
    heads = random_heads(3)
    q, k = (x.to(device) for x in qk(layout, 6, 3, dtype))
    positions = positions_of(5).to(device)
    for actual, x in zip(mrrope.rotary(q, k, positions, heads, layout, pairing), (q, k), strict=True):
        assert_rotated_by_heads(actual, x, positions, heads, layout, pairing)
    in_place = [q.clone(), k.clone()]
    mrrope.rotary_(*in_place, positions, heads, layout, pairing)
    for actual, x in zip(in_place, (q, k), strict=True):
        assert_rotated_by_heads(actual, x, positions, heads, layout, pairing)
    alone, none = mrrope.rotary(k, None, positions, heads, layout, pairing)
    assert none is None
    assert_rotated_by_heads(alone, k, positions, heads, layout, pairing)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_with_an_index(device, layout):
    tables = [random_heads(2), random_table(5), random_heads(2, seed=1)]
    q, k = (x.to(device) for x in qk(layout, 4, 2))
    positions = positions_of(5).to(device)
    index = torch.tensor([2, 1] if layout != "thd" else [1, 2, 2, 0, 1], dtype=torch.int32, device=device)
    for actual, x in zip(mrrope.rotary(q, k, positions, tables, layout, table_index=index), (q, k), strict=True):
        for i, number in enumerate(index.tolist()):
            at = slice(i, i + 1)
            of_token = positions[at] if layout == "thd" else positions
            assert_rotated_by_heads(actual[at], x[at], of_token, tables[number], layout)


def test_a_list_with_one_entry_per_sequence(device):
    tables = [random_heads(2), random_heads(2, seed=1)]
    q, k = (x.to(device) for x in qk("bhsd", 4, 2))
    positions = positions_of(2, 5).to(device)
    for actual, x in zip(mrrope.rotary(q, k, positions, tables), (q, k), strict=True):
        for i in range(2):
            assert_rotated_by_heads(actual[i : i + 1], x[i : i + 1], positions[i], tables[i])


def test_gradients(device):
    heads = random_heads(2)
    q, k = (x.double().to(device).requires_grad_() for x in qk("bhsd", 4, 2))
    positions = positions_of(5).to(device)
    outputs = mrrope.rotary(q, k, positions, heads)
    upstream = [random_tensor(3, *x.shape, dtype=torch.float64).to(device) for x in (q, k)]
    gradients = torch.autograd.grad(outputs, (q, k), upstream)
    for gradient, x in zip(gradients, upstream, strict=True):
        for index, table in head_by_head(x, heads, "bhsd"):
            assert_rotated(gradient[index], x[index], positions, table, conjugate=True)


@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_qk_norm_rotary(device, over):
    heads = random_heads(2)
    q, k = (x.to(device) for x in qk("bshd", 4, 2))
    count = {"head": lambda x: 20, "all_heads": lambda x: 20 * x.shape[2]}[over]
    weights = [random_tensor(11, count(x)).to(device) for x in (q, k)]
    positions = positions_of(5).to(device)
    actual = mrrope.qk_norm_rotary(q, k, *weights, positions, heads, eps=1e-6, over=over, layout="bshd")
    in_place = [q.clone(), k.clone()]
    mrrope.qk_norm_rotary_(*in_place, *weights, positions, heads, eps=1e-6, over=over, layout="bshd")
    for result, changed, x, weight in zip(actual, in_place, (q, k), weights, strict=True):
        assert torch.equal(result, changed)
        if over == "head":
            for index, table in head_by_head(x, heads, "bshd"):
                assert_normed(result[index], x[index], weight, positions, table, over=over, layout="bshd")
        else:
            # One mean covers all heads: every table rotates the whole, and each head is compared with its table's.
            for index, table in head_by_head(x, heads, "bshd"):
                rms = (x.double().square().mean((2, 3), keepdim=True) + 1e-6).rsqrt()
                exact = x.double() * rms * weight.double().view(x.shape[2], 20)
                expected = rotated(exact[index], positions, table, "bshd").to(device)
                bound = 32 * torch.finfo(torch.float32).eps * exact[index].norm(dim=-1, keepdim=True) * 1.5
                assert ((result[index].double() - expected).abs() <= bound).all()


def test_rotary_and_cache(device):
    heads = random_heads(2)
    q, k = (x.to(device) for x in qk("thd", 4, 2))
    v, positions = random_tensor(5, *k.shape).to(device), positions_of(5).to(device)
    caches = [torch.full((3, 4, 2, 20), torch.nan, device=device) for _ in "kv"]
    slots = torch.tensor([7, 0, -1, 11, 4], device=device)
    before = q.clone()
    mrrope.rotary_and_cache_(q, k, v, positions, heads, *caches, slots, layout="thd")
    assert_rotated_by_heads(q, before, positions, heads, "thd")
    written = slots >= 0
    stored = [cache.flatten(0, 1)[slots[written]] for cache in caches]
    assert_rotated_by_heads(stored[0], k[written], positions[written], heads, "thd")
    assert torch.equal(stored[1], v[written])
    assert sum(int(cache.isfinite().all(-1).sum()) for cache in caches) == 2 * 4 * 2


def test_qkv_rotary(device):
    heads = random_heads(2)
    x, weight = random_tensor(1, 2, 5, 24).double(), random_tensor(2, 8 * 16, 24).double()
    positions = positions_of(5)
    arguments = [a.to(device) for a in (x, weight)]
    q, k, v = mrrope.qkv_rotary(*arguments, None, positions.to(device), heads, 4, 2, layout="bshd")
    projected = (x @ weight.t()).view(2, 5, 8, 16)
    for actual, part in zip((q, k, v), projected.split([4, 2, 2], dim=2), strict=True):
        for index, table in head_by_head(part, heads, "bshd"):
            expected = part[index] if actual is v else rotated(part[index], positions, table, "bshd")
            allowed = (TOLERANCES[torch.float64].arithmetic + 24 * 2.0**-52) * 24 * 16
            assert (actual[index].cpu() - expected).abs().max() <= allowed


def test_rescale_cache(device):
    old, new = random_heads(2), random_heads(2, seed=1)
    positions = torch.arange(5, device=device)
    unrotated = [random_tensor(i, 3, 4, 5, 20).to(device) for i in range(2)]
    keys = [mrrope.rotary(x, None, positions, old)[0] for x in unrotated]
    mrrope.rescale_cache_(keys, positions, [old, old[0], new], [new, old, new])
    for x, changed in zip(unrotated, keys, strict=True):
        for index, table in head_by_head(x[:1], new, "bhsd"):
            expected = rotated(x[:1][index], positions, table)
            error = (changed[:1][index].cpu().double() - expected).abs().max()
            # Rounded after both rotations, with factors of at most 1.5 and their quotient of 3.
            assert error <= 8 * TOLERANCES[torch.float32].arithmetic * x.norm(dim=-1).max().item()
        assert torch.equal(changed[2], mrrope.rotary(x[2:], None, positions, old)[0][0]), "the table did not change"


HEAD_COUNTS = {
    "q": ((5, 2), "q must have a multiple of 2 heads, the number of head tables, got 5"),
    "k": ((4, 3), "k must have a multiple of 2 heads, the number of head tables, got 3"),
}


@pytest.mark.parametrize(("counts", "text"), HEAD_COUNTS.values(), ids=HEAD_COUNTS.keys())
def test_heads_without_tables_are_refused(counts, text):
    q, k = qk("bhsd", *counts)
    before = q.clone(), k.clone()
    positions, heads = torch.arange(5), random_heads(2)
    assert_refused(lambda: mrrope.rotary(q, k, positions, heads), ValueError, text)
    assert_refused(lambda: mrrope.rotary_(q, k, positions, heads), ValueError, text)
    assert_refused(lambda: mrrope.rotary_(q, k, positions, [heads, heads]), ValueError, text)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_what_is_no_table_is_refused():
    q, k = qk("bhsd", 4, 2)
    tables = mrrope.TableSet([random_heads(2)])
    for table in (tables, "rope", None):
        name = type(table).__name__
        text = f"table must be a FrequencyTable, HeadTables or AxisTables, got {name}"
        assert_refused(lambda table=table: mrrope.rotary(q, k, torch.arange(5), table), TypeError, text)
    text = "table[1] must be a FrequencyTable, HeadTables or AxisTables, got TableSet"
    assert_refused(lambda: mrrope.rotary(q, k, torch.arange(5), [random_heads(2), tables]), TypeError, text)


# --- torch.compile ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("form", ["alone", "list"])
def test_compile(device, backend, form):
    heads = random_heads(2)
    table = heads if form == "alone" else [heads, random_table(4)]
    q, k = (x.to(device).requires_grad_() for x in qk("bhsd", 4, 2))
    positions = positions_of(2, 5).to(device)
    compiled = torch.compile(mrrope.rotary, fullgraph=True, backend=backend)
    expected = mrrope.rotary(q, k, positions, table)
    actual = compiled(q, k, positions, table)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad([x.square().sum() for x in found], (q, k)) for found in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_of_rescale_cache(device, backend):
    old, new = random_heads(2), random_heads(2, seed=1)
    positions = torch.arange(5, device=device)
    keys = random_tensor(0, 2, 4, 5, 20).to(device)
    expected, actual = keys.clone(), keys.clone()
    mrrope.rescale_cache_(expected, positions, old, [new, old])
    torch.compile(mrrope.rescale_cache_, fullgraph=True, backend=backend)(actual, positions, old, [new, old])
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, keys)
