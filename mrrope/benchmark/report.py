"""The printed tables and the plot of ``mrrope bench``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrrope.benchmark.workloads import Case
from mrrope.reporting import plotting

MAX_RATIO = 2.0
"""Upper limit of the plot's time-to-copy axis."""
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D62728", "#9467BD", "#8C564B", "#E377C2", "#17BECF", "#BCBD22"),
    *("#002F4D", "#80DB2F", "#B80068", "#F0C9A0", "#5F6B00"),
)
"""Colours of the plot's contenders, of which at most 14 are timed; the copy is grey."""


def names_in(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["seconds"]))


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print microseconds with their ratio to a copy, then errors."""
    names = names_in(rows)

    def time(row: dict[str, Any], name: str) -> str:
        seconds = row["seconds"].get(name)
        if seconds is None:
            return "failed" if name in row.get("failures", {}) else ""
        return f"{seconds * 1e6:.2f} ({seconds / row['seconds']['copy']:.2f})"

    print("\nMicroseconds (and ratio to a copy of the same bytes)")
    _print_table(rows, names, time)
    print("\nRelative error of q against float64")
    _print_table(rows, [name for name in names if name != "copy"], lambda row, name: _error(row, name))


def _error(row: dict[str, Any], name: str) -> str:
    return f"{row['errors'][name]:.1e}" if name in row["errors"] else ""


def _print_table(rows: list[dict[str, Any]], names: list[str], cell: Callable[[dict[str, Any], str], str]) -> None:
    first = max(len("tokens x q/k heads"), *(len(row["name"]) for row in rows))
    width = max(18, *(len(name) + 2 for name in names))
    print(f"{'tokens x q/k heads':{first}}" + "".join(f"{name:>{width}}" for name in names))
    for row in rows:
        print(f"{row['name']:{first}}" + "".join(f"{cell(row, name):>{width}}" for name in names))


def print_host(seconds: dict[str, float]) -> None:
    print("\nHost microseconds per call for one token, from Python to the launch")
    for name, value in seconds.items():
        print(f"{name:24}{value * 1e6:10.2f}")


def plot(rows: list[dict[str, Any]], machine: str, path: Path) -> None:
    """Plot bandwidth over tokens for the default shape, and the ratio to a copy for all other rows."""
    sizes = [row for row in rows if row["name"] == Case(row["tokens"], dtype=rows[0]["dtype"]).name]
    others = [row for row in rows if row not in sizes]
    figure = plotting.new_figure(figsize=(13, 5.5))
    left, right = figure.subplots(1, 2)
    colours = dict(zip((name for name in names_in(rows) if name != "copy"), itertools.cycle(COLOURS), strict=False))
    for name in names_in(sizes):
        shown = [row for row in sizes if name in row["seconds"]]
        bandwidth = [row["bytes"] / row["seconds"][name] / 1e9 for row in shown]
        style = {"color": "black", "linewidth": 3, "alpha": 0.4} if name == "copy" else {"color": colours[name]}
        left.plot(
            [row["tokens"] for row in shown], bandwidth, marker="" if name == "copy" else "o", label=name, **style
        )
    left.set(xscale="log", xlabel=f"tokens (32 query and 8 key heads of 128, {rows[0]['dtype']})", ylim=(0, None))
    left.set(ylabel="GB/s read and written")
    left.grid(alpha=0.3)
    names = [name for name in names_in(others) if name not in ("copy", "transformers eager")]
    for i, name in enumerate(names):
        places = [j for j, row in enumerate(others) if name in row["seconds"]]
        ratios = [others[j]["seconds"][name] / others[j]["seconds"]["copy"] for j in places]
        offset = (i - len(names) / 2) * 0.8 / len(names)
        shown_at = [min(ratio, MAX_RATIO) for ratio in ratios]
        right.scatter(shown_at, [j + offset for j in places], s=18, color=colours[name])
    right.set_yticks(range(len(others)), [row["name"] for row in others])
    right.axvline(1.0, color="black", linewidth=3, alpha=0.4)
    right.invert_yaxis()
    right.set(xlabel=f"time / time of a copy of the same bytes (clipped at {MAX_RATIO:g})")
    right.set(xlim=(0.5, MAX_RATIO + 0.05))
    right.grid(alpha=0.3)
    handles = [*left.lines, *(right.scatter([], [], color=colours[name], label=name) for name in names)]
    named = {handle.get_label(): handle for handle in reversed(handles)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5)
    figure.suptitle(f"Rotary embedding on {machine}")
    figure.savefig(path, dpi=130)
