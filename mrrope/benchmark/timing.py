"""How time is taken: medians after a warm-up, over buffers that together do not fit the cache, without launch gaps."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Step = Callable[[], object]

CACHE_BYTES = 60 * 2**20  # an H200's second-level cache
REPLAYS = 15
SECONDS_TO_SETTLE = 0.1
COPY, COPY_BY_KERNEL = "copy", "copy by a kernel"


def buffer_sets(bytes_per_set: int, device: str) -> int:
    """How many sets of buffers to rotate through so that each is out of the cache when its turn comes."""
    if device == "cpu":
        return 1
    return max(3, min(400, 4 * CACHE_BYTES // max(bytes_per_set, 1) + 1))


class Turns:
    """Contenders that take turns, so that all see the same clocks: a GPU slows down as it warms."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self._replays: dict[str, Step] = {}
        self._steps: dict[str, int] = {}
        self._pool: Any = None
        if device == "cuda":
            _replay_a_first_graph()
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def names(self) -> list[str]:
        return list(self._replays)

    def add(self, name: str, steps: Sequence[Step]) -> None:
        """The steps do the same work on different buffers. What cannot be run fails here, and the others go on."""
        if self.device == "cuda":
            try:
                self._replays[name] = _graph_of(steps, self._pool)
            except Exception:
                self._pool = torch.cuda.graph_pool_handle()  # torch lets nobody else use that of a broken capture
                raise
        else:
            steps[0]()
            self._replays[name] = lambda: [step() for step in steps]
        self._steps[name] = len(steps)
        self.seconds[name] = []

    def drop(self, name: str) -> None:
        for known in (self._replays, self._steps, self.seconds):
            known.pop(name)

    def settle(self, seconds: float) -> None:
        """Lets all run untimed for so long: until caches are warm, and the clocks those of a GPU at work."""
        until = time.monotonic() + seconds
        while True:
            for replay in self._replays.values():
                replay()
            if self.device == "cuda":
                torch.cuda.synchronize()
            if time.monotonic() >= until:
                return

    def take(self, turns: int) -> None:
        """Every contender so many times, in an order that changes: whoever follows a cool one is faster."""
        for turn in range(turns):
            for name in self.names if turn % 2 else reversed(self.names):
                self.seconds[name].append(self._time(name))

    def _time(self, name: str) -> float:
        if self.device == "cpu":
            before = time.perf_counter()
            self._replays[name]()
            return (time.perf_counter() - before) / self._steps[name]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._replays[name]()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / self._steps[name]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def medians(self) -> dict[str, float]:
        """Seconds of one step, by contender, after a warm-up."""
        self.settle(SECONDS_TO_SETTLE)
        self.take(REPLAYS)
        return {name: self.median(name) for name in self.names}

    def ratio(self, name: str, to: str) -> float:
        """Of those turns that both took; a contender that was dropped and added anew starts later."""
        return statistics.median(a / b for a, b in zip(self.seconds[name][::-1], self.seconds[to][::-1], strict=False))


def medians_in_turns(contenders: Mapping[str, Sequence[Step]], device: str) -> dict[str, float]:
    """Seconds of one step, by contender."""
    turns = Turns(device)
    for name, steps in contenders.items():
        turns.add(name, steps)
    return turns.medians()


def with_faster_copy(seconds: Mapping[str, float]) -> dict[str, float]:
    """One copy for two: the driver's is slow for more than a gigabyte."""
    others = {name: time for name, time in seconds.items() if name not in (COPY, COPY_BY_KERNEL)}
    return {COPY: min(seconds[COPY], seconds[COPY_BY_KERNEL]), **others}


@functools.cache
def _replay_a_first_graph() -> None:
    """In vain: the first of a process replays up to a sixth faster than any later one, with the same work or other.
    On an H200 a copy for one token takes 0.89 us there, and 1.07 us ever after."""
    x = torch.zeros(2**16, device="cuda")
    replay = _graph_of([lambda: x.copy_(x.roll(1))] * 200, torch.cuda.graph_pool_handle())
    for _ in range(REPLAYS):
        replay()
    torch.cuda.synchronize()


def _graph_of(steps: Sequence[Step], pool: Any) -> Step:
    """All the steps in a graph: kernels follow each other as in a captured decoder, and Python's time stays out."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            steps[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        # Held until all are captured, or each would write where the one before it did, and still has in the cache.
        results = [step() for step in steps]
    del results
    return graph.replay
