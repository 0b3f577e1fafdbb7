"""Host overhead of a call: from Python to the kernel launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mrrope.benchmark.implementations import OURS, Contender
from mrrope.benchmark.workloads import Case, Heads, Positions

CALLS, ROUNDS = 200, 15


def elementwise(heads: Heads) -> object:
    """One in-place elementwise launch: torch's own minimum."""
    return heads.q.mul_(1.0)


def seconds_a_call(call: Callable[[], object], device: str) -> float:
    """Median host seconds per call, with an idle device."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def host_seconds(peers: Sequence[Contender], device: str) -> dict[str, float]:
    """Host seconds per contender for one token; on a CPU, which launches nothing, the work is included."""
    case = Case(1)
    heads = Heads(case, Positions(case, device))
    seconds = {}
    with torch.no_grad():
        for one in (Contender("torch, mul_", elementwise), *OURS[:2], *peers):
            try:
                seconds[one.name] = seconds_a_call(lambda one=one: one.rotate(heads), device)  # type: ignore[misc]
            except Exception:
                if one not in peers:
                    raise
    return seconds
