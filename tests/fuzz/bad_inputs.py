"""Calls with one argument spoiled: they must raise an error that names it, and leave every tensor as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from fuzz.attempts import Attempt
from fuzz.exact import bits
from fuzz.memory import copied, storages, tensors_of
from fuzz.op_cases import OpCase

REFUSALS = (TypeError, ValueError, IndexError, RuntimeError)


def longer(x: torch.Tensor) -> torch.Tensor:
    """One element more, in the last dimension."""
    return torch.cat([x, x[..., :1]], dim=-1) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """The last dimension in steps of two."""
    return torch.stack([x, x], dim=-1)[..., 0]


def beyond(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 2**31 - 1)


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16)


# By argument: what is done to it. Faults of arguments that a call does not have, or has as None, are not drawn for it.
CHANGES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "q": {"integers": lambda x: x.long(), "a dimension more": lambda x: x[None], "a list": list, "gaps": with_gaps},
    "k": {"another dtype": other_dtype, "a dimension less": lambda x: x.flatten(0, 1), "more components": longer,
          "gaps": with_gaps, "a string": str},
    "v": {"another dtype": other_dtype, "more components": longer, "nothing": lambda x: None},
    "x": {"a dimension more": lambda x: x[None], "another dtype": other_dtype, "more inputs": longer},
    "weight": {"another dtype": other_dtype, "more inputs": longer},
    "bias": {"more": longer, "a number": lambda x: 1.0},
    "num_q_heads": {"none": lambda n: 0, "negative": lambda n: -1, "a half": lambda n: n + 0.5},
    "keys": {"nothing": lambda x: [], "integers": lambda x: [x[0].int()],
             "a dimension less": lambda x: [x[0].flatten(0, 1)], "gaps": lambda x: [with_gaps(x[0])],
             "the same twice": lambda x: [x[0], x[0]]},
    "positions": {"floats": lambda x: x.float(), "one too many": longer, "a list": lambda x: x.tolist(),
                  "two dimensions too many": lambda x: x[None, None, None], "elsewhere": lambda x: x.to("meta")},
    "table": {"a name": lambda t: "yarn", "nothing": lambda t: None, "no tables": lambda t: []},
    "old": {"a name": lambda t: "yarn", "too many": lambda t: ([t] if not isinstance(t, list) else t) * 9},
    "new": {"nothing": lambda t: None, "too many": lambda t: ([t] if not isinstance(t, list) else t) * 9},
    "blocks": {"int32": lambda x: x.int(), "beyond": beyond, "negative": lambda x: x - 2**20},
    "table_index": {"int64": lambda x: x.long(), "one too many": longer, "beyond": beyond,
                    "negative": lambda x: x - 2**20, "a list": lambda x: x.tolist()},
    "layout": {"unknown": lambda _: "hbsd", "empty": lambda _: ""},
    "pairing": {"unknown": lambda _: "neighbours"},
    "cache_layout": {"unknown": lambda _: "bhsd"},
    "over": {"unknown": lambda _: "token"},
    "eps": {"negative": lambda _: -1e-6, "not a number": lambda _: float("nan")},
    "weight_offset": {"infinite": lambda _: float("inf")},
    "q_weight": {"another dtype": other_dtype, "more": longer, "a dimension more": lambda x: x[None]},
    "k_weight": {"another dtype": other_dtype, "nothing": lambda x: None, "more": longer},
    "slots": {"floats": lambda x: x.float(), "beyond": beyond, "one too many": longer},
    "cache_positions": {"floats": lambda x: x.float(), "beyond": beyond, "one too many": longer},
    "key_cache": {"another dtype": lambda x: x.to(torch.int16), "more components": longer, "gaps": with_gaps,
                  "a block less": lambda x: x[:0]},
    "value_cache": {"another dtype": lambda x: x.to(torch.int16), "more components": longer,
                    "one block for all": lambda x: x[:1].expand(x.shape)},
    "key_scale": {"zero": torch.zeros_like, "float64": lambda x: x.double(), "infinite": lambda x: x / 0.0,
                  "too many": lambda x: x.reshape(-1)[:1].repeat(99)},
    "q_out": {"another dtype": other_dtype, "more components": longer},
}  # fmt: skip
FAULTS = [f"{name}: {what}" for name, changes in CHANGES.items() for what in changes]
# Nobody looks at these values on a GPU before they are used.
UNSEEN_ON_GPU = {"table_index: beyond", "table_index: negative", "slots: beyond", "cache_positions: beyond",
                 "key_scale: zero", "key_scale: infinite", "blocks: beyond", "blocks: negative"}  # fmt: skip


def is_harmless(case: OpCase, fault: str, given: Any) -> bool:
    """Whether this call is right in spite of the fault, or does not have what it is about."""
    what = fault.partition(": ")[2]
    nothing_there = isinstance(given, torch.Tensor) and given.numel() == 0
    if case.device != "cpu" and fault in UNSEEN_ON_GPU:
        return True
    if case.op == "rescale_cache_" and case.sequences * case.tokens == 0:
        return True  # there is nothing to turn, whatever else is given
    if case.blocks and what == "gaps":
        return True  # blocks are copied, turned and copied back
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
            nothing_there = given[0].numel() == 0
        return nothing_there or (what == "one block for all" and given.shape[0] <= 1)
    return False


def refusal(case: OpCase, attempt: Attempt) -> tuple[str, bool]:
    """What is wrong with how the call refuses its fault, and whether anything is."""
    name, _, what = case.fault.partition(": ")
    arguments = attempt.arguments
    given = arguments.get(name)
    if given is None or getattr(attempt, "is_raw", False) or is_harmless(case, case.fault, given):
        return "nothing to refuse", False
    spoiled = arguments | {name: CHANGES[name][what](given)}
    spoiled.pop("gradients", None)
    before = copied(spoiled)
    versions = {key: x._version for key, x in tensors_of(spoiled).items()}
    try:
        attempt.invoke(spoiled)
    except REFUSALS as error:
        text = str(error)
        if not re.search(rf"(?<![a-z_]){name}(?![a-z_])", text):
            return f"does not name the argument in its error for {case.fault}: {text.splitlines()[0][:160]}", True
    except Exception as error:
        return f"raises {type(error).__name__} for {case.fault}: {error}", True
    else:
        return f"takes {case.fault}", True
    if any(x._version != versions[key] for key, x in tensors_of(spoiled).items()):
        return f"counts a tensor as written though it refused {case.fault}", True
    changed = [key for key, now, was in storages(spoiled, before) if not now.is_meta and not bits(now).equal(bits(was))]
    return f"wrote to {changed} though it refused {case.fault}", bool(changed)
