"""Query factors in HeadTables, in TableSet, in their files and in stacks."""

import copy
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch
from layer_tables import random_factors, random_heads, random_table
from op_errors import assert_refused
from query_factor_tables import CPU, EACH_KIND, FACTORS, MIXED, for_all, of_three
from torch._subclasses import FakeTensorMode

from mrrope import HeadTables, TableSet
from mrrope.tables.frequency_table import packed_stack
from mrrope.tables.lookup import load_tables
from mrrope.tables.query_factors import FACTOR_ROW, factors_in

# --- the class ---


def test_factors_of_every_query_head():
    heads = of_three()
    assert heads.query_factors == tuple(FACTORS)
    assert heads.query_heads == 6
    assert (heads.key_heads, len(heads)) == (3, 3)
    assert list(heads) == list(random_heads(3))
    assert random_heads(3).query_factors is random_heads(3).query_heads is None
    assert random_table(0).query_factors is random_table(0).query_heads is None


def test_one_table_for_all_key_heads():
    heads = for_all()
    assert heads.key_heads is None
    assert (len(heads), heads.query_heads) == (1, 6)
    assert heads[0] == random_table(0)
    assert HeadTables([random_table(0)]).key_heads == 1


@pytest.mark.parametrize("kind", [tuple, list, iter, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_factors_are_any_numbers(kind):
    heads = of_three(kind([1, 2, 3]))
    assert heads.query_factors == (1.0, 2.0, 3.0)
    assert all(type(factor) is float for factor in heads.query_factors)


COUNT = "query_factors must hold a factor per query head, a multiple of the 3 tables, got"
RANGE = "must be a positive finite number in float32's range, got"
BAD_FACTORS = {
    "none": ([], ValueError, f"{COUNT} 0"),
    "four": ([1.0] * 4, ValueError, f"{COUNT} 4"),
    "zero": ([1.0, 0.0, 1.0], ValueError, f"query_factors[1] {RANGE} 0"),
    "negative": ([1.0, 1.0, -1.5], ValueError, f"query_factors[2] {RANGE} -1.5"),
    "infinite": ([math.inf, 1.0, 1.0], ValueError, f"query_factors[0] {RANGE} inf"),
    "nan": ([math.nan, 1.0, 1.0], ValueError, f"query_factors[0] {RANGE} nan"),
    "subnormal": ([1e-39, 1.0, 1.0], ValueError, f"query_factors[0] {RANGE} 1e-39"),
    "large": ([1e39, 1.0, 1.0], ValueError, f"query_factors[0] {RANGE} 1e+39"),
    "huge": ([10**400, 1.0, 1.0], ValueError, "query_factors[0] must be within the range of a float"),
    "a name": ([1.0, "rope", 1.0], TypeError, "query_factors[1] must be a number, got 'rope'"),
    "a boolean": ([True, 1.0, 1.0], TypeError, "query_factors[0] must be a number, got True"),
    "a number": (1.0, TypeError, "query_factors must be a sequence of numbers, got 1.0"),
    "a text": ("111", TypeError, "query_factors[0] must be a number, got '1'"),
}  # fmt: skip


@pytest.mark.parametrize(("factors", "error", "text"), BAD_FACTORS.values(), ids=BAD_FACTORS.keys())
def test_bad_factors_are_refused(factors, error, text):
    assert_refused(lambda: of_three(factors), error, text)
    data = {**of_three().to_dict(), "query_factors": factors}
    assert_refused(lambda: HeadTables.from_dict(data), error, text)
    data = TableSet([random_table(5), of_three()]).to_dict()
    data["layers"][1]["query_factors"] = factors
    assert_refused(lambda: TableSet.from_dict(data), error, f"layers[1].{text}")


def test_hashes_are_the_same_in_every_process(tmp_path):
    """Caches of keys are known by them. Before Python 3.12 the hash of None is an address."""
    tables = {"heads": random_heads(3), "factors": of_three(), "set": TableSet([random_heads(3), of_three()])}
    script = "import pickle, sys; print(*map(hash, pickle.load(sys.stdin.buffer)))"
    command = [sys.executable, "-c", script]
    given = pickle.dumps(list(tables.values()))
    # A script's folder comes first in sys.path, and not the checkout's, whose package need not be compiled.
    ran = [subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True, cwd=tmp_path) for _ in range(2)]
    found = [each.stdout for each in ran]
    assert found[0] == found[1]
    assert list(map(int, found[0].split())) == list(map(hash, tables.values()))


def test_equality_and_hash():
    heads = of_three()
    assert heads == of_three()
    assert hash(heads) == hash(of_three())
    assert heads != of_three([*FACTORS[:-1], 0.25])
    assert heads != random_heads(3)
    assert random_heads(3) != heads
    assert of_three([1.0] * 6) != random_heads(3)
    assert of_three([1.0] * 3) != of_three([1.0] * 6)
    assert len({heads, of_three(), random_heads(3), for_all()}) == 3


def test_is_like():
    heads = of_three()
    assert heads.is_like(of_three())
    assert not heads.is_like(of_three(FACTORS[::-1]))
    assert not heads.is_like(of_three(FACTORS[:3]))
    assert not heads.is_like(of_three(seed=1))
    for ones in (of_three([1.0] * 6), of_three([1.0] * 3)):
        assert ones.is_like(random_heads(3))
        assert random_heads(3).is_like(ones)
        assert not ones.is_like(heads)
    assert not heads.is_like(random_heads(3))
    assert not random_heads(3).is_like(heads)
    table = random_table(0)
    assert for_all().is_like(HeadTables([table] * 3, FACTORS))
    assert for_all([1.0]).is_like(table)
    assert table.is_like(for_all([1.0]))
    assert not for_all().is_like(table)
    assert not table.is_like(for_all())


@pytest.mark.parametrize(
    ("count", "shown"),
    [(1, "query_factors=[0.5]"), (4, "query_factors=[0.5, 1.5, 2.5, 3.5]"), (6, "query_factors=[0.5, 1.5, ..., 5.5]")],
)
def test_repr(count, shown):
    assert repr(for_all([0.5 + i for i in range(count)])) == (
        f"HeadTables(all key heads, rotary_dim=16, base=10000, original_max_position=2048, scale=8, {shown})"
    )
    assert repr(of_three([0.5, 1.5, 2.5])).startswith("HeadTables(3 key heads, rotary_dim=16")
    assert "query_factors" not in repr(random_heads(3))


def test_tables_of_keys():
    heads, one = of_three(), for_all()
    assert heads.without_query_factors() == random_heads(3)
    assert heads.without_query_factors() is heads.without_query_factors(), "stacks are cached by identity"
    assert one.without_query_factors() is one[0]
    plain, table = random_heads(3), random_table(0)
    assert plain.without_query_factors() is plain
    assert table.without_query_factors() is table
    layers = TableSet([heads, one, table])
    assert list(layers.without_query_factors()) == [random_heads(3), one[0], table]
    assert layers.without_query_factors() is layers.without_query_factors()
    without = layers.without_query_factors()
    assert without.without_query_factors() is without


def test_relative_tables_are_those_of_keys():
    old, new, plain = of_three(), of_three(FACTORS[::-1], seed=1), random_heads(3)
    change = random_heads(3, seed=1).relative_to(plain)
    for found in (new.relative_to(old), new.relative_to(plain), random_heads(3, seed=1).relative_to(old)):
        assert found == change
    table = random_table(7)
    one = for_all(seed=7)
    assert list(one.relative_to(old)) == [table.relative_to(each) for each in old]
    assert list(old.relative_to(one)) == [each.relative_to(table) for each in old]
    assert list(one.relative_to(table)) == [table.relative_to(table)]
    assert_refused(lambda: old.relative_to(HeadTables(random_heads(2), FACTORS)), ValueError, "3 key heads, got 2")


@EACH_KIND
def test_inverse_tables_invert_factors(heads):
    inverse = heads.inverse()
    assert inverse.query_factors == tuple(1 / factor for factor in heads.query_factors)
    assert list(inverse) == [table.inverse() for table in heads]
    assert inverse.inverse().query_factors == pytest.approx(heads.query_factors, rel=1e-15)
    assert_refused(lambda: for_all([3e38]).inverse(), ValueError, f"query_factors[0] {RANGE}")


# --- packed ---


@pytest.mark.parametrize("query_heads", [3, 27, 30, 54, 57])
def test_packed_words(query_heads):
    factors = random_factors(query_heads)
    heads = of_three(factors)
    packed = heads.packed(CPU)
    rows = -(-query_heads // 27)
    assert (packed.shape, packed.dtype, packed.is_contiguous()) == ((1, 2 + rows, 3, 9), torch.int64, True)
    assert torch.equal(packed[:, :1], random_heads(3).packed(CPU))
    assert not packed[:, 1].any(), "one position a token"
    words = packed[0].flatten()[2 * 27 :]
    assert words[:query_heads].view(torch.float64).tolist() == factors
    assert not words[query_heads:].any()
    assert factors_in(packed, query_heads).view(torch.float64).tolist() == [factors]
    assert heads.packed(CPU) is packed


def test_device_copies_are_cached(device):
    heads = of_three()
    on_device = torch.empty(0, device=device).device
    assert heads.to(device) is heads
    assert heads.packed(on_device).device == on_device
    assert heads.packed(on_device) is heads.packed(on_device)
    with torch.inference_mode():
        made = of_three()
        stack = packed_stack([made, random_table(0)], CPU)
    assert not made.packed(CPU).is_inference()
    assert not stack.is_inference()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 1], [3, 0], [0, 3, 1], [3], [2]])
def test_stacks(order):
    tables = [MIXED[i] for i in order]
    stack = packed_stack(tables, CPU)
    heads = 3 if {1, 2} & set(order) else 1
    assert (stack.shape, stack.is_contiguous()) == ((len(tables), 2 + -(-6 // (9 * heads)), heads, 9), True)
    assert not stack[:, 1].any()
    for table, rows in zip(tables, stack, strict=True):
        words = table.without_query_factors().packed(CPU)
        assert torch.equal(rows[0], words.view(-1, 9).expand(heads, -1))
        factors = rows[FACTOR_ROW:].flatten()
        assert factors[:6].view(torch.float64).tolist() == list(table.query_factors or [1.0] * 6)
        assert not factors[6:].any()
    assert packed_stack(tables, CPU) is stack


def test_stacks_under_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert packed_stack(MIXED, CPU).shape == (4, 3, 3, 9)


def test_stacks_that_do_not_agree_are_refused():
    text = "table[2] must hold query_factors for 6 query heads, as those before it do, got 3"
    assert_refused(lambda: packed_stack([random_table(0), of_three(), of_three(FACTORS[:3])], CPU), ValueError, text)
    assert_refused(lambda: packed_stack([random_heads(3), for_all(), for_all(FACTORS[:3])], CPU), ValueError, text)
    for tables in ([random_heads(4), for_all()], [for_all(), random_table(0), random_heads(4)]):
        text = "table must hold query_factors for a multiple of 4 key heads, got 6"
        assert_refused(lambda tables=tables: packed_stack(tables, CPU), ValueError, text)
    text = "table[1] must hold tables for 3 key heads, as those before it do, got 2"
    assert_refused(lambda: packed_stack([of_three(), random_heads(2)], CPU), ValueError, text)


# --- files ---


def copies_of(tables, path):
    tables.save(path)
    kind = type(tables)
    return {
        "dict": kind.from_dict(tables.to_dict()),
        "json": kind.from_dict(json.loads(json.dumps(tables.to_dict(), allow_nan=False))),
        "file": kind.load(path),
        "lookup": load_tables(path),
        "pickle": pickle.loads(pickle.dumps(tables)),
        "copy": copy.copy(tables),
        "deepcopy": copy.deepcopy(tables),
    }


@EACH_KIND
def test_round_trips_are_exact(tmp_path, heads):
    for name, copied in copies_of(heads, tmp_path / "heads.json").items():
        assert copied == heads, name
        assert hash(copied) == hash(heads), name
        assert copied.query_factors == heads.query_factors, name
        assert copied.key_heads == heads.key_heads, name
        assert torch.equal(copied.packed(CPU), heads.packed(CPU)), name
    assert json.loads((tmp_path / "heads.json").read_text()) == heads.to_dict()
    assert heads.to_dict()["query_factors"] == list(heads.query_factors)


def test_files_without_factors_do_not_change():
    assert "query_factors" not in random_heads(3).to_dict()
    assert all(type(layer) is list for layer in TableSet([random_heads(3)] * 2).to_dict()["layers"])
    data = random_heads(3).to_dict()
    assert HeadTables.from_dict({**data, "query_factors": None}) == random_heads(3)


SETS = {
    "every layer": TableSet([of_three(), of_three(FACTORS[::-1], seed=1)]),
    "equal layers": TableSet([of_three()] * 3),
    "mixed": TableSet(MIXED),
    "one table a layer": TableSet([for_all(), random_table(1)]),
}
EACH_SET = pytest.mark.parametrize("tables", SETS.values(), ids=SETS.keys())


@EACH_SET
def test_round_trips_of_sets_are_exact(tmp_path, tables):
    for name, copied in copies_of(tables, tmp_path / "set.json").items():
        assert copied == tables, name
        assert hash(copied) == hash(tables), name
        assert copied.query_heads == tables.query_heads == 6, name
        assert [layer.query_factors for layer in copied] == [layer.query_factors for layer in tables], name
    lines = (tmp_path / "set.json").read_text().splitlines()
    assert sum(line.startswith("{") and '"query_factors":[' in line for line in lines) == sum(
        layer.query_factors is not None for layer in tables
    )


def test_layers_of_a_file():
    first, *others = TableSet(MIXED).to_dict()["layers"]
    assert set(first) == {"attention_factor", "cumulative_scale"}
    assert type(others[0]) is list
    for row, tables in zip(others[1:], MIXED[2:], strict=True):
        assert set(row) == {"heads", "query_factors"}
        assert row["query_factors"] == list(tables.query_factors)
        assert len(row["heads"]) == len(tables)


def bad_layers() -> dict[str, tuple]:
    (row,) = TableSet([of_three()]).to_dict()["layers"]
    heads, factors = row["heads"], row["query_factors"]
    fields = "layers[0] must have the fields ['heads', 'query_factors'] for head tables with query factors, got "
    return {
        "no factors": ({"heads": heads}, ValueError, fields + "['heads']"),
        "no heads": ({"query_factors": factors}, ValueError, fields + "['query_factors']"),
        "another field": ({**row, "scale": 2.0}, ValueError, fields + "['heads', 'query_factors', 'scale']"),
        "empty heads": ({**row, "heads": []}, ValueError, "layers[0].heads must be a list with a table per key head"),
        "a bad head": ({**row, "heads": [heads[0], 3]}, TypeError, "layers[0].heads[1] must be a JSON object"),
        "null": ({**row, "query_factors": None}, TypeError, "layers[0].query_factors must be a sequence of numbers"),
    }


@pytest.mark.parametrize(("row", "error", "text"), bad_layers().values(), ids=bad_layers().keys())
def test_bad_layers_of_a_file_are_refused(row, error, text):
    data = TableSet([of_three()]).to_dict()
    assert_refused(lambda: TableSet.from_dict({**data, "layers": [row]}), error, text)


# --- sets ---


def test_sets_agree_in_query_heads():
    tables = TableSet(MIXED)
    assert (tables.key_heads, tables.query_heads) == (3, 6)
    assert "4 layers x 3 key heads" in repr(tables)
    assert "factors of 6 query heads" in repr(tables)
    assert TableSet([random_heads(3)]).query_heads is None
    assert "factors" not in repr(TableSet([random_heads(3)]))
    assert TableSet([for_all(), random_table(0)]).key_heads is None
    text = "layers[2] must hold query_factors for 6 query heads, as those before it do, got 3"
    assert_refused(lambda: TableSet([random_table(0), of_three(), for_all(FACTORS[:3])]), ValueError, text)
    text = "layers must hold query_factors for a multiple of 4 key heads, got 6"
    assert_refused(lambda: TableSet([for_all(), random_heads(4)]), ValueError, text)


@EACH_SET
def test_sets_pack_the_tables_of_keys(tables):
    assert torch.equal(tables.packed(CPU), tables.without_query_factors().packed(CPU))
    assert tables.packed(CPU).shape == (1, len(tables), tables.key_heads or 1, 9)


def test_sets_that_rotate_alike():
    tables = TableSet([of_three(), of_three()])
    assert tables.is_like(TableSet([of_three(), of_three()]))
    assert tables.is_like(of_three())
    assert not tables.is_like(TableSet([of_three(), random_heads(3)]))
    assert not tables.is_like(tables.without_query_factors())
