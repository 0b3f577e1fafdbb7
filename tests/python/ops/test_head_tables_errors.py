"""Head tables and query factors that no op takes."""

from typing import Any

import pytest
import torch
from head_case import EPS, OPS, HeadCase, K, Q, norm_weights
from op_errors import assert_refused

from mrrope.tables.position_rows import packed_rows
from mrrope.tables.query_factors import FACTOR_ROW


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
