"""Skeleton of the op benchmarks: options, measuring loop, printed table and results file. README.md has the method."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

import mrrope
from mrrope.benchmark import record
from mrrope.benchmark.timing import (
    COPY,
    Step,
    buffer_sets,
    copy_buffers,
    copy_steps,
    interleaved_medians,
    with_faster_copy,
)

RESULTS = Path(__file__).parent / "results"
HEAD_DIM = 128


def llama_table(scale: float = 16.0, **options: Any) -> mrrope.FrequencyTable:
    """An MrRoPE-Pro table for Llama-3-8B."""
    return mrrope.frequency_table(
        "mrrope_pro", rotary_dim=HEAD_DIM, base=5e5, original_max_position=8192, scale=scale, **options
    )


def script_parser(description: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """A parser with ``--output``, whose help is the script's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=output, help="results file, without its ending")
    return parser


def require_gpu(reason: str = "") -> None:
    """Exit if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"this needs a GPU{reason}")


def write(output: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """Write OUTPUT.json and print where."""
    written = record.write(output.with_suffix(".json"), device, rows)
    print(f"\n{written['machine']}; written to {output}.json")


class Case(Protocol):
    """A dataclass that describes one row."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def passes(self) -> Sequence[int]:
        """Bytes that each pass, forward and backward, reads and writes: the sizes of the copies beside it."""

    @property
    def with_backward(self) -> bool:
        """Whether the gradient is timed too."""


CaseT = TypeVar("CaseT", bound=Case)
Buffers = TypeVar("Buffers")


@dataclass(frozen=True)
class OpBenchmark(Generic[CaseT, Buffers]):
    """Contenders for one op, timed interleaved beside a copy of the same bytes, with their errors."""

    name: str
    """The op's name, also the stem of the results file."""
    cases: Mapping[str, Sequence[CaseT]]
    """By device."""
    make_buffers: Callable[[CaseT, str], Buffers]
    """Inputs of a case on a device."""
    contenders: Mapping[str, Callable[[Buffers], object]]
    """By name; those with "compiled" in it are skipped by ``--no-compile``."""
    relative_error: Callable[[CaseT, Callable[[Buffers], Any], str], float]
    """Error of a contender on a case and device; not called for cases with backward."""
    step: Callable[[CaseT, Callable[[Buffers], Any], Buffers], Step] = lambda _, run, buffers: functools.partial(
        run, buffers
    )
    """One timed call."""
    takes: Callable[[CaseT, str], bool] = lambda case, name: True
    """Whether a contender supports a case."""

    def measure_case(self, case: CaseT, device: str, names: Sequence[str]) -> dict[str, Any]:
        """One row: seconds and errors by contender."""
        moved = sum(case.passes)
        count = buffer_sets(moved, device)
        sets = [self.make_buffers(case, device) for _ in range(count)]
        steps = copy_steps([[copy_buffers(of_pass, device) for of_pass in case.passes] for _ in range(count)])
        taking = {name: self.contenders[name] for name in names if self.takes(case, name)}
        for name, run in taking.items():
            steps[name] = [self.step(case, run, buffers) for buffers in sets]
        torch.compiler.reset()  # compile anew for the shape of this case
        errors: dict[str, float] = {}
        with torch.set_grad_enabled(case.with_backward):
            seconds = with_faster_copy(interleaved_medians(steps, device))
            if not case.with_backward:
                errors = {name: self.relative_error(case, run, device) for name, run in taking.items()}
        return {**asdict(case), "name": case.name, "bytes": moved, "seconds": seconds, "errors": errors}

    def print_rows(self, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        """Print microseconds, the ratio to the copy, and the error, by contender."""
        width = max(len(row["name"]) for row in rows)
        print(f"\n{'':>{width}}{COPY:>12}" + "".join(f"{name:>30}" for name in names))
        print(f"{'':>{width}}{'us':>12}" + "".join(f"{'us  x copy     error':>30}" for _ in names))
        for row in rows:
            seconds, errors = row["seconds"], row["errors"]
            cells = [f"{seconds[COPY] * 1e6:12.2f}"]
            for name in names:
                error = f"{errors[name]:.1e}" if name in errors else ""
                time = f"{seconds[name] * 1e6:.2f}{seconds[name] / seconds[COPY]:8.2f}" if name in seconds else ""
                cells.append(f"{time:>20}{error:>10}")
            print(f"{row['name']:>{width}}" + "".join(cells))

    def main(self, description: str | None) -> None:
        """Parse the options, measure, print and write."""
        parser = script_parser(description)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=sorted(self.cases), default=default)
        parser.add_argument("--no-compile", action="store_true", help="skip the contenders that use torch.compile")
        options = parser.parse_args()
        names = [name for name in self.contenders if not (options.no_compile and "compiled" in name)]
        rows = []
        with tqdm(self.cases[options.device], desc=self.name, unit="row") as cases:
            for case in cases:
                cases.set_postfix_str(case.name)
                rows.append(self.measure_case(case, options.device, names))
        self.print_rows(rows, names)
        write(options.output or RESULTS / f"{self.name}_{options.device}", options.device, rows)
