"""Drawing cases until the time is over, shrinking those that fail, and telling what was done."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.shrinking import Failure, script_of, shrink

PROGRESS_EVERY = 10.0
# Failures of one kind are shrunk this often; more of them are only counted.
SHRUNK = 2


@dataclass
class Campaign:
    """One kind of cases: how to draw them, what they are counted by, and what goes wrong in some of them."""

    name: str
    draw: Callable[[random.Random], Any]
    group: Callable[[Any], str]
    failures_in: Callable[[list[Any]], Sequence[Failure | None]]
    folder: Path
    batch: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    finds: Counter[str] = field(default_factory=Counter)
    scripts: dict[str, list[str]] = field(default_factory=dict)

    def run(self, seed: int, seconds: float, most: int | None = None) -> dict[str, Any]:
        """Fuzzes for so long, or so many cases; what was done and found, ready for JSON."""
        rng, start, reported = random.Random(f"{self.name} {seed}"), time.monotonic(), 0.0
        while (elapsed := time.monotonic() - start) < seconds and (most is None or self.counts.total() < most):
            size = self.batch if most is None else min(self.batch, most - self.counts.total())
            cases = [self.draw(rng) for _ in range(size)]
            for case, failure in zip(cases, self.failures_in(cases), strict=True):
                self.counts[self.group(case)] += 1
                if failure is not None:
                    self.record(case, failure)
            if elapsed - reported > PROGRESS_EVERY:
                reported = elapsed
                self.report(elapsed)
        self.report(time.monotonic() - start)
        return {
            "cases": self.counts.total(),
            "seconds": round(time.monotonic() - start, 1),
            "by": dict(sorted(self.counts.items())),
            "finds": [{"failure": kind, "count": n, "scripts": self.scripts[kind]} for kind, n in self.finds.items()],
        }

    def report(self, elapsed: float) -> None:
        counted, found = self.counts.total(), self.finds.total()
        print(f"{self.name}: {counted} cases in {elapsed:.0f} s, {found} fail", file=sys.stderr, flush=True)

    def record(self, case: Any, failure: Failure) -> None:
        """Shrinks a failure to a script, prints it and keeps it in the folder."""
        self.finds[failure.kind] += 1
        scripts = self.scripts.setdefault(failure.kind, [])
        if self.finds[failure.kind] > SHRUNK:
            return
        smallest = shrink(case, lambda case: self.failures_in([case])[0])
        script = script_of(smallest, self.failures_in([smallest])[0] or failure)
        if script in scripts:
            return
        scripts.append(script)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}-{sum(map(len, self.scripts.values()))}.py"
        path.write_text(script)
        print(f"\n{path}:\n{script}", file=sys.stderr, flush=True)
