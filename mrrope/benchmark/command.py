"""The command ``mrrope bench``."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import mrrope
from mrrope.benchmark import peers, report
from mrrope.benchmark.cases import CASES
from mrrope.benchmark.contenders import OURS, TRANSFORMERS
from mrrope.benchmark.host import host_seconds
from mrrope.evaluation.extra import needs


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""
    command.add_argument("--device", choices=sorted(CASES), help="where to measure (default: a GPU where there is one)")
    command.add_argument("--output", default="mrrope-bench", metavar="NAME", help="for NAME.json and NAME.png")
    command.add_argument("--tokens", type=int, metavar="N", help="leave out the rows with more tokens")
    command.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu where torch sees no GPU, got cuda")
    with needs("tqdm"):
        from mrrope.benchmark.measure import measure
    with needs("transformers"):
        import transformers  # noqa: F401

    cases = [case for case in CASES[device] if options.tokens is None or case.tokens <= options.tokens]
    if not cases:
        raise ValueError(f"--tokens must leave a row, and the smallest has {min(c.tokens for c in CASES[device])}")
    others = peers.installed(device)
    machine = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    host = host_seconds(others, device)
    rows = measure(cases, (*OURS, *others, *TRANSFORMERS), device)
    record = {
        "machine": machine,
        "torch": torch.__version__,
        "mrrope": mrrope.__version__,
        "host_seconds": host,
        "rows": rows,
    }
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    json_file, picture = (output.with_name(output.name + ending) for ending in (".json", ".png"))
    json_file.write_text(json.dumps(record, indent=1) + "\n")
    report.plot(rows, machine, picture)
    if options.json:
        print(json.dumps(record))
        return
    report.print_rows(rows)
    report.print_host(host)
    print(f"\n{machine}; written to {json_file} and {picture}")
