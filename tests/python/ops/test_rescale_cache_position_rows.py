"""rescale_cache_ of tokens with several positions: every pair is re-rotated by the position of its axis."""

import pytest
import torch
from rotary_cases import table_of
from rotary_reference import TOLERANCES, rotated
from table_stacks import index_of
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope
from mrrope.tables.frequency_table import packed_stack

RESCALE_ = torch.ops.mrrope.rescale_cache_.default
SECTIONS = (6, 5, 5)
ROTARY_DIM = 2 * sum(SECTIONS)
AXES = len(SECTIONS)


def axis_tables(method: str, *, interleaved: bool = False) -> mrrope.AxisTables:
    return mrrope.AxisTables.of_sections(table_of(method, ROTARY_DIM), SECTIONS, interleaved=interleaved)


def random_keys(device, *, layers=1, batch=2, heads=3, tokens=5, head_dim=40, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in range(layers)
    ]


def random_positions(device, *, batch=2, tokens=5, dtype=torch.int64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2**31 - 1, (AXES, batch, tokens), generator=generator).to(device, dtype)


def assert_keys_of(actual, before, positions, table, layout="bhsd", pairing="halves"):
    """Assert keys as the table rotates them, up to the rounding of two rotations in float64."""
    expected, _ = mrrope.rotary(before, None, positions, table, layout, pairing)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14 * float(before.abs().max()))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_equals_keys_rotated_by_the_new_tables(device, pairing, interleaved, layout, position_dtype):
    old, new = (axis_tables(method, interleaved=interleaved) for method in ("rope", "yarn"))
    layers = random_keys(device, layers=3)
    layers = layers if layout == "bhsd" else [x.transpose(1, 2) for x in layers]
    positions = random_positions(device, dtype=position_dtype)
    cached = [mrrope.rotary(x, None, positions, old, layout, pairing)[0] for x in layers]
    mrrope.rescale_cache_(cached, positions, old, new, layout, pairing)
    for x, before in zip(cached, layers, strict=True):
        assert_keys_of(x, before, positions, new, layout, pairing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_axis_is_a_rotation_by_its_positions(device, dtype):
    old, new = axis_tables("rope"), axis_tables("yarn")
    (keys,) = random_keys(device, dtype=dtype)
    positions = random_positions(device)
    by_axis = [
        rotated(keys, row, table_of("yarn", ROTARY_DIM).relative_to(table_of("rope", ROTARY_DIM)))
        for row in positions.cpu()
    ]
    expected = by_axis[0].clone()
    for pair, axis in enumerate(new.axis_of_pair):
        ends = [pair, pair + ROTARY_DIM // 2]
        expected[..., ends] = by_axis[axis][..., ends]
    mrrope.rescale_cache_(keys, positions, old, new)
    assert (keys.cpu().double() - expected).norm() / expected.norm() <= TOLERANCES[dtype].frobenius


def test_every_sequence_has_tables_of_its_own(device):
    tables = [axis_tables(method) for method in ("rope", "yarn", "pi")]
    (keys,) = random_keys(device, batch=3)
    positions = random_positions(device, batch=3)
    olds, news = [tables[0], tables[1], tables[2]], [tables[1], axis_tables("yarn"), tables[0]]
    cached, _ = mrrope.rotary(keys, None, positions, olds)
    before = cached.clone()
    mrrope.rescale_cache_(cached, positions, olds, news)
    assert_keys_of(cached, keys, positions, news)
    assert same_bits(cached[1], before[1])


def test_one_position_is_that_of_all_axes(device):
    old, new = axis_tables("rope"), axis_tables("yarn")
    row = random_positions(device)[0]
    results = []
    for positions in (row[:1], row[0], row[:1].expand(AXES, 1, -1), row[:1].expand(AXES, 2, -1)):
        (keys,) = random_keys(device)
        mrrope.rescale_cache_(keys, positions, old, new)
        results.append(keys)
    assert all(same_bits(keys, results[0]) for keys in results)


def test_blocks(device):
    old, new = axis_tables("rope"), axis_tables("yarn")
    (cache,) = random_keys(device, batch=4)
    blocks, positions = torch.tensor([3, 0], device=device), random_positions(device)
    before = cache.clone()
    cache[blocks], _ = mrrope.rotary(before[blocks], None, positions, old)
    mrrope.rescale_cache_(cache, positions, old, new, blocks=blocks)
    assert_keys_of(cache[blocks], before[blocks], positions, new)
    assert same_bits(cache[1:3], before[1:3])


def stack_with_rows(names, device):
    return packed_stack([axis_tables(name) for name in names], torch.empty(0, device=device).device)


@pytest.mark.parametrize("positions_shape", ["matrix", "broadcast"])
def test_opcheck(device, positions_shape):
    positions = random_positions(device, batch=2 if positions_shape == "matrix" else 1)
    stack = stack_with_rows(["rope", "yarn"], device)
    old, new = index_of([0, 1], device), index_of([1, 1], device)
    opcheck(RESCALE_, (random_keys(device, layers=2), positions, stack, old, new))


def test_tables_of_layers_and_heads_with_rows(device):
    """[tables, layers, 2, heads, words] re-rotates every layer and head as its own [tables, 2, words]."""
    layers, heads, names = 3, 2, ["rope", "pi", "ntk", "yarn", "mrrope_pro", "rope"]
    old = stack_with_rows(names, device).view(layers, heads, 2, -1)
    new = stack_with_rows(names[::-1], device).view(layers, heads, 2, -1)
    tables = torch.stack([old, new]).transpose(2, 3).contiguous()
    positions, together = random_positions(device), random_keys(device, layers=layers, heads=4)
    indices = index_of([0, 0], device), index_of([1, 1], device)
    RESCALE_(together, positions, tables, *indices)
    for layer, keys in enumerate(random_keys(device, layers=layers, heads=4)):
        for head in range(heads):
            alone = keys[:, 2 * head : 2 * head + 2].clone()
            RESCALE_([alone], positions, torch.stack([old[layer, head], new[layer, head]]), *indices)
            assert same_bits(together[layer][:, 2 * head : 2 * head + 2], alone)


def test_negated_tables_name_the_same_rows(device):
    (keys,), (back,) = random_keys(device), random_keys(device)
    positions, stack = random_positions(device), stack_with_rows(["rope", "yarn"], device)
    RESCALE_([keys], positions, -stack, index_of([0, 0], device), index_of([1, 1], device))
    RESCALE_([back], -positions, stack, index_of([0, 0], device), index_of([1, 1], device))
    assert same_bits(keys, back)


@pytest.mark.usefixtures("dynamo")
def test_compile(device):
    def read_on(keys, positions, old, new):
        mrrope.rescale_cache_(keys, positions, old, new)
        return keys.sum(-1)

    old, new = axis_tables("rope").to(device), axis_tables("yarn").to(device)
    (ours,), (theirs,) = random_keys(device), random_keys(device)
    positions = random_positions(device)
    expected = read_on(ours, positions, old, new)
    actual = torch.compile(read_on, fullgraph=True)(theirs, positions, old, new)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)
    assert same_bits(theirs, ours)


def test_fake_and_meta_tensors():
    old, new = axis_tables("rope"), axis_tables("yarn")
    (keys,) = random_keys("cpu")
    before = keys.clone()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mrrope.rescale_cache_(mode.from_tensor(keys), mode.from_tensor(random_positions("cpu")), old, new)
    mrrope.rescale_cache_(keys.to("meta"), random_positions("cpu").to("meta"), old, new)
    assert same_bits(keys, before)


# --- errors ---

OLD, NEW, PLAIN = axis_tables("rope"), axis_tables("yarn"), table_of("yarn", ROTARY_DIM)
OTHER = axis_tables("yarn", interleaved=True)
REFUSED = {
    "other axes": ({"new": OTHER}, ["new[0] must have old[0]'s axis_of_pair (0, 0, 0,", "got (0, 1, 2, 0,"]),
    "other axes among old": ({"old": [OLD, OTHER]}, ["old[1] must have old[0]'s axis_of_pair"]),
    "plain new": ({"new": PLAIN}, ["new[0] must be AxisTables like old[0], got FrequencyTable"]),
    "plain old": ({"old": PLAIN}, ["new[0] must be FrequencyTable like old[0], got AxisTables"]),
    "head tables": ({"new": mrrope.HeadTables([PLAIN] * 3)}, ["must be AxisTables like old[0], got HeadTables"]),
    "table set": ({"new": mrrope.TableSet([PLAIN])}, ["must be AxisTables like old[0], got TableSet"]),
    "plain tables": ({"old": PLAIN, "new": table_of("pi", ROTARY_DIM)},
                     ["positions must be [5], [1, 5] or [2, 5]", "got [3, 2, 5]"]),
    "another batch": ({"positions": random_positions("cpu", batch=3)},
                      ["positions with a table of two rows must be [rows, 2, 5] for keys[0]", "got [3, 3, 5]"]),
    "other tokens": ({"positions": random_positions("cpu", tokens=4)}, ["[rows, 2, 5]", "got [3, 2, 4]"]),
    "no row": ({"positions": random_positions("cpu")[:0]}, ["[rows, 2, 5]", "got [0, 2, 5]"]),
    "a row too few": ({"positions": random_positions("cpu")[:2]},
                      ["table's second row must name rows of positions, 0 to 1, got 2 for pair 11"]),
    "thd": ({"keys": torch.ones(5, 3, 40), "layout": "thd"}, ["positions must be [5] in layout thd", "got [3, 2, 5]"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "texts"), REFUSED.values(), ids=REFUSED.keys())
def test_errors(changes, texts):
    call = {"keys": random_keys("cpu")[0], "positions": random_positions("cpu"), "old": OLD, "new": NEW} | changes
    before = call["keys"].clone()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        mrrope.rescale_cache_(**call)
    for text in texts:
        assert text in str(caught.value)
    assert same_bits(call["keys"], before)


def test_the_op_refuses_tables_that_name_other_rows():
    (keys,) = random_keys("cpu")
    before = keys.clone()
    stack = packed_stack([OLD], torch.device("cpu")), packed_stack([OTHER], torch.device("cpu"))
    expected = r"tables must all name the same row of positions for a pair, 0 for pair 1, got 1 in table 1"
    with pytest.raises(ValueError, match=expected):
        RESCALE_([keys], random_positions("cpu"), torch.cat(stack), index_of([0, 0], "cpu"), index_of([1, 1], "cpu"))
    assert same_bits(keys, before)


@pytest.mark.parametrize("shape", [(2, 3, 17), (2, 1, 3, 1, 17), (2, 1, 2, 0, 17), (1, 2, 1, 2, 1, 17)])
def test_the_op_refuses_other_forms_of_tables(shape):
    (keys,) = random_keys("cpu")
    tables = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="tables must be a contiguous stack of packed tables, of two rows of them"):
        RESCALE_([keys], random_positions("cpu"), tables, index_of([0, 0], "cpu"), index_of([1, 1], "cpu"))


def test_a_row_that_is_missing_is_the_last_on_a_gpu(cuda):
    (keys,), (clamped,) = random_keys(cuda), random_keys(cuda)
    positions = random_positions(cuda)
    mrrope.rescale_cache_(keys, positions[:2], OLD, NEW)
    mrrope.rescale_cache_(clamped, torch.cat([positions[:2], positions[1:2]]), OLD, NEW)
    assert same_bits(keys, clamped)
