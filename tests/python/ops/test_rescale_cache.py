"""rescale_cache: cached keys re-rotated to another table equal keys rotated by it, to one more rounding."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from op_errors import assert_refused_untouched
from rotary_cases import DTYPES, LAYOUTS, OWN_MEMORY, PAIRINGS, Case, cases, table_of
from rotary_reference import TOLERANCES, assert_rotated, pair_norms, rotated
from table_stacks import METHODS, index_of, stack_of, tables_of
from tensor_bits import bytes_outside, same_bits
from torch.library import opcheck

import mrrope

RESCALE_ = torch.ops.mrrope.rescale_cache_.default


@dataclass(frozen=True)
class Difference:
    """The rotation from one table to another, in the form of a table of the reference."""

    turns: torch.Tensor
    attention_factor: float
    rotary_dim: int


def difference(old: mrrope.FrequencyTable, new: mrrope.FrequencyTable) -> Difference:
    return Difference(new.turns - old.turns, new.attention_factor / old.attention_factor, old.rotary_dim)


def keys_of(case: Case, device: str) -> torch.Tensor:
    return case.heads_on(device)[0]


def assert_rescaled(actual, before, positions, olds, news, layout="bhsd", pairing="halves") -> None:
    """Assert the exact relative rotation of every sequence, rounded once, and no change where the table stays."""
    if layout == "thd":
        assert_rotated(actual, before, positions, difference(olds[0], news[0]), layout, pairing)
        return
    for i, (old, new) in enumerate(zip(olds, news, strict=True)):
        part = slice(i, i + 1)
        at = positions[part] if positions.shape[:-1] == (len(olds),) else positions
        assert_rotated(actual[part], before[part], at, difference(old, new), layout, pairing)
        if old == new:
            assert same_bits(actual[part], before[part])


# --- numbers ---


@given(
    case=cases(),
    memories=st.lists(st.sampled_from(OWN_MEMORY), min_size=1, max_size=4),
    old=st.lists(st.sampled_from(METHODS), min_size=3, max_size=3),
    new=st.lists(st.sampled_from(METHODS), min_size=3, max_size=3),
)
@example(Case(batch=3, tokens=65, head_dim=128, rotary_dim=128, dtype=torch.bfloat16), ["contiguous"] * 4,
         ["rope", "yarn", "rope"], ["yarn", "yarn", "mrrope_pro"])  # fmt: skip
@settings(max_examples=150)
def test_every_sequence_of_every_layer_is_rescaled_by_its_tables(device, case, memories, old, new):
    sequences = 1 if case.layout == "thd" else case.batch
    olds, news = (tables_of(methods[:sequences], case.rotary_dim) for methods in (old, new))
    layers = [keys_of(case.with_changes(memory=memory, seed=i), device) for i, memory in enumerate(memories)]
    positions = case.positions(device)
    before, around = [x.clone() for x in layers], [bytes_outside(x) for x in layers]
    assert mrrope.rescale_cache_(layers, positions, olds, tuple(news), case.layout, case.pairing) is None
    for x, was in zip(layers, before, strict=True):
        assert_rescaled(x, was, positions, olds, news, case.layout, case.pairing)
    assert all(torch.equal(bytes_outside(x), y) for x, y in zip(layers, around, strict=True))


@given(case=cases(), old=st.sampled_from(METHODS), new=st.sampled_from(METHODS))
@settings(max_examples=80)
def test_equals_keys_rotated_by_the_new_table(device, case, old, new):
    a, b = tables_of([old, new], case.rotary_dim)
    keys, positions = keys_of(case, device), case.positions(device)
    expected = rotated(keys, positions, b, case.layout, case.pairing)
    mrrope.rotary_(keys, None, positions, a, case.layout, case.pairing)
    mrrope.rescale_cache_(keys, positions, a, b, case.layout, case.pairing)
    tail = keys.cpu().double()[..., case.rotary_dim :]
    assert torch.equal(tail, expected[..., case.rotary_dim :])
    actual, expected = keys.cpu().double()[..., : case.rotary_dim], expected[..., : case.rotary_dim]
    norms = pair_norms(expected, case.rotary_dim, case.pairing)
    # Two rotations, each with its error and its rounding; the second rotates the first one's rounding.
    tolerance = TOLERANCES[case.dtype]
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    assert ((actual - expected).abs() <= 2 * (tolerance.arithmetic + tolerance.rounding) * norms + 4 * smallest).all()


def test_float64_to_the_last_digits(device):
    case = Case(dtype=torch.float64, batch=2, tokens=300, head_dim=128, rotary_dim=128)
    keys, positions = keys_of(case, device), case.positions(device)
    a, b = tables_of(["mrrope_pro", "ntk"], 128)
    cached, _ = mrrope.rotary(keys, None, positions, a)
    mrrope.rescale_cache_(cached, positions, a, b)
    torch.testing.assert_close(cached, mrrope.rotary(keys, None, positions, b)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_frobenius_error_is_one_rounding(device, dtype):
    case = Case(dtype=dtype, batch=1, tokens=256, head_dim=128, rotary_dim=128)
    keys, positions, (a, b) = keys_of(case, device), case.positions(device), tables_of(["rope", "mrrope_pro"], 128)
    expected = rotated(keys, positions, difference(a, b))
    mrrope.rescale_cache_(keys, positions, a, b)
    assert (keys.cpu().double() - expected).norm() / expected.norm() <= TOLERANCES[dtype].frobenius


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_attention_factors_are_divided(device, layout, pairing):
    case = Case(layout=layout, dtype=torch.float64, reach=0)
    tables = [mrrope.frequency_table("yarn", rotary_dim=12, base=1e4, original_max_position=64, attention_factor=factor)
              for factor in (0.5, 3.0)]  # fmt: skip
    keys, positions = keys_of(case, device), case.positions(device)  # all 0, where rotations are the identity
    before = keys.clone()
    mrrope.rescale_cache_(keys, positions, *tables, layout, pairing)
    assert torch.equal(keys[..., :12], 6.0 * before[..., :12])
    assert torch.equal(keys[..., 12:], before[..., 12:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", ["the same", "equal", "listed"])
def test_keys_that_keep_their_table_keep_their_bits(device, dtype, alike):
    old, equal = table_of("yarn", 16), table_of("yarn", 16)
    new = {"the same": old, "equal": equal, "listed": [equal, old]}[alike]
    keys = keys_of(Case(dtype=dtype), device)
    # Multiplying by cos = 1 and sin = 0 would still spread a NaN or an infinity to its partner.
    keys[0, 0, 0, 0], keys[1, 0, 1, 3], keys[1, 1, 0, 0] = float("inf"), float("nan"), -0.0
    before = keys.clone()
    mrrope.rescale_cache_(keys, Case().positions(device), old, new)
    assert same_bits(keys, before)


def test_tables_may_be_single_listed_or_both(device):
    case = Case(batch=3)
    positions, (a, b) = case.positions(device), tables_of(["pi", "yarn"], 16)
    results = []
    for old, new in ((a, b), ([a] * 3, b), (a, (b, b, b)), ([a] * 3, [b] * 3)):
        keys = keys_of(case, device)
        mrrope.rescale_cache_(keys, positions, old, new)
        results.append(keys)
    assert_rescaled(results[0], keys_of(case, device), positions, [a] * 3, [b] * 3)
    assert all(same_bits(keys, results[0]) for keys in results)


@pytest.mark.parametrize("form", [list, tuple])
def test_a_list_of_layers_is_each_layer_alone(device, form):
    case = Case(batch=3, dtype=torch.bfloat16, rotary_dim=12)
    positions, (a, b) = case.positions(device), tables_of(["rope", "yarn"], 12)

    def layers():
        memories = [*OWN_MEMORY, "contiguous", "padded"]
        return form(keys_of(case.with_changes(memory=memory, seed=i), device) for i, memory in enumerate(memories))

    together, alone = layers(), layers()
    mrrope.rescale_cache_(together, positions, a, b)
    for keys in alone:
        mrrope.rescale_cache_(keys, positions, a, b)
    assert all(same_bits(x, y) for x, y in zip(together, alone, strict=True))


def test_layers_may_differ_in_head_dim(device):
    layers = [torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(dim)) for dim in (16, 24, 16)]
    layers = [x.to(device) for x in layers]
    before, positions, (a, b) = [x.clone() for x in layers], torch.arange(5).to(device), tables_of(["rope", "yarn"], 16)
    mrrope.rescale_cache_(layers, positions, a, b)
    for x, was in zip(layers, before, strict=True):
        assert_rescaled(x, was, positions, [a] * 2, [b] * 2)


def test_more_layers_than_one_launch_takes(device):
    case = Case(batch=2, tokens=3, head_dim=8, rotary_dim=8)
    layers = [keys_of(case.with_changes(seed=i), device) for i in range(131)]
    before, positions, (a, b) = [x.clone() for x in layers], case.positions(device), tables_of(["rope", "yarn"], 8)
    mrrope.rescale_cache_(layers, positions, [a, b], b)
    for x, was in zip(layers, before, strict=True):
        assert_rescaled(x, was, positions, [a, b], [b, b])


@pytest.mark.parametrize("stride", [0, 2])
def test_positions_may_have_any_strides(device, stride):
    keys, (a, b) = keys_of(Case(), device), tables_of(["rope", "yarn"], 16)
    before, wide = keys.clone(), Case(tokens=10).positions(device)
    positions = wide[:, ::2] if stride else wide[:, :1].expand(2, 5)
    mrrope.rescale_cache_(keys, positions, a, b)
    assert_rescaled(keys, before, positions, [a] * 2, [b] * 2)


@pytest.mark.parametrize("case", [Case(batch=0), Case(heads=(0, None)), Case(tokens=0), Case(layout="bshd", tokens=0),
                                  Case(layout="thd", tokens=0)])  # fmt: skip
def test_empty_caches(device, case):
    empty, (a, b) = keys_of(case, device), tables_of(["rope", "yarn"], 16)
    assert empty.numel() == 0
    mrrope.rescale_cache_([empty, empty.clone()], case.positions(device), a, b, case.layout)


# --- paged caches ---


@given(
    case=cases(),
    blocks=st.lists(st.integers(0, 6), max_size=5, unique=True),
    layers=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=60)
def test_blocks(device, case, blocks, layers, data):
    layout = data.draw(st.sampled_from(["bhsd", "bshd"]))
    new = tables_of(data.draw(st.lists(st.sampled_from(METHODS), min_size=len(blocks), max_size=len(blocks))),
                    case.rotary_dim)  # fmt: skip
    case = case.with_changes(layout=layout, batch=7, tokens=min(case.tokens, 16))
    old = table_of("rope", case.rotary_dim)
    cache = [keys_of(case.with_changes(seed=i), device) for i in range(layers)]
    before, around = [x.clone() for x in cache], [bytes_outside(x) for x in cache]
    positions = case.with_changes(batch=len(blocks), positions_shape="matrix").positions(device)
    index = torch.tensor(blocks, dtype=torch.int64, device=device)
    mrrope.rescale_cache_(cache, positions, old, new, layout, case.pairing, blocks=index)
    others = [block for block in range(7) if block not in blocks]
    for x, was in zip(cache, before, strict=True):
        assert_rescaled(x[index], was[index], positions, [old] * len(blocks), new, layout, case.pairing)
        assert same_bits(x[others], was[others])
    assert all(torch.equal(bytes_outside(x), y) for x, y in zip(cache, around, strict=True))


def test_a_block_that_sequences_share_is_rescaled_once(device):
    case = Case(batch=4)
    cache, (a, b) = keys_of(case, device), tables_of(["rope", "yarn"], 16)
    before, positions = cache.clone(), torch.arange(5, device=device)
    mrrope.rescale_cache_(cache, positions, a, b, blocks=torch.tensor([2, 0, 2], device=device))
    assert_rescaled(cache, before, positions, [a] * 4, [b, a, b, a])


# --- schemas, modes and torch.compile ---


OPCHECKED = {
    "plain": Case(),
    "partial": Case(layout="thd", rotary_dim=12, position_dtype=torch.int32),
    "transposed": Case(layout="bshd", pairing="interleaved", memory="transposed", dtype=torch.bfloat16),
    "broadcast": Case(memory="padded", dtype=torch.float64, positions_shape="broadcast"),
}


@pytest.mark.parametrize("case", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(device, case):
    layers = [keys_of(case.with_changes(seed=i), device) for i in range(2)]
    sequences = 1 if case.layout == "thd" else 2
    stack = stack_of(tables_of(["rope", "yarn"], case.rotary_dim), device)
    old, new = index_of([0, 1][:sequences], device), index_of([1, 1][:sequences], device)
    opcheck(RESCALE_, (layers, case.positions(device), stack, old, new, case.layout, case.pairing))


def test_schema_says_what_is_written():
    assert [argument.name for argument in RESCALE_._schema.arguments if argument.is_write] == ["keys"]
    assert RESCALE_._schema.returns == []


def test_the_op_takes_any_numbering(device):
    case = Case(batch=3)
    layers, positions = [keys_of(case, device)], case.positions(device)
    before, tables = layers[0].clone(), tables_of(METHODS, 16)
    old, new = [4, 2, 0], [1, 2, 3]
    RESCALE_(layers, positions, stack_of(tables, device), index_of(old, device), index_of(new, device))
    assert_rescaled(layers[0], before, positions, [tables[i] for i in old], [tables[i] for i in new])


def test_meta_and_fake_tensors():
    case = Case()
    a, b = (mrrope.frequency_table("pi", rotary_dim=16, base=777.0, original_max_position=64, scale=scale)
            for scale in (1.0, 2.0))  # fmt: skip
    keys, positions = keys_of(case, "cpu"), case.positions("cpu")
    before = keys.clone()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mrrope.rescale_cache_(mode.from_tensor(keys), mode.from_tensor(positions), a, b)
    mrrope.rescale_cache_([keys.to("meta"), keys.to("meta")], positions.to("meta"), a, b)
    assert torch.equal(keys, before)
    mrrope.rescale_cache_(keys, positions, a, b)
    assert_rescaled(keys, before, positions, [a] * 2, [b] * 2)


@pytest.mark.parametrize("paged", [False, True])
def test_versions_count_and_autograd_notices(device, paged):
    keys, positions, (a, b) = keys_of(Case(), device), Case().positions(device), tables_of(["rope", "yarn"], 16)
    product = torch.ones_like(keys, requires_grad=True) * keys
    versions = keys._version, positions._version
    blocks = torch.tensor([1, 0], device=device) if paged else None
    mrrope.rescale_cache_(keys, positions, a, b, blocks=blocks)
    assert (keys._version, positions._version) == (versions[0] + 1, versions[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("history", ["leaf", "result"])
def test_keys_with_gradients_are_refused(device, history, paged):
    plain, positions, (a, b) = keys_of(Case(), device), Case().positions(device), tables_of(["rope", "yarn"], 16)
    keys = plain.clone().requires_grad_()
    keys = keys if history == "leaf" else keys * 1.0
    before = [plain.clone(), keys.detach().clone()]
    blocks = torch.tensor([1, 0], device=device) if paged else None
    with pytest.raises(RuntimeError, match=r"keys\[1\] requires grad, and cached keys are turned without gradients"):
        mrrope.rescale_cache_([plain, keys], positions, a, b, blocks=blocks)
    assert same_bits(plain, before[0])
    assert same_bits(keys.detach(), before[1])
    with torch.no_grad():
        mrrope.rescale_cache_([plain, keys], positions, a, b, blocks=blocks)
    if not paged:
        assert_rescaled(keys.detach(), before[1], positions, [a] * 2, [b] * 2)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(device, made_inside, paged):
    keys, positions, (a, b) = keys_of(Case(), device), Case().positions(device), tables_of(["rope", "yarn"], 16)
    before = keys.clone()
    with torch.inference_mode():
        if made_inside:
            keys, positions = keys.clone(), positions.clone()
        blocks = torch.arange(2, device=device) if paged else None
        mrrope.rescale_cache_(keys, positions, a, b, blocks=blocks)
    assert_rescaled(keys, before, positions, [a] * 2, [b] * 2)


@pytest.mark.parametrize("paged", [False, True])
def test_inference_tensors_outside_of_inference_mode(device, paged):
    plain, positions, (a, b) = keys_of(Case(), device), Case().positions(device), tables_of(["rope", "yarn"], 16)
    with torch.inference_mode():
        keys = plain.clone()
    before = plain.clone()
    blocks = torch.arange(2, device=device) if paged else None
    with pytest.raises(RuntimeError, match=r"keys\[1\] was made in inference mode"):
        mrrope.rescale_cache_([plain, keys], positions, a, b, blocks=blocks)
    assert same_bits(plain, before)
    assert same_bits(keys, before)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(("backend", "paged", "graphs"), [("inductor", False, 1), ("aot_eager", True, 3)])
def test_compile(device, backend, paged, graphs):
    def read_on(keys, positions, old, new, blocks):
        mrrope.rescale_cache_(keys, positions, old, new, "bhsd", "interleaved", blocks)
        return keys[0].sum(-1) + keys[1].sum(-1)

    compiled = torch.compile(read_on, fullgraph=True, backend=backend)
    a, b, equal = tables_of(["rope", "yarn", "rope"], 16)
    case = Case(dtype=torch.float64)
    # Tables with other indices need another graph.
    for old, new in ((a, [b, b]), ([a, b], [b, b]), ([a, b], [equal, a]))[:graphs]:
        blocks = torch.tensor([1, 0], device=device) if paged else None
        ours, theirs = ([keys_of(case.with_changes(seed=i), device) for i in range(2)] for _ in range(2))
        expected = read_on(ours, case.positions(device), old, new, blocks)
        actual = compiled(theirs, case.positions(device), old, new, blocks)
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)
        assert all(same_bits(x, y) for x, y in zip(theirs, ours, strict=True))


def test_compile_once_for_every_numbering(device, dynamo):
    counter = dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *arguments: RESCALE_(*arguments), fullgraph=True, backend=counter)
    case, tables = Case(), tables_of(["rope", "pi", "yarn"], 16)
    positions, stack = case.positions(device), stack_of(tables, device)
    for old, new in (([0, 1], [2, 1]), ([0, 0], [1, 2]), ([2, 1], [0, 0])):
        keys = keys_of(case, device)
        compiled([keys], positions, stack, index_of(old, device), index_of(new, device), "bhsd", "halves")
        assert_rescaled(keys, keys_of(case, device), positions, [tables[i] for i in old], [tables[i] for i in new])
    assert counter.frame_count == 1


# --- errors ---


def good_call() -> dict:
    layers = [torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    old, new = tables_of(["rope", "yarn"], 8)
    return {"keys": layers, "positions": torch.arange(4), "old": old, "new": new, "layout": "bhsd", "pairing": "halves"}


def layers_with(second: torch.Tensor) -> dict:
    return {"keys": [good_call()["keys"][0], second]}


def blocks(*values: int, layout: str = "bhsd") -> dict:
    return {"blocks": torch.tensor(values, dtype=torch.int64), "layout": layout}


ROPE, YARN, NARROW = *tables_of(["rope", "yarn"], 8), table_of("yarn", 6)
CALLS = {
    # types
    "keys is a number": ({"keys": 3}, TypeError, ["keys must be a tensor or a list of them", "got int"]),
    "keys[1] is a list": ({"keys": [torch.ones(2, 3, 4, 8), [1.0]]}, TypeError, ["keys[1] must be a tensor", "list"]),
    "no layers": ({"keys": []}, ValueError, ["keys must hold a tensor for every layer", "got none"]),
    "positions is a range": ({"positions": range(4)}, TypeError, ["positions must be a tensor", "got range"]),
    "old is a name": ({"old": "rope"}, TypeError, ["old must be a FrequencyTable or a list of them", "got 'rope'"]),
    "new holds a name": ({"new": [ROPE, "yarn"]}, TypeError, ["new must be a FrequencyTable or a list", "'yarn'"]),
    "blocks is a list": ({"blocks": [0]}, TypeError, ["blocks must be an int64 tensor", "got [0]"]),
    # shapes
    "keys of rank 0": ({"keys": torch.tensor(1.0)}, ValueError, ["keys[0] must be [batch, ", "0 dimensions"]),
    "keys of rank 3 with tables for each": (
        {"keys": torch.ones(7, 3, 8), "old": [ROPE], "new": [YARN]},
        ValueError,
        ["keys[0] must be [batch, ", "3 dimensions"],
    ),
    "keys[1] of rank 3": (layers_with(torch.ones(3, 4, 8)), ValueError,
                          ["keys[1] must be [batch, heads, tokens, head_dim]", "layout bhsd", "3 dimensions"]),
    "thd of rank 4": ({"layout": "thd"}, ValueError, ["keys[0] must be [tokens, heads, head_dim]", "4 dimensions"]),
    "keys[1] of another batch": (layers_with(torch.ones(3, 3, 4, 8)), ValueError,
                                 ["keys[1] must have the sequences and tokens of keys[0], [2, 3, 4, 8]",
                                  "got [3, 3, 4, 8]"]),
    "keys[1] of other tokens": (layers_with(torch.ones(2, 3, 5, 8)), ValueError, ["keys[1] must", "[2, 3, 5, 8]"]),
    "keys[1] too narrow": (layers_with(torch.ones(2, 3, 4, 6)), ValueError,
                           ["table.rotary_dim must be at most head_dim", "keys[1] (6)", "got 8"]),
    "positions too short": ({"positions": torch.arange(3)}, ValueError,
                            ["positions must be [4], [1, 4] or [2, 4] for keys[0]", "got [3]"]),
    "positions of another batch": ({"positions": torch.ones(3, 4).long()}, ValueError, ["positions", "got [3, 4]"]),
    "too few old": ({"old": [ROPE]}, ValueError, ["old must be one table, or one for each of 2", "got 1"]),
    "no new": ({"new": []}, ValueError, ["new must be one table, or one for each of 2 sequences", "got 0"]),
    "tables of a block too few": ({**blocks(0), "new": [YARN, YARN]}, ValueError, ["new must be", "of 1", "got 2"]),
    "new of another rotary_dim": ({"new": NARROW}, ValueError, ["new[0] must have old[0]'s rotary_dim 8", "got 6"]),
    "old of several rotary_dim": ({"old": [ROPE, NARROW]}, ValueError, ["old[1] must have old[0]'s", "got 6"]),
    "blocks of rank 2": ({"blocks": torch.zeros(1, 1).long()}, TypeError, ["blocks must be", "one dimension"]),
    "blocks with thd": ({**blocks(0, layout="thd"), "keys": torch.ones(4, 3, 8)}, ValueError,
                        ["blocks must come with layout bhsd or bshd", "'thd'"]),
    # strides and memory
    "keys[1] strided": (layers_with(torch.ones(2, 3, 4, 16)[..., ::2]), ValueError,
                        ["keys[1] must be", "contiguous last dimension", "[192, 64, 16, 2]"]),
    "keys[1] expanded": (layers_with(torch.ones(2, 1, 4, 8).expand(2, 3, 4, 8)), RuntimeError,
                         ["keys[1] must not overlap itself", "[32, 0, 8, 1]"]),
    # dtypes
    "keys of integers": ({"keys": torch.ones(2, 3, 4, 8).long()}, TypeError, ["keys[0] must be float64", "got Long"]),
    "keys[1] of another dtype": (layers_with(torch.ones(2, 3, 4, 8).half()), TypeError,
                                 ["keys[1] must have the dtype of keys[0], Float", "got Half"]),
    "positions of floats": ({"positions": torch.arange(4.0)}, TypeError, ["positions must be int32 or", "got Float"]),
    "blocks of int32": ({"blocks": torch.zeros(1).int()}, TypeError, ["blocks must be an int64 tensor"]),
    # devices
    "keys[1] on another device": (layers_with(torch.ones(2, 3, 4, 8, device="meta")), RuntimeError,
                                  ["keys[1] must be on the device of keys[0], cpu", "got meta"]),
    "positions on another device": ({"positions": torch.ones(4, device="meta").long()}, RuntimeError,
                                    ["positions must be on keys[0]'s device cpu", "got meta"]),
    "blocks on another device": ({"blocks": torch.ones(1, device="meta").long()}, RuntimeError,
                                 ["blocks must be on the device of keys[0], cpu", "got meta"]),
    # values
    "a block that is not there": (blocks(0, 2), IndexError, ["blocks must name blocks of keys, 0 to 1", "[0, 2]"]),
    "a negative block": (blocks(-1), IndexError, ["blocks must name blocks of keys, 0 to 1", "[-1]"]),
    "a block that one layer lacks": ({**layers_with(torch.ones(1, 3, 4, 8)), **blocks(1)}, IndexError,
                                     ["blocks must name blocks of keys, 0 to 0", "[1]"]),
    "unknown layout": ({"layout": "sbhd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "got 'sbhd'"]),
    "unknown pairing": ({"pairing": "pairs"}, ValueError, ["pairing must be one of halves, interleaved", "'pairs'"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), CALLS.values(), ids=CALLS.keys())
def test_errors(changes, error, texts):
    arguments = {**good_call(), **changes}
    assert_refused_untouched(mrrope.rescale_cache_, arguments, error, *texts)


def test_the_good_call_is_good():
    mrrope.rescale_cache_(**good_call())
    mrrope.rescale_cache_(**{**good_call(), **blocks(1)})


RAW = {
    "no keys": ({"keys": []}, ValueError, ["keys must hold a tensor for every layer", "got none"]),
    "one table": ({"tables": torch.ones(5).long()}, ValueError, ["tables must be a contiguous stack", "got [5]"]),
    "tables of floats": ({"tables": torch.ones(2, 5)}, TypeError, ["table must be an int64 tensor", "got Float"]),
    "strided tables": ({"tables": torch.ones(2, 10).long()[:, ::2]}, ValueError, ["tables must be", "strides [10, 2]"]),
    "old of int64": ({"old": torch.zeros(2).long()}, TypeError, ["old must be int32", "got Long"]),
    "new too short": ({"new": index_of([1], "cpu")}, ValueError, ["new must be [2], one a sequence", "got [1]"]),
    "old beyond the tables": ({"old": index_of([0, 2], "cpu")}, IndexError,
                              ["old must name one of 2 tables, 0 to 1", "got 2 at 1"]),
    "new negative": ({"new": index_of([-1, 0], "cpu")}, IndexError, ["new must name", "got -1 at 0"]),
    "new on another device": ({"new": index_of([0, 1], "meta")}, RuntimeError, ["new must be on keys[0]'s", "meta"]),
}  # fmt: skip


def raw_call() -> dict:
    call = good_call()
    return {"keys": call["keys"], "positions": call["positions"], "tables": stack_of([ROPE, YARN], "cpu"),
            "old": index_of([0, 0], "cpu"), "new": index_of([1, 0], "cpu")}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), RAW.values(), ids=RAW.keys())
def test_raw_op(changes, error, texts):
    arguments = {**raw_call(), **changes}
    assert_refused_untouched(RESCALE_, arguments, error, *texts)


@pytest.mark.parametrize("heads", [(2, 4), (4, 2)])
def test_layers_may_differ_in_heads(device, heads):
    # Views of memory for four heads, so that a write past the actual heads shows in the memory around them.
    layers = [torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(count)).to(device)[:, :count]
              for count in heads]  # fmt: skip
    before, around = [x.clone() for x in layers], [bytes_outside(x) for x in layers]
    positions, (a, b) = torch.arange(5, device=device), tables_of(["rope", "yarn"], 16)
    mrrope.rescale_cache_(layers, positions, a, b)
    for x, was in zip(layers, before, strict=True):
        assert_rescaled(x, was, positions, [a] * 2, [b] * 2)
    assert all(torch.equal(bytes_outside(x), y) for x, y in zip(layers, around, strict=True))


@pytest.mark.parametrize("second", [slice(0, 2), slice(1, 3)])
def test_layers_that_share_memory(second):
    whole = torch.randn(3, 2, 4, 8)
    arguments = {**raw_call(), "keys": [whole[:2], whole[second]]}
    texts = ["keys[0]", "keys[1]", "must not share memory"]
    assert_refused_untouched(RESCALE_, arguments, RuntimeError, *texts)


def test_raw_op_with_inference_tensors_outside_of_inference_mode():
    arguments = raw_call()
    with torch.inference_mode():
        arguments["keys"][1] = arguments["keys"][1].clone()
    before = [x.clone() for x in arguments["keys"]]
    with pytest.raises(RuntimeError, match="inference"):
        RESCALE_(**arguments)
    assert all(same_bits(x, y) for x, y in zip(arguments["keys"], before, strict=True))


def test_raw_op_with_a_strided_index():
    arguments, dense = raw_call(), raw_call()
    RESCALE_(**{**arguments, "old": index_of([0, 7, 0, 7], "cpu")[::2], "new": index_of([1, 7, 0, 7], "cpu")[::2]})
    RESCALE_(**dense)
    assert all(same_bits(x, y) for x, y in zip(arguments["keys"], dense["keys"], strict=True))


# --- CUDA ---


def test_graph_replays_with_other_numbers(cuda):
    case, tables = Case(batch=3, dtype=torch.bfloat16, tokens=70), tables_of(METHODS, 16)
    layers, positions = [keys_of(case.with_changes(seed=i), cuda) for i in range(3)], case.positions(cuda)
    before, stack = [x.clone() for x in layers], stack_of(tables, cuda)
    old, new = index_of([0, 0, 0], cuda), index_of([0, 0, 0], cuda)
    RESCALE_(layers, positions, stack, old, new, "bhsd", "halves")  # loads the kernel; no table changes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        RESCALE_(layers, positions, stack, old, new, "bhsd", "halves")
    for olds, news in (([0, 1, 2], [3, 1, 4]), ([4, 4, 4], [4, 4, 4]), ([3, 2, 0], [0, 0, 1])):
        for x, value in zip(layers, before, strict=True):
            x.copy_(value)
        old.copy_(index_of(olds, cuda))
        new.copy_(index_of(news, cuda))
        graph.replay()
        for x, was in zip(layers, before, strict=True):
            assert_rescaled(x, was, positions, [tables[i] for i in olds], [tables[i] for i in news])


@pytest.mark.parametrize("wrong", [2, -1, 2**31 - 1, -(2**31)])
def test_a_wrong_number_on_a_gpu_spoils_nothing_else(cuda, wrong):
    case, tables = Case(batch=3, memory="padded"), tables_of(["rope", "yarn"], 16)
    keys, positions = keys_of(case, cuda), case.positions(cuda)
    before, around = keys.clone(), bytes_outside(keys)
    RESCALE_([keys], positions, stack_of(tables, cuda), index_of([0, 0, 1], cuda), index_of([1, wrong, 1], cuda))
    torch.cuda.synchronize()
    a, b = tables
    for part, old, new in ((slice(0, 1), a, b), (slice(2, 3), b, b)):
        assert_rescaled(keys[part], before[part], positions[part], [old], [new])
    assert torch.equal(bytes_outside(keys), around)


def test_runs_on_the_current_stream(cuda):
    case, (a, b) = Case(), tables_of(["rope", "yarn"], 16)
    keys, positions = keys_of(case, cuda), case.positions(cuda)
    late, stack = torch.zeros_like(keys), stack_of([a, b], cuda)
    old, new = index_of([0, 0], cuda), index_of([1, 1], cuda)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The keys are written late on this stream, so that a kernel on another stream would read zeros.
        torch.cuda._sleep(200_000_000)
        late.copy_(keys)
        RESCALE_([late], positions, stack, old, new)
    stream.synchronize()
    assert_rescaled(late, keys, positions, [a] * 2, [b] * 2)


@pytest.mark.parametrize("fault", ["the same twice", "one block for all"])
def test_blocks_of_layers_that_share_memory_are_refused(fault):
    first, second = (torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    layers = [first, first] if fault == "the same twice" else [first, second[:1].expand(3, -1, -1, -1)]
    before, (a, b) = [x.clone() for x in layers], tables_of(["rope", "yarn"], 8)
    with pytest.raises(RuntimeError, match=r"keys\[1\] must not (share|overlap itself in) memory"):
        mrrope.rescale_cache_(layers, torch.arange(4), a, b, blocks=torch.tensor([2, 0]))
    assert all(torch.equal(x, was) for x, was in zip(layers, before, strict=True))
