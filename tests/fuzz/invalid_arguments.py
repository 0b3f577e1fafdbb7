"""Calls with one invalid argument: they must raise an error that names it and leave every tensor unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from fuzz.call_memory import cloned, storages_now_and_before, tensors_by_name
from fuzz.float64_reference import as_integers
from fuzz.op_call import Arguments, OpCall
from fuzz.op_cases import OpCase

ARGUMENT_ERRORS = (TypeError, ValueError, IndexError, RuntimeError)


def longer(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one element more in the last dimension."""
    return torch.cat([x, x[..., :1]], dim=-1) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def with_stride_two(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with stride 2 in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0]


def out_of_range(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 2**31 - 1)


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16)


# Faults by argument: description and change. A fault of an argument that a call lacks, or has as None, is skipped.
CHANGES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "q": {"integers": lambda x: x.long(), "a dimension more": lambda x: x[None], "a list": list,
          "gaps": with_stride_two},
    "k": {"another dtype": other_dtype, "a dimension less": lambda x: x.flatten(0, 1), "more components": longer,
          "gaps": with_stride_two, "a string": str},
    "v": {"another dtype": other_dtype, "more components": longer, "nothing": lambda x: None},
    "x": {"a dimension more": lambda x: x[None], "another dtype": other_dtype, "more inputs": longer},
    "weight": {"another dtype": other_dtype, "more inputs": longer},
    "bias": {"more": longer, "a number": lambda x: 1.0},
    "num_q_heads": {"none": lambda n: 0, "negative": lambda n: -1, "a half": lambda n: n + 0.5},
    "keys": {"nothing": lambda x: [], "integers": lambda x: [x[0].int()],
             "a dimension less": lambda x: [x[0].flatten(0, 1)], "gaps": lambda x: [with_stride_two(x[0])],
             "the same twice": lambda x: [x[0], x[0]]},
    "positions": {"floats": lambda x: x.float(), "one too many": longer, "a list": lambda x: x.tolist(),
                  "two dimensions too many": lambda x: x[None, None, None], "elsewhere": lambda x: x.to("meta")},
    "table": {"a name": lambda t: "yarn", "nothing": lambda t: None, "no tables": lambda t: []},
    "cos": {"another dtype": other_dtype, "integers": lambda x: x.long(), "more columns": longer,
            "gaps": with_stride_two, "a dimension more": lambda x: x[None, None], "a list": lambda x: x.tolist(),
            "elsewhere": lambda x: x.to("meta")},
    "sin": {"another dtype": other_dtype, "more columns": longer, "gaps": with_stride_two, "a number": lambda _: 1.0,
            "nothing": lambda _: None},
    "rotary_dim": {"odd": lambda n: n + 1, "negative": lambda n: -n, "none": lambda _: 0, "too many": lambda _: 2**31,
                   "a half": lambda n: n + 0.5},
    "frequencies": {"integers": lambda x: x.long(), "a dimension less": lambda x: x[0], "a list": lambda x: x.tolist(),
                    "no tables": lambda x: x[:0], "elsewhere": lambda x: x.to("meta")},
    "attention_factor": {"half": lambda x: x.half(), "a dimension more": lambda x: x[None], "a number": lambda _: 1.0,
                         "too many": lambda x: x[:1].repeat(99)},
    "old": {"a name": lambda t: "yarn", "too many": lambda t: ([t] if not isinstance(t, list) else t) * 9},
    "new": {"nothing": lambda t: None, "too many": lambda t: ([t] if not isinstance(t, list) else t) * 9},
    "blocks": {"int32": lambda x: x.int(), "beyond": out_of_range, "negative": lambda x: x - 2**20},
    "table_index": {"int64": lambda x: x.long(), "one too many": longer, "beyond": out_of_range,
                    "negative": lambda x: x - 2**20, "a list": lambda x: x.tolist()},
    "layout": {"unknown": lambda _: "hbsd", "empty": lambda _: ""},
    "pairing": {"unknown": lambda _: "neighbours"},
    "cache_layout": {"unknown": lambda _: "bhsd"},
    "over": {"unknown": lambda _: "token"},
    "eps": {"negative": lambda _: -1e-6, "not a number": lambda _: float("nan")},
    "weight_offset": {"infinite": lambda _: float("inf")},
    "q_weight": {"another dtype": other_dtype, "more": longer, "a dimension more": lambda x: x[None]},
    "k_weight": {"another dtype": other_dtype, "nothing": lambda x: None, "more": longer},
    "slots": {"floats": lambda x: x.float(), "beyond": out_of_range, "one too many": longer},
    "cache_positions": {"floats": lambda x: x.float(), "beyond": out_of_range, "one too many": longer},
    "key_cache": {"another dtype": lambda x: x.to(torch.int16), "more components": longer, "gaps": with_stride_two,
                  "a block less": lambda x: x[:0]},
    "value_cache": {"another dtype": lambda x: x.to(torch.int16), "more components": longer,
                    "one block for all": lambda x: x[:1].expand(x.shape)},
    "key_scale": {"zero": torch.zeros_like, "float64": lambda x: x.double(), "infinite": lambda x: x / 0.0,
                  "too many": lambda x: x.reshape(-1)[:1].repeat(99)},
    "gate": {"another dtype": other_dtype, "more components": longer, "gaps": with_stride_two,
             "a number": lambda _: 1.0},
    "q_scale": {"zero": torch.zeros_like, "float64": lambda x: x.double(),
                "too many": lambda x: x.reshape(-1)[:1].repeat(99)},
    "q_scale_out": {"float64": lambda x: x.double(), "more": longer},
    "q_rope": {"integers": lambda x: x.long(), "a dimension more": lambda x: x[None], "gaps": with_stride_two},
    "k_nope": {"another dtype": other_dtype, "more components": longer, "nothing": lambda x: None},
    "k_rope": {"another dtype": other_dtype, "more components": longer, "gaps": with_stride_two},
    "latent": {"another dtype": other_dtype, "a dimension more": lambda x: x[None], "gaps": with_stride_two},
    "cache": {"another dtype": lambda x: x.to(torch.int16), "more components": longer, "gaps": with_stride_two},
    "scale": {"zero": torch.zeros_like, "float64": lambda x: x.double(), "too many": lambda x: x.repeat(2)},
    "q_out": {"another dtype": other_dtype, "more components": longer},
}  # fmt: skip
FAULTS = [f"{name}: {what}" for name, changes in CHANGES.items() for what in changes]
# The ops do not check these values on a GPU: it would synchronize.
UNCHECKED_ON_GPU = {"table_index: beyond", "table_index: negative", "slots: beyond", "cache_positions: beyond",
                 "key_scale: zero", "key_scale: infinite", "q_scale: zero", "scale: zero", "blocks: beyond",
                 "blocks: negative"}  # fmt: skip


def is_still_valid(case: OpCase, fault: str, given: Any) -> bool:
    """Return whether the call is valid in spite of the fault."""
    what = fault.partition(": ")[2]
    is_empty = isinstance(given, torch.Tensor) and given.numel() == 0
    if case.device != "cpu" and fault in UNCHECKED_ON_GPU:
        return True
    if case.op == "rescale_cache_" and case.sequences * case.tokens == 0:
        return True  # without tokens there is nothing to rotate
    if case.op == "qk_norm_rotary_and_cache_" and fault == "k_weight: nothing":
        return True  # k is rotated only
    if fault == "q_out: another dtype" and other_dtype(given).dtype == case.torch_dtype:
        return True
    if what == "gaps" and isinstance(given, torch.Tensor) and given.shape[-1] == 1:
        return True  # one column has no gaps
    if case.blocks and what == "gaps":
        return True  # blocks are copied, rotated and copied back
    if what in (
        "beyond",
        "negative",
        "infinite",
        "zero",
        "gaps",
        "a block less",
        "one block for all",
        "the same twice",
    ):
        if isinstance(given, list):
            is_empty = given[0].numel() == 0
        return is_empty or (what == "one block for all" and given.shape[0] <= 1)
    return False


def rejection_failure(case: OpCase, call: OpCall) -> tuple[str, bool]:
    """Return what is wrong with how the call rejects its fault, and whether anything is."""
    name, _, what = case.fault.partition(": ")
    given = call.arguments.get(name)
    if given is None or getattr(call, "is_raw_op", False) or is_still_valid(case, case.fault, given):
        return "nothing to refuse", False
    invalid = call.arguments | {name: CHANGES[name][what](given)}
    invalid.pop("gradients", None)
    return refusal_failure(call, invalid, [name], case.fault)


def conflict_failure(case: OpCase, call: OpCall) -> tuple[str, bool]:
    """Return what is wrong with how the call rejects an argument that shares memory with the query it writes."""
    form = {"itself": "itself", "view": "as another view", "heads": "in part"}[case.alias_form]
    return refusal_failure(call, call.arguments, call.conflict(), f"{call.query} {form} as {call.alias}")


def refusal_failure(call: OpCall, invalid: Arguments, names: list[str], fault: str) -> tuple[str, bool]:
    """Return what is wrong with how a call refuses these arguments, which its error must name."""
    before = cloned(invalid)
    versions = {key: x._version for key, x in tensors_by_name(invalid).items()}
    try:
        call.run(invalid)
    except ARGUMENT_ERRORS as error:
        text = str(error)
        if not all(re.search(rf"(?<![a-z_]){name}(?![a-z_])", text) for name in names):
            return f"does not name the argument in its error for {fault}: {text.splitlines()[0][:160]}", True
    except Exception as error:
        return f"raises {type(error).__name__} for {fault}: {error}", True
    else:
        return f"takes {fault}", True
    if any(x._version != versions[key] for key, x in tensors_by_name(invalid).items()):
        return f"counts a tensor as written though it refused {fault}", True
    changed = [
        key
        for key, now, was in storages_now_and_before(invalid, before)
        if not now.is_meta and not as_integers(now).equal(as_integers(was))
    ]
    return f"wrote to {changed} though it refused {fault}", bool(changed)
