"""qk_norm_rotary_and_cache refuses bad arguments, and leaves the tensors untouched."""

import math

import pytest
import torch
from op_errors import assert_refused_untouched
from qk_norm_rotary_and_cache_calls import Call, Options
from rotary_cases import Case, table_of

import mrrope


def ones(*shape, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


def good_call() -> dict:
    return {
        "q": ones(2, 3, 4, 8),
        "k": ones(2, 1, 4, 8),
        "v": ones(2, 1, 4, 8),
        "q_weight": ones(8),
        "k_weight": ones(8),
        "positions": torch.arange(4),
        "table": table_of("yarn", 8),
        "key_cache": ones(3, 4, 1, 8),
        "value_cache": ones(3, 4, 1, 8),
        "slots": torch.arange(8).view(2, 4),
        "eps": 1e-6,
    }


Q8 = {"q_out": torch.zeros(2, 3, 4, 8, dtype=torch.float8_e4m3fn)}


SHARED = ones(2, 3, 4, 8)


ALIAS = ones(2, 1, 4, 8)


WRONG = {
    "q_weight as a list": ({"q_weight": [1.0]}, TypeError, ["q_weight must be a tensor or None, got list"]),
    "gate as a number": ({"gate": 1.0}, TypeError, ["gate must be a tensor or None, got float"]),
    "no eps": ({"eps": None}, ValueError, ["eps must be given with q_weight or k_weight, got None"]),
    "negative eps": ({"eps": -1.0}, ValueError, ["eps must be finite and not negative, got -1"]),
    "weight_offset not a number": ({"weight_offset": math.nan}, ValueError, ["weight_offset must be finite, got nan"]),
    "unknown over": ({"over": "heads"}, ValueError, ["over must be one of head, all_heads, got 'heads'"]),
    "q_weight of all heads": ({"q_weight": ones(24)}, ValueError, ["q_weight must be [8], head_dim", "got [24]"]),
    "k_weight of a head": ({"over": "all_heads", "q_weight": ones(24), "k_weight": ones(9)}, ValueError,
                           ["k_weight must be [8], heads * head_dim", "got [9]"]),
    "q_weight of two dimensions": ({"q_weight": ones(1, 8)}, ValueError, ["q_weight must have one dimension, got 2"]),
    "q_weight of another dtype": ({"q_weight": ones(8).half()}, TypeError, ["q_weight must have q's dtype Float"]),
    "k_weight on another device": ({"k_weight": ones(8, device="meta")}, RuntimeError,
                                   ["k_weight must be on q's device cpu", "got meta"]),
    "gate of another shape": ({"gate": ones(2, 3, 4, 9)}, ValueError, ["gate must have q's shape", "[2, 3, 4, 9]"]),
    "gate of another rank": ({"gate": ones(3, 4, 8)}, ValueError, ["gate must be [batch, heads, tokens, head_dim]"]),
    "gate of another dtype": ({"gate": ones(2, 3, 4, 8).half()}, TypeError, ["gate must have q's dtype Float"]),
    "strided gate": ({"gate": ones(2, 3, 4, 16)[..., ::2]}, ValueError, ["gate must be", "contiguous last dimension"]),
    "expanded gate": ({"gate": ones(1, 3, 4, 8).expand(2, 3, 4, 8)}, RuntimeError, ["gate must not overlap itself"]),
    "k is q": ({"q": ALIAS, "k": ALIAS}, RuntimeError, ["k and q must not share memory"]),
    "v is q": ({"q": ALIAS, "v": ALIAS}, RuntimeError, ["v and q must not share memory"]),
    "gate is q": ({"q": SHARED, "gate": SHARED}, RuntimeError, ["gate and q must not share memory"]),
    "a weight in q": ({"q": SHARED, "q_weight": SHARED.view(-1)[:8]}, RuntimeError,
                      ["q_weight and q must not share memory"]),
    "q_scale in place": ({"q_scale": ones(1)}, ValueError, ["q_scale must come with a q_out of float8, got q in"]),
    "q_scale_out in place": ({"q_scale_out": ones(2, 3, 4)}, ValueError, ["q_scale_out must come with a q_out"]),
    "q_scale without float8": ({"q_out": ones(2, 3, 4, 8), "q_scale": ones(1)}, ValueError,
                               ["q_scale must come with q_out of Float8_e4m3fn or Float8_e5m2, got Float"]),
    "both scales": ({**Q8, "q_scale": ones(1), "q_scale_out": ones(2, 3, 4)}, ValueError,
                    ["q_scale must come without q_scale_out", "got both"]),
    "q_scale of two": ({**Q8, "q_scale": ones(2)}, ValueError, ["q_scale must have one element, or [3]", "got [2]"]),
    "q_scale of nothing": ({**Q8, "q_scale": torch.zeros(1)}, ValueError, ["q_scale must be from 2^-126", "got 0"]),
    "q_scale_out of another shape": ({**Q8, "q_scale_out": ones(2, 4, 3)}, ValueError,
                                     ["q_scale_out must be [2, 3, 4], one a token and head of q, got [2, 4, 3]"]),
    "q_scale_out of another dtype": ({**Q8, "q_scale_out": ones(2, 3, 4).half()}, TypeError,
                                     ["q_scale_out must be float32, got Half"]),
    "q_out of another dtype": ({"q_out": ones(2, 3, 4, 8).half()}, TypeError,
                               ["q_out must have q's dtype Float or be Float8_e4m3fn or Float8_e5m2", "got Half"]),
    "float8 of float64": ({**Q8, **{n: good_call()[n].double() for n in good_call() if n[1:] in ("", "_weight")},
                           "key_cache": ones(3, 4, 1, 8).double(), "value_cache": ones(3, 4, 1, 8).double()},
                          TypeError, ["q must be float32, float16 or bfloat16 for q_out of Float8", "got Double"]),
    "caches of another dtype": ({"key_cache": ones(3, 4, 1, 8).half()}, TypeError, ["key_cache must have q's dtype"]),
    "slots and cache_positions": ({"cache_positions": torch.arange(4)}, ValueError, ["cache_positions", "got both"]),
    "a slot that is not there": ({"slots": torch.tensor([[0, 1, 2, 3], [4, 5, 12, 7]])}, IndexError,
                                 ["slots must be below 12", "got 12 for token 2 of sequence 1"]),
    "unknown pairing": ({"pairing": "pairs"}, ValueError, ["pairing must be one of halves, interleaved", "'pairs'"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "texts"), WRONG.values(), ids=WRONG.keys())
def test_errors(changes, error, texts):
    arguments = {**good_call(), **changes}
    assert_refused_untouched(mrrope.qk_norm_rotary_and_cache_, arguments, error, *texts)


def test_the_good_call_is_good():
    mrrope.qk_norm_rotary_and_cache_(**good_call())
    mrrope.qk_norm_rotary_and_cache_(**good_call() | {"gate": ones(2, 3, 4, 8), **Q8, "q_scale": ones(3)})
    mrrope.qk_norm_rotary_and_cache_(**good_call() | {**Q8, "q_scale_out": ones(2, 3, 4)})


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_scales_have_the_layout_of_q(device, layout):
    Call(Case(layout=layout, tokens=7), Options(q_out=torch.float8_e4m3fn, q_scale="computed"), device).run_and_check()
