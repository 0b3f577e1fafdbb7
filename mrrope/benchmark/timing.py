"""How time is taken: medians after a warm-up, over buffers that together do not fit the cache, without launch gaps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

Step = Callable[[], object]

CACHE_BYTES = 60 * 2**20  # an H200's second-level cache
REPLAYS = 15


def buffer_sets(bytes_per_set: int, device: str) -> int:
    """How many sets of buffers to rotate through so that each is out of the cache when its turn comes."""
    if device == "cpu":
        return 1
    return max(3, min(400, 4 * CACHE_BYTES // max(bytes_per_set, 1) + 1))


def median_seconds(steps: Sequence[Step], device: str) -> float:
    """The median time of one step; the steps do the same work on different buffers."""
    return _median_on_cuda(steps) if device == "cuda" else _median_on_cpu(steps[0])


def _median_on_cpu(step: Step) -> float:
    times = []
    step()
    step()
    for _ in range(REPLAYS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPLAYS // 2]


def _median_on_cuda(steps: Sequence[Step]) -> float:
    _replay_a_first_graph()
    return sorted(_replay_times(steps))[REPLAYS // 2]


@functools.cache
def _replay_a_first_graph() -> None:
    """In vain: the first of a process replays up to a sixth faster than any later one, with the same work or other.
    On an H200 a copy for one token takes 0.89 us there, and 1.07 us ever after."""
    x = torch.zeros(2**16, device="cuda")
    _replay_times([lambda: x.copy_(x.roll(1))] * 200)


def _replay_times(steps: Sequence[Step]) -> list[float]:
    """Of one step, replay by replay."""
    # A graph of all the steps: kernels follow each other as in a captured decoder, and Python's time stays out.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            steps[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times: list[float] = []
    for replay in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e-3 / len(steps))
    return times
