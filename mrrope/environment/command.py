"""The command ``mrrope env``."""

from __future__ import annotations

import argparse
import json

from mrrope.environment.report import as_text, collect


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope env``."""
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> None:
    """Print the report."""
    report = collect()
    print(json.dumps(report, indent=2) if options.json else as_text(report))
