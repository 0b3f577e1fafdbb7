"""Tokens with several positions (time, height, width), and tables negated to rotate backwards."""

import pytest
import torch
from rotary_cases import table_of
from rotary_reference import assert_rotated, rotated

import mrrope
from mrrope.ops import decompositions
from mrrope.tables.position_rows import packed_rows

ROWS = 3
ROTARY_DIM = 32


def random_call(device, dtype=torch.float32, batch=2, tokens=5, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 4, tokens, 40, generator=generator).to(dtype)
    k = torch.randn(batch, 2, tokens, 40, generator=generator).to(dtype)
    positions = torch.randint(0, 2**31, (rows, batch, tokens), generator=generator)
    row_of_pair = torch.randint(0, rows, (ROTARY_DIM // 2,), generator=generator)
    return q.to(device), k.to(device), positions.to(device), row_of_pair


def with_rows(table, row_of_pair, device):
    packed = table.packed(torch.device("cpu"))
    return torch.stack([packed, packed_rows(row_of_pair)])[None].to(device)


def rotated_by_rows(x, positions, row_of_pair, table, pairing):
    """Rotate the heads by every row of positions, and select each pair from its row's result."""
    whole = [rotated(x, row, table, pairing=pairing) for row in positions.cpu()]
    result = whole[0].clone()
    for pair, row in enumerate(row_of_pair.tolist()):
        ends = [pair, pair + ROTARY_DIM // 2] if pairing == "halves" else [2 * pair, 2 * pair + 1]
        result[..., ends] = whole[row][..., ends]
    return result


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize("positions_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows", [2, ROWS, 4, 5, 128])
def test_each_pair_is_rotated_by_its_own_row(device, pairing, positions_dtype, in_place, rows):
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call(device, rows=rows)
    want = [rotated_by_rows(x.cpu(), positions, row_of_pair, table, pairing) for x in (q, k)]
    packed = with_rows(table, row_of_pair, device)
    arguments = ([q, k], positions.to(positions_dtype), packed, "bhsd", pairing)
    if in_place:
        torch.ops.mrrope.rotary_.default(*arguments)
        got = [q, k]
    else:
        got = torch.ops.mrrope.rotary.default(*arguments)
    for g, w in zip(got, want, strict=True):
        assert ((g.cpu().double() - w).abs().amax() / w.abs().amax()).item() < 5e-7


def test_equal_rows_are_one(device):
    table = table_of("mrrope_pro", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call(device)
    positions = positions[:1].expand(ROWS, -1, -1)
    got = torch.ops.mrrope.rotary.default([q, k], positions, with_rows(table, row_of_pair, device), "bhsd", "halves")
    want = mrrope.rotary(q, k, positions[0], table)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_gradient_goes_back_by_the_same_rows(device):
    table = table_of("yarn", ROTARY_DIM)
    q, _, positions, row_of_pair = random_call(device, torch.float64)
    packed = with_rows(table, row_of_pair, device)
    q.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: torch.ops.mrrope.rotary.default([x], positions, packed, "bhsd", "halves")[0], (q,)
    )


def test_a_row_that_is_not_there_is_refused():
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call("cpu")
    row_of_pair[3] = ROWS
    with pytest.raises(ValueError, match=r"table's second row must name rows of positions, 0 to 2, got 3 for pair 3"):
        torch.ops.mrrope.rotary.default([q, k], positions, with_rows(table, row_of_pair, "cpu"), "bhsd", "halves")


def test_a_word_has_the_rows_of_eight_pairs():
    words = packed_rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 127, 9], [0, 0, 0, 0, 0, 0, 0, 0, 3]])).tolist()
    assert [f"{word:x}" for word in words[0]] == [
        "7f07060504030201", "97f070605040302", "97f0706050403", "97f07060504", "97f070605", "97f0706", "97f07", "97f",
        "9", "0",
    ]  # fmt: skip
    assert words[1] == [0, *(3 << 8 * (8 - pair) for pair in range(1, 9)), 0]


def test_a_word_with_rows_of_other_pairs_is_refused():
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call("cpu")
    packed = with_rows(table, row_of_pair, "cpu")
    packed[0, 1, 9] ^= 3 << 16
    got = int(row_of_pair[11]) ^ 3
    message = (
        rf"table's second row must repeat the row of pair 11, {row_of_pair[11]}, in byte 2 of the word of pair 9, "
        rf"got {got}"
    )
    with pytest.raises(ValueError, match=message):
        torch.ops.mrrope.rotary.default([q, k], positions, packed, "bhsd", "halves")


def test_more_rows_than_a_byte_names_are_refused():
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call("cpu", rows=129)
    packed = with_rows(table, row_of_pair % 2, "cpu")
    with pytest.raises(ValueError, match=r"positions must have at most 128 rows, got 129"):
        torch.ops.mrrope.rotary.default([q, k], positions, packed, "bhsd", "halves")


@pytest.mark.parametrize("shape", [(ROWS, 3, 5), (ROWS, 2, 4), (0, 2, 5)])
def test_rows_of_another_shape_are_refused(shape):
    table = table_of("yarn", ROTARY_DIM)
    q, k, _, row_of_pair = random_call("cpu")
    packed = with_rows(table, row_of_pair, "cpu")
    with pytest.raises(ValueError, match=r"positions with a table of two rows must be \[rows, 2, 5\]"):
        torch.ops.mrrope.rotary.default([q, k], torch.zeros(shape, dtype=torch.int64), packed, "bhsd", "halves")


@pytest.mark.parametrize("run", [torch.ops.mrrope.rotary.default, decompositions.rotary])
def test_negated_rows_are_the_same_rows(device, run):
    table = table_of("mrrope_pro", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call(device)
    packed = with_rows(table, row_of_pair, device)
    got = run([q, k], positions, -packed, "bhsd", "halves", False)
    want = [rotated_by_rows(x.cpu(), -positions, row_of_pair, table, "halves") for x in (q, k)]
    for g, w in zip(got, want, strict=True):
        assert ((g.cpu().double() - w).abs().amax() / w.abs().amax()).item() < 5e-7


def test_a_row_that_is_not_there_is_refused_negated_too():
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, row_of_pair = random_call("cpu")
    row_of_pair[3] = ROWS
    with pytest.raises(ValueError, match=r"table's second row must name rows of positions, 0 to 2, got 3 for pair 3"):
        torch.ops.mrrope.rotary.default([q, k], positions, -with_rows(table, row_of_pair, "cpu"), "bhsd", "halves")


def with_factor(table, factor):
    packed = table.packed(torch.device("cpu")).clone()
    packed[-1] = torch.tensor(factor, dtype=torch.float64).view(torch.int64)
    return packed


@pytest.mark.parametrize("factor", [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-39, 1e39, -1e39])
@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_no_attention_factor_is_refused(factor, stacked):
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, _ = random_call("cpu")
    packed = with_factor(table, factor)
    packed = torch.stack([table.packed(packed.device), packed]) if stacked else packed
    before = q.clone(), k.clone()
    for op in (torch.ops.mrrope.rotary.default, torch.ops.mrrope.rotary_.default):
        with pytest.raises(ValueError, match="table must end with the bits of an attention factor"):
            op([q, k], positions[0], packed, "bhsd", "halves")
    assert all(torch.equal(x, y) for x, y in zip((q, k), before, strict=True))


def test_the_sign_of_a_factor_is_the_tables(device):
    """The bits of -1.0 are the negated bits of 4.0."""
    table = table_of("yarn", ROTARY_DIM)
    q, k, positions, _ = random_call(device)
    got, want = (
        torch.ops.mrrope.rotary.default([q, k], positions[0], with_factor(table, x).to(device), "bhsd", "halves")
        for x in (-1.0, 4.0)
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_negated_table_rotates_backwards(device):
    table = table_of("mrrope_pro", ROTARY_DIM)
    q, k, positions, _ = random_call(device)
    packed = table.packed(q.device)
    got = torch.ops.mrrope.rotary.default([q, k], positions[0], -packed, "bhsd", "halves")
    for g, x in zip(got, (q, k), strict=True):
        assert_rotated(g.cpu(), x.cpu(), positions[0].cpu(), table, conjugate=True)
