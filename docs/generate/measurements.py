"""Read benchmarks/results/ and docs/figures/, and format numbers and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
NOT_MEASURED = ["Not measured yet."]
Row = dict[str, Any]


def result(name: str) -> dict[str, Any]:
    """Return the contents of a results file; an empty dict where it does not exist."""
    path = RESULTS / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def rows_of(name: str) -> list[Row]:
    """Return the rows of a results file."""
    rows: list[Row] = result(name).get("rows", [])
    return rows


def figure_data(name: str) -> dict[str, Any]:
    """Return the data that a figure of docs/figures/ is drawn from."""
    found: dict[str, Any] = json.loads((FIGURES / name).read_text())
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    header = list(header)
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def keys_in_order(dicts: Iterable[dict[str, Any]]) -> list[str]:
    """Return the keys of all dicts, in the order of their first appearance."""
    return list(dict.fromkeys(key for one in dicts for key in one))


def microseconds(seconds: float) -> str:
    """Format a time with three significant digits."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def perplexity(value: float) -> str:
    """Format a perplexity; digits beyond the third or fourth say nothing, of a broken model those beyond the second."""
    if value >= 1000:
        return f"{float(f'{value:.2g}'):.0f}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def short_exponent(value: str) -> str:
    """Write 1.6e-3 for 1.6e-03."""
    return value.replace("e-0", "e-")


def pictured(name: str, text: str) -> list[str]:
    """Return the Markdown of a results picture; nothing where the file does not exist."""
    return ["", f"![{text}](../benchmarks/results/{name})"] if (RESULTS / name).exists() else []
