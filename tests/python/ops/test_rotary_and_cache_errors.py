"""rotary_and_cache refuses bad arguments, and leaves the tensors untouched."""

import math

import pytest
import torch
from op_errors import assert_refused_untouched
from rotary_and_cache_calls import IN_PLACE, Call, Kept
from rotary_cases import Case, table_of
from tensor_bits import same_bits

import mrrope
from mrrope.tables.frequency_table import packed_stack


def good_call() -> dict:
    def ones(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))

    return {
        "q": ones(2, 3, 4, 8),
        "k": ones(2, 1, 4, 8),
        "v": ones(2, 1, 4, 8),
        "positions": torch.arange(4),
        "table": table_of("yarn", 8),
        "key_cache": ones(3, 4, 1, 8),
        "value_cache": ones(3, 4, 1, 8),
        "slots": torch.arange(8).view(2, 4),
    }


def ones(*shape, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


CACHE8 = {name: torch.zeros(3, 4, 1, 8, dtype=torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}


STATIC = {"slots": None, "key_cache": ones(2, 1, 6, 8), "value_cache": ones(2, 1, 6, 8)}


SHARED = ones(3, 4, 1, 8)


BOTH = torch.ones(3, 2, 4, 1, 8)


PACKED = torch.ones(2, 5, 4, 8)


ALIAS = torch.ones(2, 1, 4, 8)


WRONG = {
    # types
    "q is a list": ({"q": [1.0]}, TypeError, ["q must be a tensor", "got list"]),
    "k is None": ({"k": None}, TypeError, ["k must be a tensor", "NoneType"]),
    "v is a number": ({"v": 3}, TypeError, ["v must be a tensor", "got int"]),
    "key_cache is a tuple": ({"key_cache": ()}, TypeError, ["key_cache must be a tensor", "got tuple"]),
    "slots is a list": ({"slots": [1]}, TypeError, ["slots must be a tensor or None", "got list"]),
    "key_scale is a number": ({**CACHE8, "key_scale": 0.5}, TypeError, ["key_scale must be a tensor or None", "float"]),
    "table is a name": ({"table": "yarn"}, TypeError, ["table must be a FrequencyTable", "got str"]),
    "slots and cache_positions": ({"cache_positions": torch.arange(4)}, ValueError,
                                  ["cache_positions must come without slots", "got both"]),
    # shapes
    "k of other tokens": ({"k": ones(2, 1, 5, 8)}, ValueError, ["k must be", "number of heads only", "[2, 1, 5, 8]"]),
    "k of another head_dim": ({"k": ones(2, 1, 4, 6)}, ValueError, ["k must be", "got k of [2, 1, 4, 6]"]),
    "k of rank 3": ({"k": ones(1, 4, 8)}, ValueError, ["k must be [batch, heads, tokens, head_dim]", "3 dimensions"]),
    "v of other heads": ({"v": ones(2, 2, 4, 8)}, ValueError, ["v must have k's shape [2, 1, 4, 8]", "[2, 2, 4, 8]"]),
    "key_cache of rank 3": ({"key_cache": ones(12, 1, 8)}, ValueError,
                            ["key_cache must be [blocks, block_size, heads, head_dim]", "nhd", "3 dimensions"]),
    "key_cache of other heads": ({"key_cache": ones(3, 4, 2, 8)}, ValueError,
                                 ["key_cache must be", "1 heads of 8 of k", "got [3, 4, 2, 8]"]),
    "key_cache of another head_dim": ({"key_cache": ones(3, 4, 1, 9)}, ValueError, ["key_cache", "[3, 4, 1, 9]"]),
    "value_cache of other blocks": ({"value_cache": ones(4, 4, 1, 8)}, ValueError,
                                    ["value_cache must have key_cache's shape [3, 4, 1, 8]", "got [4, 4, 1, 8]"]),
    "hnd of nhd": ({"cache_layout": "hnd"}, ValueError, ["key_cache must be [blocks, heads, block_size, head_dim]"]),
    "static of another batch": ({**STATIC, "key_cache": ones(3, 1, 6, 8)}, ValueError,
                                ["key_cache must hold k's 2 sequences where there are no slots", "[3, 1, 6, 8]"]),
    "too few slots": ({"slots": torch.arange(4)}, ValueError, ["slots must be 8, one for each token", "got [4]"]),
    "slots in one row": ({"slots": torch.arange(8)}, ValueError, ["slots must be", "[2, 4]", "got [8]"]),
    "too few positions": ({"positions": torch.arange(3)}, ValueError, ["positions must be [4]", "got [3]"]),
    "rows of positions": ({"positions": torch.zeros(3, 2, 4).long()}, ValueError,
                          ["positions must be [4]", "got [3, 2, 4]"]),
    "too few cache_positions": ({**STATIC, "cache_positions": torch.arange(3)}, ValueError,
                                ["cache_positions, or else positions, must be [4]", "got [3]"]),
    "q_out of another shape": ({"q_out": ones(2, 3, 4, 9)}, ValueError, ["q_out must have q's shape", "[2, 3, 4, 9]"]),
    "key_scale of two": ({**CACHE8, "key_scale": ones(2)}, ValueError,
                         ["key_scale must have one element, or [1]", "got [2]"]),
    "value_scale of two": ({**CACHE8, "value_scale": ones(2)}, ValueError, ["value_scale must have one", "head of v"]),
    # strides and memory
    "strided v": ({"v": ones(2, 1, 4, 16)[..., ::2]}, ValueError, ["v must be", "contiguous last dimension"]),
    "strided key_cache": ({"key_cache": ones(3, 4, 1, 16)[..., ::2]}, ValueError,
                          ["key_cache must be", "contiguous last dimension", "[64, 16, 16, 2]"]),
    "expanded value_cache": ({"value_cache": ones(1, 4, 1, 8).expand(3, 4, 1, 8)}, RuntimeError,
                             ["value_cache must not overlap itself", "[0, 8, 8, 1]"]),
    "expanded q": ({"q": ones(1, 3, 4, 8).expand(2, 3, 4, 8)}, RuntimeError, ["q must not overlap itself"]),
    "one cache": ({"key_cache": SHARED, "value_cache": SHARED}, RuntimeError,
                  ["key_cache and value_cache must not share memory"]),
    "k in the cache": ({"k": SHARED.view(-1)[:64].view(2, 1, 4, 8), "key_cache": SHARED}, RuntimeError,
                       ["k and key_cache must not share memory"]),
    "one half of a cache": ({"key_cache": BOTH[:, 0], "value_cache": BOTH[:, 0]}, RuntimeError,
                            ["key_cache and value_cache must not share memory"]),
    "k is q": ({"q": ALIAS, "k": ALIAS}, RuntimeError, ["k and q must not share memory"]),
    "v is q": ({"q": ALIAS, "v": ALIAS}, RuntimeError, ["v and q must not share memory"]),
    "k is q_out": ({"q": ALIAS.clone(), "k": ALIAS, "q_out": ALIAS}, RuntimeError, ["k and q_out must not share"]),
    "v in a strided q": ({"q": PACKED[:, :3], "v": PACKED[:, 2:3]}, RuntimeError, ["v and q must not share memory"]),
    # dtypes
    "v of another dtype": ({"v": ones(2, 1, 4, 8).half()}, TypeError, ["v must have q's dtype Float", "got Half"]),
    "caches of another dtype": ({"key_cache": ones(3, 4, 1, 8).half()}, TypeError,
                                ["key_cache must have q's dtype Float or be Float8_e4m3fn or Float8_e5m2", "got Half"]),
    "caches of two dtypes": ({"value_cache": CACHE8["value_cache"]}, TypeError,
                             ["value_cache must have key_cache's dtype Float", "Float8_e4m3fn"]),
    "float8 of float64": ({**CACHE8, **{n: good_call()[n].double() for n in "qkv"}}, TypeError,
                          ["q must be float32, float16 or bfloat16 for key_cache of Float8", "got Double"]),
    "slots of floats": ({"slots": ones(2, 4)}, TypeError, ["slots must be int32 or int64", "got Float"]),
    "key_scale of float64": ({**CACHE8, "key_scale": ones(1).double()}, TypeError, ["key_scale must be float32"]),
    "key_scale of nothing": ({**CACHE8, "key_scale": torch.tensor(0.0)}, ValueError,
                             ["key_scale must be from 2^-126 to 2^126 in magnitude", "got 0 at index 0"]),
    "key_scale too small": ({**CACHE8, "key_scale": torch.tensor([1e-39])}, ValueError,
                            ["key_scale must be from 2^-126 to 2^126", "got 1e-39 at index 0"]),
    "key_scale too large": ({**CACHE8, "key_scale": torch.tensor([2.0**127])}, ValueError,
                            ["key_scale must be from 2^-126 to 2^126", "got 1.70141e+38 at index 0"]),
    "value_scale of infinity": ({**CACHE8, "value_scale": torch.tensor(math.inf)}, ValueError,
                                ["value_scale must be from 2^-126", "got inf at index 0"]),
    "value_scale not a number": ({**CACHE8, "value_scale": torch.tensor(math.nan)}, ValueError,
                                 ["value_scale must be from 2^-126", "got nan at index 0"]),
    "a scale without float8": ({"value_scale": ones(1)}, ValueError, ["value_scale must come with caches of Float8"]),
    # devices
    "v on another device": ({"v": ones(2, 1, 4, 8, device="meta")}, RuntimeError,
                            ["v must be on q's device cpu", "got meta"]),
    "slots on another device": ({"slots": ones(2, 4, device="meta").long()}, RuntimeError,
                                ["slots must be on q's device cpu", "got meta"]),
    "key_cache on another device": ({"key_cache": ones(3, 4, 1, 8, device="meta")}, RuntimeError,
                                    ["key_cache must be on q's device cpu", "got meta"]),
    "key_scale on another device": ({**CACHE8, "key_scale": ones(1, device="meta")}, RuntimeError,
                                    ["key_scale must be on q's device cpu", "got meta"]),
    # values
    "a slot that is not there": ({"slots": torch.tensor([[0, 1, 2, 3], [4, 5, 12, 7]])}, IndexError,
                                 ["slots must be below 12", "negative", "got 12 for token 2 of sequence 1"]),
    "a position past the cache": ({**STATIC, "positions": torch.tensor([4, 5, 6, 7])}, IndexError,
                                  ["cache_positions, or else positions, must be below 6", "got 6 for token 2"]),
    "unknown layout": ({"layout": "hsd"}, ValueError, ["layout must be one of bhsd, bshd, thd", "got 'hsd'"]),
    "unknown cache_layout": ({"cache_layout": "NHD"}, ValueError, ["cache_layout must be one of nhd, hnd", "'NHD'"]),
    "unknown pairing": ({"pairing": "pairs"}, ValueError, ["pairing must be one of halves, interleaved", "'pairs'"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), WRONG.values(), ids=WRONG.keys())
def test_errors(changes, error, texts):
    arguments = {**good_call(), **changes}
    assert_refused_untouched(mrrope.rotary_and_cache_, arguments, error, *texts)


def test_the_good_call_is_good():
    mrrope.rotary_and_cache_(**good_call())
    mrrope.rotary_and_cache_(**{**good_call(), **STATIC})
    mrrope.rotary_and_cache_(**{**good_call(), **CACHE8, "key_scale": ones(1), "value_scale": torch.tensor(2.0)})


def test_the_op_takes_stacks_of_tables(device):
    call = Call(Case(batch=2), Kept(), device)
    tables = [table_of("rope", 16), table_of("yarn", 16)]
    expected = Call(Case(batch=2), Kept(), device)
    mrrope.rotary_and_cache_(**expected.arguments() | {"table": tables})
    arguments = list(call.raw_arguments())
    arguments[4] = packed_stack(tables, call.q.device)
    IN_PLACE(*arguments)
    assert all(same_bits(x, y) for x, y in zip(call.written(), expected.written(), strict=True))


def test_forward_mode_derivatives_are_refused_not_dropped():
    call = good_call()
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(call["q"], torch.ones_like(call["q"]))
        with pytest.raises(RuntimeError, match="q requires grad, and caches are written without gradients"):
            mrrope.rotary_and_cache_(**{**call, "q": q})
