"""What a call costs before anything is computed: from Python to the launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mrrope.benchmark.cases import Case, Heads, Positions
from mrrope.benchmark.contenders import OURS, Contender

CALLS, ROUNDS = 200, 15


def elementwise(heads: Heads) -> object:
    """As little as torch itself does: one launch, in place."""
    return heads.q.mul_(1.0)


def seconds_a_call(call: Callable[[], object], device: str) -> float:
    """The host's, with the device far from busy; the median of several rounds."""
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
    """By contender, rotating one token. On a CPU, where nothing is launched, that is with the work itself."""
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
