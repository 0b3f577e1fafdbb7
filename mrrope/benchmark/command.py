"""The command ``mrrope bench``."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

import torch

from mrrope.benchmark import peers, record, report
from mrrope.benchmark.cases import CASES
from mrrope.benchmark.contenders import OURS, TRANSFORMERS
from mrrope.benchmark.host import host_seconds
from mrrope.benchmark.measure import measure
from mrrope.reporting.optional_packages import needs
from mrrope.reporting.output import checked_stem


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""
    command.add_argument("--device", choices=sorted(CASES), help="where to measure (default: a GPU where there is one)")
    command.add_argument(
        "--output", default="mrrope-bench", metavar="NAME", help="for NAME.json and NAME.png (default: %(default)s)"
    )
    command.add_argument("--tokens", type=int, metavar="N", help="leave out the rows with more tokens")
    command.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu where torch sees no GPU, got cuda")
    output = checked_stem(options.output)
    for package in ("transformers", "matplotlib", "tqdm"):
        with needs(package):
            importlib.import_module(package)

    cases = [case for case in CASES[device] if options.tokens is None or case.tokens <= options.tokens]
    if not cases:
        raise ValueError(f"--tokens must leave a row, and the smallest has {min(c.tokens for c in CASES[device])}")
    others = peers.installed(device)
    host = host_seconds(others, device)
    json_file, picture = (output.with_name(output.name + ending) for ending in (".json", ".png"))
    about = {"host_seconds": host, "peers": peers.versions(one.name for one in others)}
    rows: list[dict[str, Any]] = []
    for row in measure(cases, (*OURS, *others, *TRANSFORMERS), device):
        rows.append(row)
        # After an error of the GPU, which anybody's kernel may bring about, nothing more can be measured.
        written = record.write(json_file, device, rows, **about, complete=len(rows) == len(cases))
    report.plot(rows, written["machine"], picture)
    if options.json:
        print(json.dumps(written))
        return
    report.print_rows(rows)
    report.print_host(host)
    print(f"\n{written['machine']}; written to {json_file} and {picture}")
