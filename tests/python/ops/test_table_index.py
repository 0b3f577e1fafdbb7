"""Several tables in one call: every sequence or token is rotated as in a call with its table only."""

import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markers import needs_cuda
from op_errors import assert_refused_untouched
from rotary_cases import (
    DTYPES,
    EMPTY_DIMENSIONS,
    LAYOUTS,
    OWN_MEMORY,
    PAIRINGS,
    Case,
    cases,
    empty_case,
    table_of,
)
from rotary_reference import assert_rotated, plain_rotary
from table_stacks import index_of, stack_of, tables_of
from tensor_bits import bytes_outside
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import mrrope
from mrrope.tables.position_rows import packed_rows

ROTARY = torch.ops.mrrope.rotary.default
ROTARY_ = torch.ops.mrrope.rotary_.default
OPS = [mrrope.rotary, mrrope.rotary_]
BATCHED = ["bhsd", "bshd"]


def random_index(case: Case, count: int, device: str) -> torch.Tensor:
    length = case.tokens if case.layout == "thd" else case.batch
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randint(count, (length,), generator=generator, dtype=torch.int32).to(device)


def with_gaps(index: torch.Tensor, step: int) -> torch.Tensor:
    """Return the same index with a stride of `step`; the elements in between are invalid indices."""
    wide = torch.full((len(index) * step,), -9, dtype=torch.int32, device=index.device)
    wide[::step] = index
    return wide[::step]


def each_alone(positions, tables, index, layout):
    """Yield the place, the positions and the table of every sequence, or of every token in layout `thd`."""
    for i, number in enumerate(index.tolist()):
        part = slice(i, i + 1)
        of_part = positions[part] if layout == "thd" or positions.shape[:-1] == (len(index),) else positions
        yield part, of_part, tables[number]


def assert_as_each_alone(result, heads, positions, tables, index, layout, pairing) -> None:
    """Assert bitwise equality with the one-table calls, and the reference's tolerance."""
    for x, actual in zip(heads, result, strict=True):
        if x is None:
            assert actual is None
            continue
        assert (actual.shape, actual.dtype, actual.device) == (x.shape, x.dtype, x.device)
        for part, at, table in each_alone(positions, tables, index, layout):
            alone, _ = mrrope.rotary(x[part], None, at, table, layout, pairing)
            assert torch.equal(actual[part].contiguous().view(torch.uint8), alone.contiguous().view(torch.uint8))
            assert_rotated(actual[part], x[part], at, table, layout, pairing)


# --- numbers ---


@given(case=cases(), count=st.integers(1, 5), in_place=st.booleans(), index_step=st.sampled_from([1, 2, 3]))
@example(Case(layout="thd", tokens=65, head_dim=128, rotary_dim=128, dtype=torch.bfloat16), 3, False, 2)
@example(Case(layout="bshd", batch=3, tokens=65, head_dim=512, rotary_dim=510, dtype=torch.float16), 5, True, 1)
@settings(max_examples=120)
def test_an_index_picks_the_table(device, case, count, in_place, index_step):
    case = case.with_changes(tokens=min(case.tokens, 7)) if case.layout == "thd" else case
    (q, k), positions, tables = case.heads_on(device), case.positions(device), tables_of(count, case.rotary_dim)
    index = with_gaps(random_index(case, count, device), index_step)
    before = [x if x is None else x.clone() for x in (q, k)]
    around = [bytes_outside(x) for x in (q, k) if x is not None]
    op = mrrope.rotary_ if in_place else mrrope.rotary
    result = op(q, k, positions, tables, case.layout, case.pairing, table_index=index)
    assert_as_each_alone(result, before, positions, tables, index, case.layout, case.pairing)
    if in_place:
        assert result[0] is q
        assert result[1] is k
    else:
        assert all(torch.equal(x, y) for x, y in zip((q, k), before, strict=True) if x is not None)
    assert all(
        torch.equal(bytes_outside(x), y) for x, y in zip([x for x in (q, k) if x is not None], around, strict=True)
    )


@given(case=cases(), in_place=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_without_an_index_every_sequence_has_its_table(device, case, in_place, data):
    case = case.with_changes(layout=data.draw(st.sampled_from(BATCHED)))
    tables = tuple(tables_of(5, case.rotary_dim)[i] for i in data.draw(st.permutations(range(5)))[: case.batch])
    (q, k), positions = case.heads_on(device), case.positions(device)
    before = [x if x is None else x.clone() for x in (q, k)]
    op = mrrope.rotary_ if in_place else mrrope.rotary
    result = op(q, k, positions, tables, case.layout, case.pairing)
    assert_as_each_alone(result, before, positions, tables, index_of(range(case.batch), device), case.layout,
                         case.pairing)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_index", [False, True])
def test_a_stack_of_one_is_its_table(device, layout, with_index):
    case = Case(layout=layout, batch=3, rotary_dim=12)
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    index = torch.zeros_like(random_index(case, 1, device)) if with_index else None
    result = mrrope.rotary(q, k, positions, [table], layout, table_index=index)
    expected = mrrope.rotary(q, k, positions, table, layout)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_thousands_of_tokens_each_with_its_table(device):
    case = Case(layout="thd", tokens=5000, heads=(2, 1), dtype=torch.bfloat16, head_dim=64, rotary_dim=64)
    (q, k), positions, tables = case.heads_on(device), case.positions(device), tables_of(5, 64)
    index = random_index(case, 5, device)
    result = mrrope.rotary(q, k, positions, tables, "thd", table_index=index)
    for number, table in enumerate(tables):
        chosen = index == number
        alone = mrrope.rotary(q[chosen], k[chosen], positions[chosen], table, "thd")
        assert all(torch.equal(x[chosen], y) for x, y in zip(result, alone, strict=True))
        assert_rotated(result[0][chosen], q[chosen], positions[chosen], table, "thd")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("layout", "empty"), EMPTY_DIMENSIONS)
def test_empty_tensors(device, layout, empty, in_place):
    case = empty_case(layout, empty)
    (q, k), positions, tables = case.heads_on(device), case.positions(device), tables_of(3, case.rotary_dim)
    index, before = random_index(case, 3, device), (q.clone(), k.clone())
    op = mrrope.rotary_ if in_place else mrrope.rotary
    result = op(q, k, positions, tables, layout, table_index=index)
    assert_as_each_alone(result, before, positions, tables, index, layout, "halves")


@pytest.mark.parametrize("layout", BATCHED)
@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("position_rows", [True, False])
@pytest.mark.parametrize("in_place", [False, True])
def test_stacks_of_tables_with_position_rows(device, layout, with_index, position_rows, in_place):
    """Return [count, 2, words]: each table holds the row of positions that rotates each pair."""
    rows, rotary_dim, batch, tokens = 3, 16, 3, 5
    case = Case(layout=layout, batch=batch, tokens=tokens, head_dim=20, rotary_dim=rotary_dim)
    (q, k), tables = case.heads_on(device), tables_of(3, rotary_dim)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 2**31, (rows, batch, tokens), generator=generator).to(device)
    row_of_pair = torch.randint(0, rows, (3, rotary_dim // 2), generator=generator)
    stack = torch.stack([stack_of(tables, "cpu"), packed_rows(row_of_pair)], dim=1).to(device)
    if not position_rows:
        positions = positions[0]
    index = index_of([2, 0, 2], device) if with_index else None
    expected = [torch.empty_like(x) for x in (q, k)]
    for sequence, number in enumerate([2, 0, 2] if with_index else [0, 1, 2]):
        part = slice(sequence, sequence + 1)
        alone = ROTARY([q[part], k[part]], positions[..., part, :], stack[number : number + 1], layout, "interleaved")
        for x, y in zip(expected, alone, strict=True):
            x[part] = y
        if not position_rows:
            assert_rotated(alone[0], q[part], positions[part], tables[number], layout, "interleaved")
    heads = [q, k]
    result = (ROTARY_ if in_place else ROTARY)(heads, positions, stack, layout, "interleaved", table_index=index)
    assert all(torch.equal(x, y) for x, y in zip(heads if in_place else result, expected, strict=True))


def test_a_row_that_is_not_there_is_refused_in_every_table():
    q, stack = torch.randn(2, 1, 3, 8), stack_of(tables_of(2, 8), "cpu")
    row_of_pair = torch.zeros(2, 4, dtype=torch.int64)
    row_of_pair[1, 3] = 4
    stack = torch.stack([stack, packed_rows(row_of_pair)], dim=1)
    with pytest.raises(ValueError, match=r"table's second row must name rows of positions, 0 to 1, got 4 for pair 3"):
        ROTARY([q], torch.zeros(2, 2, 3, dtype=torch.int64), stack, "bhsd", "halves")


# --- lifetime of the stack ---


def tables_of_scales(count: int) -> list[mrrope.FrequencyTable]:
    """No two of them equal."""
    settings = {"rotary_dim": 16, "base": 1e4, "original_max_position": 2048}
    return [mrrope.frequency_table("yarn", scale=2.0 + number, **settings) for number in range(count)]


def test_a_stack_lives_as_long_as_its_tables(device):
    a, b = tables_of(2, 16)
    stack = weakref.ref(stack_of([a, b], device))
    others = tables_of_scales(300)
    for table in others:
        stack_of([table, b], device)
    assert stack() is stack_of([a, b], device)
    assert torch.equal(stack().cpu(), torch.stack([table.packed(torch.device("cpu")) for table in (a, b)]))


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_stack_goes_with_any_of_its_tables(device, dropped):
    tables = tables_of(3, 16)
    stack = weakref.ref(stack_of(tables, device))
    kept = tables[:dropped] + tables[dropped + 1 :]
    del tables
    assert stack() is None
    assert not any(table._stacks for table in kept)


# --- autograd ---


def double_inputs(device: str, layout: str):
    case = Case(dtype=torch.float64, layout=layout, tokens=3, heads=(2, 1), head_dim=8, rotary_dim=6)
    q, k = (x.requires_grad_() for x in case.heads_on(device))
    return q, k, case.positions(device), tables_of(3, 6), random_index(case, 3, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(device, layout, op):
    q, k, positions, tables, index = double_inputs(device, layout)

    def function(q, k):
        return op(q * 1.0, k * 1.0, positions, tables, layout, "interleaved", table_index=index)

    assert gradcheck(function, (q, k))
    assert gradgradcheck(function, (q, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_each_alone(device, layout, dtype):
    case = Case(dtype=dtype, layout=layout, batch=3, rotary_dim=12)
    (q, k), positions, tables = case.heads_on(device), case.positions(device), tables_of(4, 12)
    index, grads = random_index(case, 4, device), case.with_changes(seed=7).heads_on(device)
    result = mrrope.rotary(q.requires_grad_(), k.requires_grad_(), positions, tables, layout, table_index=index)
    torch.autograd.backward(result, grads)
    for x, grad in zip((q, k), grads, strict=True):
        for part, at, table in each_alone(positions, tables, index, layout):
            alone = x[part].detach().requires_grad_()
            mrrope.rotary(alone, None, at, table, layout)[0].backward(grad[part])
            assert torch.equal(x.grad[part], alone.grad)
            assert_rotated(x.grad[part], grad[part], at, table, layout, conjugate=True)


def test_gradient_is_the_plain_one(device):
    case = Case(dtype=torch.float64, batch=3, heads=(2, None))
    (q, _), positions, tables = case.heads_on(device), case.positions(device), tables_of(3, case.rotary_dim)
    q.requires_grad_()
    weights = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(0)).to(device)
    index = index_of([2, 0, 2], device)
    result, _ = mrrope.rotary(q, None, positions, tables, table_index=index)
    (actual,) = torch.autograd.grad((result * weights).sum(), q)
    plain = torch.stack([plain_rotary(q[i], positions[i], tables[number]) for i, number in enumerate([2, 0, 2])])
    (expected,) = torch.autograd.grad((plain * weights).sum(), q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


def test_autograd_notices_that_the_index_changed(device):
    q, _, positions, tables, index = double_inputs(device, "bhsd")
    result, _ = mrrope.rotary(q, None, positions, tables, table_index=index)
    index.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# --- schemas, modes and torch.compile ---


OPCHECKED = {
    "per sequence": Case(batch=3),
    "per token": Case(layout="thd", rotary_dim=12, position_dtype=torch.int32),
    "transposed": Case(layout="bshd", pairing="interleaved", memory="transposed", dtype=torch.bfloat16),
    "q alone": Case(heads=(3, None), positions_shape="row"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(device, case, requires_grad):
    heads = [x.requires_grad_(requires_grad) for x in case.heads_on(device) if x is not None]
    stack = stack_of(tables_of(4, case.rotary_dim), device)
    arguments = (heads, case.positions(device), stack, case.layout, case.pairing)
    opcheck(ROTARY, arguments, {"table_index": random_index(case, 4, device)})
    if not requires_grad:
        opcheck(ROTARY_, arguments, {"table_index": random_index(case, 4, device)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors(layout):
    case = Case(layout=layout, dtype=torch.float16)
    (q, k), positions, tables = case.heads_on("cpu"), case.positions("cpu"), tables_of(2, case.rotary_dim)
    q, k, positions, index = (x.to("meta") for x in (q, k, positions, random_index(case, 2, "cpu")))
    result = mrrope.rotary(q, k, positions, tables, layout, table_index=index)
    for x, actual in zip((q, k), result, strict=True):
        assert actual.is_meta
        assert (actual.shape, actual.dtype, actual.stride()) == (x.shape, x.dtype, x.stride())
    assert mrrope.rotary_(q, k, positions, tables, layout, table_index=index)[0] is q


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "padded"])
def test_fake_tensors_leave_nothing_fake_behind(device, memory):
    case = Case(memory=memory)
    (q, k), positions = case.heads_on(device), case.positions(device)
    index = random_index(case, 2, device)
    # A base that no other test uses, so that this stack is not cached yet.
    tables = [mrrope.frequency_table(method, rotary_dim=16, base=777.0 + len(memory), original_max_position=2048)
              for method in ("rope", "pi")]  # fmt: skip
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mrrope.rotary(*(mode.from_tensor(x) for x in (q, k, positions)), tables,
                             table_index=mode.from_tensor(index))  # fmt: skip
    real = mrrope.rotary(q, k, positions, tables, table_index=index)
    for actual, expected in zip(fake, real, strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert_as_each_alone(real, (q, k), positions, tables, index, "bhsd", "halves")


def test_a_stack_first_used_in_inference_mode_can_train_later(device):
    tables = [table_of("yarn", 10), table_of("pi", 10)]
    with torch.inference_mode():
        mrrope.rotary(torch.randn(2, 2, 3, 10, device=device), None, torch.arange(3, device=device), tables)
    q = torch.randn(2, 2, 3, 10, device=device, requires_grad=True)
    mrrope.rotary(q, None, torch.arange(3, device=device), tables)[0].sum().backward()
    assert q.grad is not None


def rotate(q, k, positions, tables, index, layout):
    q, k = mrrope.rotary(q * 2.0, k + 1.0, positions, tables, layout, table_index=index)
    return q.sin(), k


def rotate_in_place(q, k, positions, tables, index, layout):
    q, k = q * 2.0, k + 1.0
    mrrope.rotary_(q, k, positions, tables, layout, table_index=index)
    return q.sin(), k


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("function", "layout", "backend"),
    [(rotate, "bhsd", "inductor"), (rotate, "thd", "aot_eager"), (rotate_in_place, "bshd", "aot_eager")],
)
def test_compile_forward_and_backward(device, function, layout, backend):
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    tables = tables_of(3, 16)
    for tokens in (5, 9):
        case = Case(layout=layout, tokens=tokens, dtype=torch.float64)
        (q, k), positions, index = case.heads_on(device), case.positions(device), random_index(case, 3, device)
        results = []
        for f in (function, compiled):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            out = f(*leaves, positions, tables, index, layout)
            results.append((*out, *torch.autograd.grad(sum(x.square().sum() for x in out), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)


def test_compile_once_for_every_index(device, dynamo):
    counter = dynamo.testing.CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def rotate(q, k, positions, tables, index):
        return mrrope.rotary(q, k, positions, tables, table_index=index)

    case, tables = Case(batch=3), [table.to(device) for table in tables_of(3, 16)]
    (q, k), positions = case.heads_on(device), case.positions(device)
    for values in ([0, 1, 2], [2, 2, 2], [1, 0, 1]):
        index = index_of(values, device)
        result = rotate(q, k, positions, tables, index)
        assert_as_each_alone(result, (q, k), positions, tables, index, "bhsd", "halves")
    assert counter.frame_count == 1


@pytest.mark.usefixtures("dynamo")
def test_compile_does_not_bake_the_tables_in(device):
    compiled = torch.compile(mrrope.rotary, fullgraph=True, backend="aot_eager")
    case = Case()
    (q, k), positions = case.heads_on(device), case.positions(device)
    for methods in (["rope", "yarn"], ["pi", "ntk"], ["yarn", "yarn"]):
        tables = [table_of(method, 16) for method in methods]
        result = compiled(q, k, positions, tables)
        assert_as_each_alone(result, (q, k), positions, tables, index_of([0, 1], device), "bhsd", "halves")


# --- errors ---


def good_call(layout: str = "bhsd") -> dict:
    case = Case(layout=layout, tokens=3, heads=(4, 2), head_dim=8, rotary_dim=8)
    (q, k) = case.heads_on("cpu")
    index = torch.zeros(3 if layout == "thd" else 2, dtype=torch.int32)
    return {"q": q, "k": k, "positions": torch.arange(3), "table": tables_of(3, 8), "layout": layout,
            "table_index": index}  # fmt: skip


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


THD = good_call("thd")
ONE_TABLE = table_of("yarn", 8)
CALLS = {
    "a list": ({"table_index": [0, 1]}, TypeError, ["table_index must be a tensor or None", "got list"]),
    "int64": ({"table_index": ints(0, 1).long()}, TypeError, ["table_index must be int32", "got Long"]),
    "floats": ({"table_index": ints(0, 1).float()}, TypeError, ["table_index must be int32", "got Float"]),
    "too long": ({"table_index": ints(0, 1, 0)}, ValueError, ["table_index must be [2]", "a sequence", "got [3]"]),
    "empty": ({"table_index": ints()}, ValueError, ["table_index must be [2]", "got [0]"]),
    "one number": ({"table_index": torch.tensor(0, dtype=torch.int32)}, ValueError, ["must be [2]", "got []"]),
    "a matrix": ({"table_index": ints(0, 1)[None]}, ValueError, ["table_index must be [2]", "got [1, 2]"]),
    "per sequence with thd": ({**THD, "table_index": ints(0)}, ValueError,
                              ["table_index must be [3]", "a token", "layout thd", "got [1]"]),
    "per token with bhsd": ({"table_index": ints(0, 1, 2)}, ValueError, ["table_index must be [2]", "layout bhsd"]),
    "beyond the last": ({"table_index": ints(0, 3)}, IndexError,
                        ["table_index must name one of 3 tables, 0 to 2", "got 3 at 1"]),
    "negative": ({"table_index": ints(-1, 0)}, IndexError, ["table_index must name", "got -1 at 0"]),
    "beyond a stack of one": ({"table": [ONE_TABLE], "table_index": ints(0, 1)}, IndexError,
                              ["table_index must name one of 1 tables, 0 to 0", "got 1 at 1"]),
    "thd beyond the last": ({**THD, "table_index": ints(0, 2, 2**31 - 1)}, IndexError,
                            ["table_index must name", "got 2147483647 at 2"]),
    "strided beyond the last": ({"table_index": ints(0, 0, 7, 0)[::2]}, IndexError, ["got 7 at 1"]),
    "with one table": ({"table": ONE_TABLE}, ValueError, ["table_index must come with a stack", "got one table"]),
    "on another device": ({"table_index": ints(0, 1).to("meta")}, RuntimeError,
                          ["table_index must be on q's device cpu", "got meta"]),
    "no tables": ({"table": []}, ValueError, ["table must be a FrequencyTable or a sequence of at least one", "none"]),
    "tables of several rotary_dim": ({"table": [ONE_TABLE, table_of("yarn", 6)]}, ValueError,
                                     ["table[1] must have table[0]'s rotary_dim 8", "got 6"]),
    "what is no table": ({"table": [ONE_TABLE, "yarn"]}, TypeError, ["table[1] must be a FrequencyTable", "got str"]),
    "tables too wide": ({"table": tables_of(2, 10)}, ValueError,
                        ["table.rotary_dim must be at most head_dim", "(8)", "got 10"]),
    "more tables than sequences": ({"table_index": None}, ValueError,
                                   ["table must be one, or one for each of the 2 sequences", "table_index", "got 3"]),
    "thd with tables but no index": ({**THD, "table_index": None}, ValueError, ["table must be one", "got 3 tables"]),
}  # fmt: skip


@pytest.fixture
def far_apart(tmp_path):
    # A sparse file, so that no memory is needed.
    return torch.from_file(str(tmp_path / "hole"), shared=True, size=2**32, dtype=torch.int32)


@pytest.mark.parametrize("op", OPS)
def test_indices_far_apart(op, far_apart):
    far_apart[2 * (2**31 - 1)] = 2
    arguments = {**good_call("thd"), "table_index": far_apart.as_strided((3,), (2**31 - 1,))}
    near = {**arguments, "q": arguments["q"].clone(), "k": arguments["k"].clone(), "table_index": ints(0, 0, 2)}
    for got, want in zip(op(**arguments), op(**near), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_indices_too_far_apart(op, far_apart):
    arguments = {**good_call(), "table_index": far_apart.as_strided((2,), (2**31,))}
    before = {name: arguments[name].clone() for name in "qk"}
    with pytest.raises(ValueError, match=r"table_index must have its elements less than 2\^31 apart, got.* 2147483648"):
        op(**arguments)
    for name in "qk":
        assert torch.equal(arguments[name], before[name])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("changes", "error", "texts"), CALLS.values(), ids=CALLS.keys())
def test_errors(op, changes, error, texts, requires_grad):
    arguments = {**good_call(), **changes}
    if requires_grad:
        # Not a leaf, which the in-place op refuses for that reason.
        arguments |= {name: arguments[name].clone().requires_grad_() * 1.0 for name in "qk"}
    assert_refused_untouched(op, arguments, error, *texts)


def test_the_good_calls_are_good():
    for layout in LAYOUTS:
        for op in OPS:
            op(**good_call(layout))


@needs_cuda
@pytest.mark.parametrize("op", OPS)
def test_index_on_another_device(op):
    arguments = good_call()
    with pytest.raises(RuntimeError, match="table_index must be on q's device cpu, got cuda:0"):
        op(**{**arguments, "table_index": arguments["table_index"].cuda()})


# --- CUDA ---


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_graph_replays_with_another_index(cuda, layout, in_place):
    case = Case(layout=layout, batch=3, dtype=torch.bfloat16)
    (q, k), positions, tables = case.heads_on(cuda), case.positions(cuda), tables_of(3, 16)
    index, before = random_index(case, 3, cuda), (q.clone(), k.clone())
    mrrope.rotary(q, k, positions, tables, layout, table_index=index)  # puts the stack on the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (mrrope.rotary_ if in_place else mrrope.rotary)(q, k, positions, tables, layout, table_index=index)
    for seed in (3, 4, 5):
        index.copy_(random_index(case.with_changes(seed=seed), 3, cuda))
        for x, value in zip((q, k), before, strict=True):
            x.copy_(value)
        graph.replay()
        assert_as_each_alone(result, before, positions, tables, index, layout, "halves")


def test_a_graph_replays_after_many_other_stacks(cuda):
    case = Case(batch=3, dtype=torch.bfloat16)
    (q, k), positions, tables = case.heads_on(cuda), case.positions(cuda), tables_of(3, 16)
    index = random_index(case, 3, cuda)
    mrrope.rotary(q, k, positions, tables, table_index=index)  # puts the stack on the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mrrope.rotary(q, k, positions, tables, table_index=index)
    others = tables_of_scales(300)
    for other in others:  # these would reuse the memory of a freed stack
        mrrope.rotary(q, k, positions, [other, *tables[1:]], table_index=index)
    graph.replay()
    assert_as_each_alone(result, (q, k), positions, tables, index, "bhsd", "halves")


@pytest.mark.parametrize("wrong", [3, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrong_index_on_a_gpu_spoils_nothing_else(cuda, layout, wrong, in_place):
    case = Case(layout=layout, batch=3, tokens=3, memory="padded")
    (q, k), positions, tables = case.heads_on(cuda), case.positions(cuda), tables_of(3, 16)
    before, around = (q.clone(), k.clone()), [bytes_outside(x) for x in (q, k)]
    index = index_of([2, wrong, 1], cuda)
    op = mrrope.rotary_ if in_place else mrrope.rotary
    result = op(q, k, positions, tables, layout, table_index=index)
    torch.cuda.synchronize()
    for right in (0, 2):
        part = slice(right, right + 1)
        assert_as_each_alone([x[part] for x in result], [x[part] for x in before], positions[part], tables, index[part],
                             layout, "halves")  # fmt: skip
    assert all(torch.equal(bytes_outside(x), y) for x, y in zip((q, k), around, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("memory", OWN_MEMORY)
def test_cuda_agrees_with_the_cpu(cuda, dtype, pairing, memory):
    case = Case(batch=3, tokens=70, dtype=dtype, head_dim=128, rotary_dim=96, memory=memory)
    (q, k), positions, tables = case.heads_on("cpu"), case.positions("cpu"), tables_of(5, 96)
    index = random_index(case, 5, "cpu")
    on_cpu = mrrope.rotary(q, k, positions, tables, "bhsd", pairing, index)
    on_cuda = mrrope.rotary(*case.heads_on(cuda), positions.to(cuda), tables, "bhsd", pairing,
                            index.to(cuda))  # fmt: skip
    eps = torch.finfo(dtype).eps
    for actual, expected in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=eps, atol=4 * eps if dtype == torch.float64 else 2e-6)
