"""Head tables ``[N, R, H, W]``: head h of n is rotated by table h / (n / H), against float64.

Query factors follow the rows of positions, one for every head of q.
"""

from dataclasses import replace

import pytest
import torch
from head_case import FACTORS, OPS, HeadCase, K, Q, head_cases
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rotary_cases import LAYOUTS, PAIRINGS
from tensor_bits import bytes_outside
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from mrrope.ops import decompositions

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
