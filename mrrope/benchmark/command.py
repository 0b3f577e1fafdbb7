"""The command ``mrrope bench``."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from mrrope.benchmark import peers, record, report
from mrrope.benchmark.host_overhead import host_seconds
from mrrope.benchmark.implementations import OURS, TRANSFORMERS
from mrrope.benchmark.measure import measure
from mrrope.benchmark.workloads import CASES
from mrrope.reporting.optional_packages import require
from mrrope.reporting.options import add_output
from mrrope.reporting.output import checked_stem, with_ending


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope bench``."""
    command.add_argument("--device", choices=sorted(CASES), help="where to measure (default: a GPU if there is one)")
    command.add_argument("--tokens", type=int, metavar="N", help="skip the rows with more tokens")
    add_output(command, "mrrope-bench", "NAME.json and NAME.png")


def run(options: argparse.Namespace) -> None:
    """Measure, print, plot and write."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu where torch sees no GPU, got cuda")
    output = checked_stem(options.output)
    require("transformers", "matplotlib", "tqdm")

    cases = [case for case in CASES[device] if options.tokens is None or case.tokens <= options.tokens]
    if not cases:
        raise ValueError(f"--tokens must leave a row, and the smallest has {min(c.tokens for c in CASES[device])}")
    others = peers.installed(device)
    host = host_seconds(others, device)
    json_file, picture = with_ending(output, "json"), with_ending(output, "png")
    about = {"host_seconds": host, "peers": peers.versions(one.name for one in others)}
    rows: list[dict[str, Any]] = []
    for row in measure(cases, (*OURS, *others, *TRANSFORMERS), device):
        rows.append(row)
        # Written after every row: a peer's CUDA error makes all later rows impossible.
        written = record.write(json_file, device, rows, **about, complete=len(rows) == len(cases))
    report.plot(rows, written["machine"], picture)
    if options.json:
        print(json.dumps(written))
        return
    report.print_rows(rows)
    report.print_host(host)
    print(f"\n{written['machine']}; written to {json_file} and {picture}")
