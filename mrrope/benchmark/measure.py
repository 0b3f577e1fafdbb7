"""Time and error of every contender, case by case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from mrrope.benchmark import baseline
from mrrope.benchmark.implementations import Contender
from mrrope.benchmark.timing import InterleavedTimer, Step, buffer_sets, copy_steps, with_faster_copy
from mrrope.benchmark.workloads import Case, Heads, Positions
from mrrope.reporting.optional_packages import progress_bar

TOKENS_COMPARED = 256
CONTEXT_BEFORE = 8192
"""Errors are taken at this position or later: at position 0 the rotation is the identity."""


def steps_of(contender: Contender, sets: list[Heads]) -> list[Step]:
    return [lambda heads=heads: contender.rotate(heads) for heads in sets]  # type: ignore[misc]


def without_folders(text: str) -> str:
    """Reduce paths in a message to file names: a results file names no folders of the machine."""
    return re.sub(r"(?:/[^\s/:]+)+/([^\s/:]+)", r"\1", text)


def relative_error(case: Case, contender: Contender, device: str) -> float:
    """Relative error of q against float64 with 64-bit phases, over the last ``TOKENS_COMPARED`` tokens."""
    tokens = min(case.tokens, TOKENS_COMPARED)
    shared = Positions(replace(case, tokens=tokens), device, first=max(case.tokens, CONTEXT_BEFORE) - tokens)
    heads = Heads(shared.case, shared)
    phases = baseline.exact_phases(shared.positions, shared.table)
    sin = phases.sin() * (-1.0 if case.backward else 1.0)
    want = baseline.exact_rotary(heads.by_head(heads.q).double(), phases.cos(), sin, case.pairing)
    return baseline.relative_error(contender.rotate(heads)[0], want)


def measure(cases: Sequence[Case], contenders: Sequence[Contender], device: str) -> Iterator[dict[str, Any]]:
    """Yield one row per case: seconds and errors by contender."""
    work = [(case, [one for one in contenders if one.takes(case)]) for case in cases]
    with progress_bar(total=sum(len(taking) for _, taking in work), desc="rotary", unit="timing") as progress:
        for case, taking in work:
            shared = Positions(case, device)
            sets = [Heads(case, shared) for _ in range(buffer_sets(case.bytes, device))]
            torch.compiler.reset()  # compile anew for the shape of this case
            timer = InterleavedTimer(device)
            for name, steps in copy_steps([[heads.copies] for heads in sets]).items():
                timer.add(name, steps)
            errors, failures = {}, {}
            for contender in taking:
                progress.set_postfix_str(f"{case.name}, {contender.name}")
                try:
                    error = relative_error(case, contender, device)
                    timer.add(contender.name, steps_of(contender, sets))
                    errors[contender.name] = error
                except Exception as failure:  # a peer may be built for another torch, or run out of memory
                    if contender.name.startswith("mrrope"):
                        raise
                    failures[contender.name] = f"{type(failure).__name__}: {without_folders(str(failure))}"
                progress.update()
            seconds = with_faster_copy(timer.medians())
            row = {**asdict(case), "name": case.name, "bytes": case.bytes, "seconds": seconds, "errors": errors}
            yield row | ({"failures": failures} if failures else {})
