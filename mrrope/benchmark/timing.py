"""Interleaved timing: medians after a warm-up, over buffers that exceed L2, by CUDA-graph replay on GPUs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Step = Callable[[], object]
Copies = tuple[torch.Tensor, torch.Tensor]

L2_BYTES = 60 * 2**20  # H200
REPLAYS = 15
WARM_UP_SECONDS = 0.1
COPY, COPY_BY_KERNEL = "copy", "copy by a kernel"


def buffer_sets(bytes_per_set: int, device: str) -> int:
    """Number of buffer sets to rotate through so that each is evicted from L2 before it is used again."""
    if device == "cpu":
        return 1
    return max(3, min(400, 4 * L2_BYTES // max(bytes_per_set, 1) + 1))


class InterleavedTimer:
    """Times contenders round-robin, so that all see the same clocks: a GPU slows down as it warms."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self._replays: dict[str, Step] = {}
        self._steps: dict[str, int] = {}
        self._pool: Any = None
        if device == "cuda":
            _discard_first_graph()
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def names(self) -> list[str]:
        return list(self._replays)

    def add(self, name: str, steps: Sequence[Step]) -> None:
        """Add a contender whose steps do the same work on different buffers.

        A step that cannot run raises here, and the other contenders are unaffected.
        """
        if self.device == "cuda":
            try:
                self._replays[name] = _capture(steps, self._pool)
            except Exception:
                # torch refuses further captures to the pool of a broken one.
                self._pool = torch.cuda.graph_pool_handle()
                raise
        else:
            steps[0]()
            self._replays[name] = lambda: [step() for step in steps]
        self._steps[name] = len(steps)
        self.seconds[name] = []

    def drop(self, name: str) -> None:
        for known in (self._replays, self._steps, self.seconds):
            known.pop(name)

    def warm_up(self, seconds: float) -> None:
        """Run all contenders untimed until caches are warm and the GPU runs at its clocks under load."""
        until = time.monotonic() + seconds
        while True:
            for replay in self._replays.values():
                replay()
            if self.device == "cuda":
                torch.cuda.synchronize()
            if time.monotonic() >= until:
                return

    def run_rounds(self, rounds: int) -> None:
        """Time every contender once per round; the order alternates, since one that follows a light load is faster."""
        for number in range(rounds):
            for name in self.names if number % 2 else reversed(self.names):
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
        """Median seconds per step of each contender, after a warm-up."""
        self.warm_up(WARM_UP_SECONDS)
        self.run_rounds(REPLAYS)
        return {name: self.median(name) for name in self.names}

    def ratio(self, name: str, to: str) -> float:
        """Median of the ratios within the rounds that both ran; a contender that was added later has fewer."""
        return statistics.median(a / b for a, b in zip(self.seconds[name][::-1], self.seconds[to][::-1], strict=False))


def interleaved_medians(contenders: Mapping[str, Sequence[Step]], device: str) -> dict[str, float]:
    """Median seconds per step of each contender."""
    timer = InterleavedTimer(device)
    for name, steps in contenders.items():
        timer.add(name, steps)
    return timer.medians()


def copy_buffers(bytes_moved: int, device: str | torch.device) -> Copies:
    """Destination and source of a copy that reads and writes ``bytes_moved`` in all."""
    size = bytes_moved // 8 * 4  # whole int32 elements
    destination, source = (torch.ones(size, device=device, dtype=torch.uint8) for _ in range(2))
    return destination, source


def copy_steps(buffers: Sequence[Sequence[Copies]]) -> dict[str, list[Step]]:
    """The driver's copy and a kernel's, one step per set of buffers; a set may have several copies to make."""

    def by_driver(copies: Sequence[Copies]) -> None:
        for destination, source in copies:
            destination.copy_(source)

    def by_kernel(copies: Sequence[Copies]) -> None:
        for destination, source in copies:
            torch.bitwise_not(source.view(torch.int32), out=destination.view(torch.int32))

    return {
        COPY: [functools.partial(by_driver, copies) for copies in buffers],
        COPY_BY_KERNEL: [functools.partial(by_kernel, copies) for copies in buffers],
    }


def with_faster_copy(seconds: Mapping[str, float]) -> dict[str, float]:
    """Keep the faster of the two copies: the driver's is slow beyond a gigabyte."""
    others = {name: time for name, time in seconds.items() if name not in (COPY, COPY_BY_KERNEL)}
    return {COPY: min(seconds[COPY], seconds[COPY_BY_KERNEL]), **others}


@functools.cache
def _discard_first_graph() -> None:
    """Replay and discard a graph: the first graph of a process replays up to a sixth faster than all later ones.

    On an H200 a one-token copy takes 0.89 us in the first graph and 1.07 us in any other.
    """
    x = torch.zeros(2**16, device="cuda")
    replay = _capture([lambda: x.copy_(x.roll(1))] * 200, torch.cuda.graph_pool_handle())
    for _ in range(REPLAYS):
        replay()
    torch.cuda.synchronize()


def _capture(steps: Sequence[Step], pool: Any) -> Step:
    """Capture all steps in one graph: kernels run back to back, and host time is excluded."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            steps[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        # Outputs are held until the capture ends; otherwise steps would reuse one output buffer, which stays in L2.
        results = [step() for step in steps]
    del results
    return graph.replay
