"""Fuzzing campaigns: draw cases until the time is up, shrink failures and report."""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fuzz import op_checks
from fuzz.shrinking import CaseError, reproduction_script, shrink

PROGRESS_EVERY = 10.0
BATCH = {"cpu": 32, "cuda": 256}  # on a GPU results are read once per batch
# Failures of one kind are shrunk for this many groups and only counted for the others.
MAX_SHRUNK_GROUPS = 6


@dataclass
class Campaign:
    """A campaign over one kind of cases.

    Attributes:
        draw: Returns a random case.
        group: Returns the name that a case is counted under.
        failures_in: Returns the failure of each case, or None.
        folder: Where scripts go that reproduce failures.
        batch: Number of cases per call of ``failures_in``.
    """

    name: str
    draw: Callable[[random.Random], Any]
    group: Callable[[Any], str]
    failures_in: Callable[[list[Any]], Sequence[CaseError | None]]
    folder: Path
    batch: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    finds: dict[str, Counter[str]] = field(default_factory=dict)
    scripts: dict[str, list[str]] = field(default_factory=dict)

    def run(self, seed: int | str, seconds: float, most: int | None = None) -> dict[str, Any]:
        """Run for a duration or a number of cases and return counts and failures, ready for JSON."""
        rng, start, reported = random.Random(f"{self.name} {seed}"), time.monotonic(), 0.0
        while (elapsed := time.monotonic() - start) < seconds and (most is None or self.counts.total() < most):
            size = self.batch if most is None else min(self.batch, most - self.counts.total())
            cases = [self.draw(rng) for _ in range(size)]
            try:
                failures = self.failures_in(cases)
            except torch.AcceleratorError:
                # A CUDA error is sticky, and any case of the batch may be the cause.
                self.save("lost-device.txt", "\n".join(map(repr, cases)) + "\n")
                raise
            for case, failure in zip(cases, failures, strict=True):
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
            "finds": [
                {"failure": kind, "count": by.total(), "by": dict(by), "scripts": self.scripts[kind]}
                for kind, by in self.finds.items()
            ],
        }

    def report(self, elapsed: float) -> None:
        counted, found = self.counts.total(), sum(by.total() for by in self.finds.values())
        print(f"{self.name}: {counted} cases in {elapsed:.0f} s, {found} fail", file=sys.stderr, flush=True)

    def record(self, case: Any, failure: CaseError) -> None:
        """Count a failure; shrink the first of its group to a script."""
        by = self.finds.setdefault(failure.kind, Counter())
        by[self.group(case)] += 1
        scripts = self.scripts.setdefault(failure.kind, [])
        if by[self.group(case)] > 1 or len(by) > MAX_SHRUNK_GROUPS:
            return
        smallest = shrink(case, lambda case: self.failures_in([case])[0])
        script = reproduction_script(smallest, self.failures_in([smallest])[0] or failure)
        if script in scripts:
            return
        scripts.append(script)
        self.save(f"{self.name}-{sum(map(len, self.scripts.values()))}.py", script)

    def save(self, name: str, text: str) -> None:
        """Print a text and save it in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)
        print(f"\n{self.folder / name}:\n{text}", file=sys.stderr, flush=True)


def campaign_for(name: str, device: str, folder: Path) -> Campaign:
    """Return the campaign named "ops" or "models"."""
    if name == "ops":
        draw, group = (lambda rng: op_checks.random_case(rng, device)), (lambda case: case.op)
        return Campaign(name, draw, group, op_checks.failures_in, folder, batch=BATCH[device])
    import transformers  # takes seconds

    from fuzz import model_checks

    transformers.logging.set_verbosity_error()
    return Campaign(
        name,
        lambda rng: model_checks.random_case(rng, device),
        lambda case: case.family,
        model_checks.failures_in,
        folder,
    )


def run_shard(name: str, shard: int, options: Namespace) -> dict[str, Any]:
    """Run one campaign in this process."""
    torch.set_num_threads(1)
    most = None if options.cases is None else -(-options.cases // options.processes)
    folder = options.finds if options.processes == 1 else options.finds / str(shard)
    return campaign_for(name, options.device, folder).run(f"{options.seed} {shard}", options.seconds, most)


def merged_results(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of several processes."""
    by: Counter[str] = Counter()
    finds: dict[str, dict[str, Any]] = {}
    for part in parts:
        by.update(part["by"])
        for find in part["finds"]:
            same = finds.setdefault(find["failure"], {"failure": find["failure"], "count": 0, "by": {}, "scripts": []})
            same["count"] += find["count"]
            same["by"] = dict(Counter(same["by"]) + Counter(find["by"]))
            same["scripts"] += [script for script in find["scripts"] if script not in same["scripts"]]
    return {
        "cases": sum(part["cases"] for part in parts),
        "processes": len(parts),
        "seconds": max(part["seconds"] for part in parts),
        "by": dict(sorted(by.items())),
        "finds": list(finds.values()),
    }
