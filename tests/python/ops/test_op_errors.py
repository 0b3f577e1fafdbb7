"""Errors of the ops and tables: each names the argument, what it got and what it expected, and changes nothing."""

import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markers import needs_cuda
from op_errors import assert_refused, assert_refused_untouched
from rotary_cases import table_of

import mrrope
from mrrope import FrequencyTable, frequency_table

OPS = [mrrope.rotary, mrrope.rotary_]
SETTINGS = {"method": "yarn", "rotary_dim": 8, "base": 1e4, "original_max_position": 2048, "scale": 4.0}
METHOD_LIST = "rope, pi, ntk, yarn, yarn_ratio, mrrope_uni, mrrope_pro, mrrope_pow, radix, longrope, llama3"


def good_call() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 4, 3, 8, generator=generator),
        "k": torch.randn(2, 2, 3, 8, generator=generator),
        "positions": torch.arange(3),
        "table": table_of("yarn", 8),
        "layout": "bhsd",
        "pairing": "halves",
    }


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def every_other(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


BHSD = "[batch, heads, tokens, head_dim]"
CALLS = {
    # types
    "q is a list": ({"q": [1.0]}, TypeError, ["q must be a tensor", "got list"]),
    "k is a number": ({"k": 3.0}, TypeError, ["k must be a tensor or None", "got float"]),
    "positions is a range": ({"positions": range(3)}, TypeError, ["positions must be a tensor", "got range"]),
    "table is a tensor": ({"table": ones(5)}, TypeError, ["table must be a FrequencyTable", "got Tensor"]),
    "table is a name": ({"table": "yarn"}, TypeError, ["table must be a FrequencyTable", "got str"]),
    # rank
    "q of rank 3": ({"q": ones(4, 3, 8)}, ValueError, [f"q must be {BHSD}", "layout bhsd", "got", "3 dimensions"]),
    "q of rank 5": ({"q": ones(1, 2, 4, 3, 8)}, ValueError, [f"q must be {BHSD}", "5 dimensions"]),
    "q of rank 0": ({"q": torch.tensor(1.0)}, ValueError, [f"q must be {BHSD}", "0 dimensions"]),
    "k of rank 3": ({"k": ones(2, 3, 8)}, ValueError, [f"k must be {BHSD}", "3 dimensions"]),
    "bshd of rank 3": ({"layout": "bshd", "q": ones(3, 4, 8)}, ValueError,
                       ["q must be [batch, tokens, heads, head_dim]", "3 dimensions"]),
    "thd of rank 4": ({"layout": "thd"}, ValueError, ["q must be [tokens, heads, head_dim]", "4 dimensions"]),
    # shapes
    "a head_dim of 33 bits": ({"q": torch.empty(0, 4, 3, 2**32 + 8), "k": None}, ValueError,
                              ["q must have a head_dim", "below 2^31", "got 4294967304"]),
    "k with another batch": ({"k": ones(1, 2, 3, 8)}, ValueError,
                             ["k must be", "heads only", "[1, 2, 3, 8]", "[2, 4, 3, 8]"]),
    "k with other tokens": ({"k": ones(2, 2, 5, 8)}, ValueError, ["k must be", "[2, 2, 5, 8]", "[2, 4, 3, 8]"]),
    "k with another head_dim": ({"k": ones(2, 2, 3, 16)}, ValueError, ["k must be", "[2, 2, 3, 16]"]),
    "thd k with other tokens": ({"layout": "thd", "q": ones(3, 4, 8), "k": ones(2, 4, 8)}, ValueError,
                                ["k must be [tokens, heads, head_dim]", "[2, 4, 8]", "[3, 4, 8]"]),
    "positions too short": ({"positions": torch.arange(2)}, ValueError,
                            ["positions must be [3], [1, 3] or [2, 3]", "[2, 4, 3, 8]", "layout bhsd", "got [2]"]),
    "positions of another batch": ({"positions": torch.zeros(3, 3, dtype=torch.int64)}, ValueError,
                                   ["positions must be [3], [1, 3] or [2, 3]", "got [3, 3]"]),
    "positions of rank 3": ({"positions": torch.zeros(1, 2, 3, dtype=torch.int64)}, ValueError,
                            ["positions must be", "got [1, 2, 3]"]),
    "positions of rank 0": ({"positions": torch.tensor(3)}, ValueError, ["positions must be", "got []"]),
    "thd positions of rank 2": ({"layout": "thd", "q": ones(3, 4, 8), "k": None,
                                 "positions": torch.zeros(1, 3, dtype=torch.int64)}, ValueError,
                                ["positions must be [3]", "layout thd", "got [1, 3]"]),
    "tokens where heads are": ({"layout": "bshd"}, ValueError, ["k must be [batch, tokens, heads, head_dim]"]),
    "rotary_dim above head_dim": ({"table": table_of("yarn", 10)}, ValueError,
                                  ["table.rotary_dim must be at most head_dim", "(8)", "got 10"]),
    "no head_dim": ({"q": ones(2, 4, 3, 0), "k": None}, ValueError, ["table.rotary_dim", "(0)", "got 8"]),
    # strides
    "q with a strided last dimension": ({"q": every_other(ones(2, 4, 3, 8))}, ValueError,
                                        [f"q must be {BHSD} with a contiguous last dimension", "[192, 48, 16, 2]"]),
    "k with a strided last dimension": ({"k": ones(2, 2, 8, 3).transpose(2, 3)}, ValueError,
                                        [f"k must be {BHSD} with a contiguous last dimension", "[48, 24, 1, 3]"]),
    "q with an expanded last dimension": ({"q": ones(2, 4, 3, 1).expand(2, 4, 3, 8)}, ValueError,
                                          ["q must be", "contiguous last dimension", "got strides"]),
    # dtypes
    "q of integers": ({"q": ones(2, 4, 3, 8, dtype=torch.int64)}, TypeError,
                      ["q must be float64, float32, float16 or bfloat16", "got Long"]),
    "q of complex numbers": ({"q": ones(2, 4, 3, 8, dtype=torch.complex64)}, TypeError, ["q must be", "ComplexFloat"]),
    "q of bytes": ({"q": ones(2, 4, 3, 8).to(torch.float8_e4m3fn)}, TypeError, ["q must be", "Float8_e4m3fn"]),
    "k of another dtype": ({"k": ones(2, 2, 3, 8, dtype=torch.bfloat16)}, TypeError,
                           ["k must have q's dtype Float", "got BFloat16"]),
    "positions of floats": ({"positions": torch.arange(3.0)}, TypeError,
                            ["positions must be int32 or int64", "got Float"]),
    "positions of small integers": ({"positions": torch.arange(3).short()}, TypeError,
                                    ["positions must be int32 or int64", "got Short"]),
    "positions of truths": ({"positions": torch.ones(3).bool()}, TypeError, ["positions must be", "got Bool"]),
    # devices
    "k on another device": ({"k": torch.empty(2, 2, 3, 8, device="meta")}, RuntimeError,
                            ["k must be on q's device cpu", "got meta"]),
    "positions on another device": ({"positions": torch.empty(3, device="meta").long()}, RuntimeError,
                                    ["positions must be on q's device cpu", "got meta"]),
    # names
    "unknown layout": ({"layout": "sbhd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "got 'sbhd'"]),
    "unknown pairing": ({"pairing": "pairs"}, ValueError,
                        ["pairing must be one of halves, interleaved", "got 'pairs'"]),
}  # fmt: skip


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("changes", "error", "texts"), CALLS.values(), ids=CALLS.keys())
def test_calls(op, changes, error, texts, requires_grad):
    arguments = {**good_call(), **changes}
    if requires_grad:
        for name in ("q", "k"):
            x = arguments[name]
            if isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
                # Not a leaf, which the in-place op refuses for that reason.
                arguments[name] = x.as_strided(x.shape, x.stride()).requires_grad_().view_as(x)
    assert_refused_untouched(op, arguments, error, *texts)


def test_the_good_call_is_good():
    for op in OPS:
        op(**good_call())


# --- in place ---


def sharing(cut) -> dict:
    """Return q and k as overlapping views of the same memory."""
    return dict(zip("qk", cut(torch.arange(288.0).view(3, 4, 3, 8)), strict=True))


IN_PLACE = {
    "expanded q": ({"q": ones(1, 4, 3, 8).expand(2, 4, 3, 8)},
                   ["q must not overlap itself", "[0, 24, 8, 1]", "[2, 4, 3, 8]", "clone"]),
    "expanded k": ({"k": ones(2, 1, 3, 8).expand(2, 2, 3, 8)}, ["k must not overlap itself", "[24, 0, 8, 1]"]),
    "q in overlapping windows": ({"q": torch.arange(64.0).as_strided((2, 4, 3, 8), (16, 8, 4, 1))},
                                 ["q must not overlap itself", "[16, 8, 4, 1]"]),
    "q is k": (sharing(lambda x: (x[:2], x[:2])), ["q and k must not share memory", "[2, 4, 3, 8]"]),
    "k is a part of q": (sharing(lambda x: (x[:2], x[:2, :2])), ["q and k must not share memory", "[2, 2, 3, 8]"]),
    "k overlaps q": (sharing(lambda x: (x[:2], x[1:])), ["q and k must not share memory"]),
    "k overlaps q in a packed projection": (sharing(lambda x: (x[:2, :3], x[:2, 2:])),
                                            ["q and k must not share memory", "[2, 3, 3, 8]", "[2, 2, 3, 8]"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "texts"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_overlapping_memory_in_place(changes, texts):
    assert_refused_untouched(mrrope.rotary_, {**good_call(), **changes}, RuntimeError, *texts)
    # Out of place overlapping inputs are allowed.
    mrrope.rotary(**{**good_call(), **changes})


@st.composite
def starts_and_steps(draw, size: int, count: int) -> slice:
    """A slice of ``count`` of ``size`` elements."""
    step = draw(st.integers(1, (size - 1) // (count - 1)))
    start = draw(st.integers(0, size - 1 - step * (count - 1)))
    return slice(start, start + step * (count - 1) + 1, step)


@st.composite
def views_of_one_tensor(draw) -> list[torch.Tensor]:
    """q and k, [batch, heads, tokens, head_dim], with gaps and steps, of a tensor with dimensions in any order."""
    order = draw(st.permutations([0, 1, 2]))
    sizes = [5, 6, 7]
    base = torch.arange(5 * 6 * 7 * 12).view(*(sizes[dim] for dim in order), 12)
    base = base.permute(*(order.index(dim) for dim in range(3)), 3)
    return [
        base[
            draw(starts_and_steps(5, 2)),
            draw(starts_and_steps(6, draw(st.integers(2, 3)))),
            draw(starts_and_steps(7, 3)),
            draw(st.integers(0, 4)) :,
        ][..., :8]
        for _ in range(2)
    ]


@given(views=views_of_one_tensor())
def test_views_of_one_tensor_in_place(views):
    """They are refused where one element is in both, and only there."""
    shared = set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
    memory = torch.zeros(5 * 6 * 7 * 12)
    q, k = (torch.as_strided(memory, x.shape, x.stride(), x.storage_offset()) for x in views)
    arguments = good_call() | {"q": q, "k": k}
    if shared:
        assert_refused_untouched(mrrope.rotary_, arguments, RuntimeError, "q and k must not share memory")
    else:
        mrrope.rotary_(**arguments)


@pytest.mark.parametrize("leaf", ["q", "k"])
def test_leaves_in_place(leaf):
    arguments = good_call()
    arguments[leaf].requires_grad_()
    assert_refused_untouched(mrrope.rotary_, arguments, RuntimeError, f"{leaf} is a leaf tensor that requires grad")


@pytest.mark.parametrize("made_inside", ["q", "k"])
def test_inference_tensors_in_place_outside_of_inference_mode(made_inside):
    arguments = good_call()
    with torch.inference_mode():
        arguments[made_inside] = arguments[made_inside].clone()
    memory = {name: arguments[name].clone() for name in ("q", "k")}
    assert_refused(lambda: mrrope.rotary_(**arguments), RuntimeError, f"{made_inside} was made in inference mode")
    assert all(torch.equal(arguments[name], x) for name, x in memory.items())


# --- torch.ops.mrrope called directly ---


def op_arguments() -> list:
    call = good_call()
    return [[call["q"], call["k"]], call["positions"], call["table"].packed(torch.device("cpu"))]


@pytest.mark.parametrize("op", [torch.ops.mrrope.rotary.default, torch.ops.mrrope.rotary_.default])
@pytest.mark.parametrize(
    ("index", "value", "error", "texts"),
    [
        (0, [], ValueError, ["heads must be [q] or [q, k]", "got 0"]),
        (0, [ones(2, 4, 3, 8)] * 3, ValueError, ["heads must be [q] or [q, k]", "got 3"]),
        (2, torch.ones(5), TypeError, ["table must be an int64 tensor", "got Float"]),
        (2, torch.ones(1, dtype=torch.int64), ValueError, ["table must be a contiguous int64 tensor", "got [1]"]),
        (2, torch.ones(1, 3, 5, dtype=torch.int64), ValueError, ["table must be", "got [1, 3, 5]"]),
        (2, torch.ones(10, dtype=torch.int64)[::2], ValueError, ["table must be", "strides [2]"]),
        (2, torch.ones(5, device="meta").long(), RuntimeError, ["table must be on q's device cpu", "got meta"]),
    ],
)
def test_raw_ops(op, index, value, error, texts):
    arguments = op_arguments()
    before = [x.clone() for x in arguments[0]]
    heads = arguments[0]
    arguments[index] = value
    assert_refused(lambda: op(*arguments), error, *texts)
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True))


# --- tables ---


NAN, INFINITY = math.nan, math.inf
NOT_POSITIVE = {"nan": NAN, "inf": INFINITY, "-inf": -INFINITY, "0": 0.0, "-2.5": -2.5}
REQUESTS = {
    "method unknown": ({"method": "yarnn"}, ValueError, [f"method must be one of {METHOD_LIST}", "got 'yarnn'"]),
    "method empty": ({"method": ""}, ValueError, ["method must be one of", "got ''"]),
    "method not a name": ({"method": 3}, TypeError, [f"method must be one of {METHOD_LIST}", "got 3"]),
    "method relative": ({"method": "relative"}, ValueError, ["method must be", "got 'relative'", "relative_to"]),
    "rotary_dim odd": ({"rotary_dim": 7}, ValueError, ["rotary_dim must be a positive even number", "got 7"]),
    "rotary_dim zero": ({"rotary_dim": 0}, ValueError, ["rotary_dim must be a positive even number", "got 0"]),
    "rotary_dim negative": ({"rotary_dim": -8}, ValueError, ["rotary_dim must be", "got -8"]),
    "rotary_dim a float": ({"rotary_dim": 8.0}, TypeError, ["rotary_dim must be an integer", "got 8.0"]),
    "rotary_dim huge": ({"rotary_dim": 2**40}, ValueError, ["rotary_dim must be below 2^31", f"got {2**40}"]),
    "base one": ({"base": 1.0}, ValueError, ["base must be a finite number above 1", "got 1"]),
    "base a word": ({"base": "theta"}, TypeError, ["base must be a number", "got 'theta'"]),
    "base beyond floats": ({"base": 10**400}, ValueError, ["base must be within the range of a float"]),
    "scale none": ({"scale": None}, TypeError, ["scale must be a number", "got None"]),
    "scale true": ({"scale": True}, TypeError, ["scale must be a number", "got True"]),
    "attention_factor true": ({"attention_factor": True}, TypeError, ["attention_factor must be a number", "got True"]),
    "alpha above beta": ({"alpha": 40.0}, ValueError, ["alpha must not be above beta", "alpha 40", "beta 32"]),
    "bounds reversed": ({"bounds": (3, 2)}, ValueError, ["bounds must be (d_l, d_h) with 0 <= d_l <= d_h", "(3, 2)"]),
    "bounds negative": ({"bounds": (-1, 2)}, ValueError, ["bounds must be", "(-1, 2)"]),
    "bounds of three": ({"bounds": (1, 2, 3)}, ValueError, ["bounds must be a pair (d_l, d_h)", "got (1, 2, 3)"]),
    "bounds a number": ({"bounds": 5}, TypeError, ["bounds must be a sequence", "got 5"]),
    "bounds of floats": ({"bounds": (1.5, 2)}, TypeError, ["bounds must be an integer", "got 1.5"]),
    "power missing": ({"method": "mrrope_pow"}, ValueError, ["power must be a finite number", "mrrope_pow", "none"]),
    "power infinite": ({"method": "mrrope_pow", "power": INFINITY}, ValueError, ["power must be a finite", "inf"]),
    "power nan": ({"method": "mrrope_pow", "power": NAN}, ValueError, ["power must be a finite number", "nan"]),
    "power a word": ({"method": "mrrope_pow", "power": "two"}, TypeError, ["power must be a number", "got 'two'"]),
    "power without need": ({"power": 2.0}, ValueError, ["power is for the method 'mrrope_pow' only", "2", "'yarn'"]),
    "factors without need": ({"factors": [1.0, 2.0]}, ValueError,
                             ["factors is for the methods 'radix' and 'longrope' only", "got 2", "'yarn'"]),
    "factors missing": ({"method": "longrope"}, ValueError, ["factors must hold rotary_dim / 2 = 4", "got 0"]),
    "radix factors too many": ({"method": "radix", "factors": [1.0] * 4}, ValueError,
                               ["factors must hold rotary_dim / 2 - 1 = 3", "radix", "got 4"]),
    "longrope factors too few": ({"method": "longrope", "factors": [1.0] * 3}, ValueError,
                                 ["factors must hold rotary_dim / 2 = 4", "longrope", "got 3"]),
    "factors a number": ({"method": "radix", "factors": 2.0}, TypeError, ["factors must be a sequence", "got 2.0"]),
    "factors of words": ({"method": "radix", "factors": ["a"] * 3}, TypeError, ["factors must be a number", "'a'"]),
    "frequencies that vanish": ({"method": "radix", "factors": [1e200] * 3}, ValueError,
                                ["the frequency of pair 2", "base", "cumulative scale"]),
    **{f"{name} {text}": ({name: value}, ValueError, [f"{name} must be a", "finite number", f"got {text}"])
       for name in ("base", "original_max_position", "scale", "alpha", "beta", "attention_factor")
       for text, value in NOT_POSITIVE.items()},
    **{f"factors {text}": ({"method": "longrope", "factors": [1.0, 1.0, value, 1.0]}, ValueError,
                           ["factors must be positive finite numbers", f"got {text}", "index 2"])
       for text, value in NOT_POSITIVE.items()},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), REQUESTS.values(), ids=REQUESTS.keys())
def test_table_requests(changes, error, texts):
    assert_refused(lambda: frequency_table(**{**SETTINGS, **changes}), error, *texts)


def test_related_tables_must_have_one_rotary_dim():
    a, b = table_of("yarn", 8), table_of("yarn", 16)
    assert_refused(lambda: a.relative_to(b), ValueError, "rotary_dim", "8 and 16")
    assert_refused(lambda: a.relative_to("rope"), TypeError, "other must be a FrequencyTable", "got str")


DICTS = {
    "another format": ({"format": "mrrope.FrequencyTable/9"}, ValueError, ["format must be", "FrequencyTable/9"]),
    "unknown field": ({"theta": 1.0}, ValueError, ["no fields ['theta']"]),
    "method unknown": ({"method": "yarnn"}, ValueError, ["method must be one of", "got 'yarnn'"]),
    "rotary_dim odd": ({"rotary_dim": 7}, ValueError, ["rotary_dim must be a positive even number", "got 7"]),
    "rotary_dim of another table": ({"rotary_dim": 10}, ValueError, ["inv_freq must hold rotary_dim / 2 = 5", "got 4"]),
    "base of another table": ({"base": 2e4}, ValueError, ["inv_freq must be base", "base 20000", "index 1"]),
    "base nan": ({"base": NAN}, ValueError, ["base must be a finite number above 1", "got nan"]),
    "length zero": ({"original_max_position": 0}, ValueError, ["original_max_position must be", "got 0"]),
    "scale negative": ({"scale": -1.0}, ValueError, ["scale must be a positive finite number", "got -1"]),
    "bounds reversed": ({"bounds": [3, 2]}, ValueError, ["bounds must be (d_l, d_h)", "(3, 2)"]),
    "bounds of one": ({"bounds": [3]}, ValueError, ["bounds must be a pair", "got [3]"]),
    "attention_factor infinite": ({"attention_factor": INFINITY}, ValueError, ["attention_factor must be", "got inf"]),
    "attention_factor a list": ({"attention_factor": [1.0]}, TypeError, ["attention_factor must be a number"]),
    "inv_freq too short": ({"inv_freq": [1.0]}, ValueError, ["inv_freq must hold rotary_dim / 2 = 4", "got 1"]),
    "inv_freq nan": ({"inv_freq": [1.0, NAN, 1.0, 1.0]}, ValueError, ["inv_freq must be finite", "nan", "index 1"]),
    "inv_freq a word": ({"inv_freq": ["a"]}, TypeError, ["inv_freq must be a number", "got 'a'"]),
    "cumulative_scale too short": ({"cumulative_scale": []}, ValueError, ["cumulative_scale must hold 4", "got 0"]),
    "cumulative_scale of another table": ({"cumulative_scale": [1.0, 1.0, 1.0, 1.0]}, ValueError,
                                          ["inv_freq must be base", "cumulative_scale", "index"]),
    "turns too short": ({"turns": [1, 2]}, ValueError, ["turns must hold rotary_dim / 2 = 4", "got 2"]),
    "turns of another table": ({"turns": [1, 2, 3, 4]}, ValueError, ["turns must be inv_freq / (2 pi)", "got 1"]),
    "turns of floats": ({"turns": [0.5] * 4}, TypeError, ["turns must be an integer", "got 0.5"]),
    "turns beyond 64 bits": ({"turns": [2**64] * 4}, ValueError, ["turns must be below 2^63", f"got {2**64}"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), DICTS.values(), ids=DICTS.keys())
def test_corrupted_dicts(tmp_path, changes, error, texts):
    corrupted = {**frequency_table(**SETTINGS).to_dict(), **changes}
    assert_refused(lambda: FrequencyTable.from_dict(corrupted), error, *texts)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(corrupted))
    assert_refused(lambda: FrequencyTable.load(path), error, *texts)


@pytest.mark.parametrize("field", frequency_table(**SETTINGS).to_dict())
def test_missing_fields(field):
    data = frequency_table(**SETTINGS).to_dict()
    del data[field]
    text = "format must be" if field == "format" else f"a table needs the fields ['{field}']"
    assert_refused(lambda: FrequencyTable.from_dict(data), ValueError, text)


# inv_freq has 53 bits and turns have 64, so the last bits of turns cannot be checked against it.
@pytest.mark.parametrize("bit", range(12, 64))
def test_a_flipped_bit_of_the_turns(bit):
    data = frequency_table(**SETTINGS).to_dict()
    flipped = (data["turns"][2] ^ (1 << bit)) % 2**64
    data["turns"][2] = flipped - 2**64 if flipped >= 2**63 else flipped
    assert_refused(lambda: FrequencyTable.from_dict(data), ValueError, "turns must be inv_freq", "index 2")


def test_what_is_no_table_at_all(tmp_path):
    assert_refused(lambda: FrequencyTable.from_dict([1]), TypeError, "data must be a dict", "got list")
    path = tmp_path / "table.json"
    path.write_text("{")
    assert_refused(lambda: FrequencyTable.load(path), ValueError, str(path), "is not JSON")
    path.write_text("[1]")
    assert_refused(lambda: FrequencyTable.load(path), ValueError, str(path), "must hold a JSON object", "got list")
    with pytest.raises(FileNotFoundError, match=re.escape("nowhere.json")):
        FrequencyTable.load(tmp_path / "nowhere.json")


# --- CUDA ---


@needs_cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "positions"])
def test_tensors_on_two_devices(op, name):
    arguments = good_call()
    arguments[name] = arguments[name].cuda()
    wrong = "k" if name == "q" else name
    assert_refused_untouched(op, arguments, RuntimeError, f"{wrong} must be on q's device")
