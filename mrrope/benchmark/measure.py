"""Times and errors, case by case."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from mrrope.benchmark.cases import Case, Heads, Positions
from mrrope.benchmark.contenders import COPIES, Contender
from mrrope.benchmark.timing import Step, Turns, buffer_sets, with_faster_copy
from mrrope.reporting.optional_packages import needs

TOKENS_COMPARED = 256
TEXT_BEFORE = 8192
"""Tokens of a text that a case of fewer goes on with: at the first position nothing turns."""


def steps_of(contender: Contender, sets: list[Heads]) -> list[Step]:
    return [lambda heads=heads: contender.rotate(heads) for heads in sets]  # type: ignore[misc]


def without_folders(text: str) -> str:
    """Files by their names alone: where they lie is nobody's business."""
    return re.sub(r"(?:/[^\s/:]+)+/([^\s/:]+)", r"\1", text)


def relative_error(case: Case, contender: Contender, device: str) -> float:
    """Of q, against float64 with exact phases, over the last tokens of the case, or of a text that it goes on with."""
    tokens = min(case.tokens, TOKENS_COMPARED)
    shared = Positions(replace(case, tokens=tokens), device, first=max(case.tokens, TEXT_BEFORE) - tokens)
    heads = Heads(shared.case, shared)
    phases = (shared.positions[:, None] * shared.table.turns.to(device)).double() * (math.tau / 2**64)
    direction = -1.0 if case.backward else 1.0
    want = exact(heads.by_head(heads.q).double(), phases.cos(), direction * phases.sin(), case)
    got = contender.rotate(heads)[0].double()
    return float((got - want).norm() / want.norm())


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, case: Case) -> torch.Tensor:
    """The rotation written out; x is [1, heads, tokens, head_dim], cos and sin [tokens, rotary_dim / 2]."""
    turning, rest = x[..., : case.rotary_dim], x[..., case.rotary_dim :]
    if case.pairing == "halves":
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def measure(cases: Sequence[Case], contenders: Sequence[Contender], device: str) -> Iterator[dict[str, Any]]:
    """A row for every case, as soon as it is there: seconds and errors by contender."""
    with needs("tqdm"):
        from tqdm import tqdm

    work = [(case, [one for one in contenders if one.takes(case)]) for case in cases]
    with tqdm(total=sum(len(taking) for _, taking in work), desc="rotary", unit="timing") as progress:
        for case, taking in work:
            shared = Positions(case, device)
            sets = [Heads(case, shared) for _ in range(buffer_sets(case.bytes, device))]
            torch.compiler.reset()  # every case is compiled for its own shape
            turns = Turns(device)
            for copy in COPIES:
                turns.add(copy.name, steps_of(copy, sets))
            errors, failures = {}, {}
            for contender in taking:
                progress.set_postfix_str(f"{case.name}, {contender.name}")
                try:
                    off = relative_error(case, contender, device)
                    turns.add(contender.name, steps_of(contender, sets))
                    errors[contender.name] = off
                except Exception as error:  # somebody else's op, perhaps for another version of torch
                    if contender.name.startswith("mrrope"):
                        raise
                    failures[contender.name] = f"{type(error).__name__}: {without_folders(str(error))}"
                progress.update()
            seconds = with_faster_copy(turns.medians())
            row = {**asdict(case), "name": case.name, "bytes": case.bytes, "seconds": seconds, "errors": errors}
            yield row | ({"failures": failures} if failures else {})
