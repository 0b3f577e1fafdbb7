"""Random op calls in one process and random model runs in another; failures are shrunk to scripts."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import mrrope
from fuzz.campaign import merged_results, run_shard
from fuzz.shrinking import CaseError

MODULES = {"OpCase": "fuzz.op_cases", "ModelCase": "fuzz.model_cases"}
FINDS = Path(__file__).parents[2] / "build" / "fuzz"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    result.add_argument("--seconds", type=float, default=60.0, help="duration (default: 60)")
    result.add_argument("--cases", type=int, help="maximum number of cases of each kind")
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--seed", type=int, help="reproduces a run; random by default")
    result.add_argument("--only", choices=["ops", "models"], help="run one kind instead of both")
    result.add_argument("--processes", type=int, default=1, help="processes per kind (default: 1)")
    result.add_argument(
        "--finds", type=Path, default=FINDS, help="folder for scripts that reproduce failures (default: build/fuzz)"
    )
    result.add_argument("--output", type=Path, help="JSON file for counts and failures")
    result.add_argument("--replay", metavar="JSON", help="run one case, in the form printed in a script")
    return result


def replay(text: str) -> int:
    """Run one case from JSON and return the exit status."""
    fields = json.loads(text)
    kind = fields.pop("kind")
    case = getattr(importlib.import_module(MODULES[kind]), kind)(**fields)
    try:
        case.run()
    except CaseError as failure:
        print(f"{case}\nfails: {failure}")
        return 1
    print(f"{case}\npasses")
    return 0


def main() -> int:
    """Run the command line."""
    options = parser().parse_args()
    if options.replay is not None:
        return replay(options.replay)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    names = [name for name in ("ops", "models") if options.only in (None, name)]
    tasks = [(name, shard) for name in names for shard in range(options.processes)]
    if len(tasks) == 1:
        found = [run_shard(names[0], 0, options)]
    else:
        with ProcessPoolExecutor(len(tasks), multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(run_shard, *zip(*tasks, strict=True), [options] * len(tasks)))
    parts = {
        name: merged_results([part for (task, _), part in zip(tasks, found, strict=True) if task == name])
        for name in names
    }
    versions = {"mrrope": mrrope.__version__, "torch": torch.__version__}
    hardware = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    result = {"seed": options.seed, "device": options.device, "hardware": hardware, "versions": versions, **parts}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, part in parts.items():
        print(f"{name}: {part['cases']} cases in {part['seconds']:.0f} s, {len(part['finds'])} kinds of failures")
    return 1 if any(part["finds"] for part in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
