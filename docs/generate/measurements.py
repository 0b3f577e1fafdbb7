"""What lies in benchmarks/results/, and how it is printed."""

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
    """A file of benchmarks/results/; nothing before it was measured."""
    path = RESULTS / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = result(name).get("rows", [])
    return rows


def beside_figure(name: str) -> dict[str, Any]:
    """What a picture of docs/figures/ was drawn from."""
    found: dict[str, Any] = json.loads((FIGURES / name).read_text())
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def microseconds(seconds: float) -> str:
    """Three digits, and no more of large numbers."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def perplexity(value: float) -> str:
    """Three digits or so; large ones have left what is worth comparing."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def pictured(name: str, text: str) -> list[str]:
    """A picture, where it was drawn."""
    return ["", f"![{text}](../benchmarks/results/{name})"] if (RESULTS / name).exists() else []
