"""Options, time limit and results folder that the study scripts share."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


class OutOfTimeError(Exception):
    """The time limit is reached."""


class TimeLimit:
    """A deadline that is checked before every measurement."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def check(self, seconds: float = 0.0) -> None:
        """Raise OutOfTimeError if fewer than ``seconds`` are left."""
        if time.monotonic() + seconds > self.end:
            raise OutOfTimeError


def script_parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """A parser with ``--output``, whose help is the script's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / output, help="output files, without their endings")
    return parser
