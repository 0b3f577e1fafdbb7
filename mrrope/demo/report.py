"""The results of the demo as JSON, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from mrrope.demo.long_context import PASS_KEY, PLAIN, Course, Reading
from mrrope.evaluation.perplexity import perplexity
from mrrope.reporting import plotting

FORMAT = "mrrope.demo/1"
POINTS = 80
"""Points per curve."""
TRAILING = 4
"""Points per moving average in the plot."""
HEADROOM = 1.5
"""Margin of the plot above the highest and below the lowest perplexity of a patched model, as a factor."""


def results(course: Course, readings: Mapping[str, Reading]) -> dict[str, Any]:
    """The data of the table and the plot."""
    step = math.ceil(course.length / POINTS)
    found: dict[str, Any] = {}
    for method, reading in readings.items():
        losses = reading.losses.double()
        found[method] = {
            "perplexity": {
                f"{start}-{end}": perplexity([losses[start:end].mean().item()]) for start, end in pairwise(course.edges)
            },
            "pass_key": {
                str(stop): {"answer": answer, "found": PASS_KEY in answer} for stop, answer in reading.answers.items()
            },
            "curve": [
                [min(start + step, course.length), perplexity([losses[start : start + step].mean().item()])]
                for start in range(0, course.length, step)
            ],
        }
    return {"format": FORMAT, "native": course.native, "tokens": course.length, "pass_key": PASS_KEY,
            "pass_key_at": course.key_at, "readings": found}  # fmt: skip


def short(tokens: int) -> str:
    """Format a token count: 8192 is 8K."""
    return f"{tokens / 1024:.3g}K" if tokens >= 1024 else str(tokens)


def first_line(text: str) -> str:
    """The first line, or nothing if the text is empty."""
    return next(iter(text.splitlines()), "")


def table(data: dict[str, Any]) -> str:
    """One row per method: perplexity by position, then its answers."""
    readings: dict[str, Any] = data["readings"]
    first = next(iter(readings.values()))
    spans = [" to ".join(short(int(edge)) for edge in span.split("-")) for span in first["perplexity"]]
    asked = [f"asked at {short(int(stop))}" for stop in first["pass_key"]]
    rows = [["", *spans, *asked]]
    for method, reading in readings.items():
        answers = [
            "found" if answer["found"] else f"no:{first_line(answer['answer'])[:24]}"
            for answer in reading["pass_key"].values()
        ]
        rows.append([method, *(f"{value:.2f}" for value in reading["perplexity"].values()), *answers])
    widths = [max(len(row[column]) for row in rows) + 3 for column in range(len(rows[0]))]
    lines = [row[0].ljust(widths[0]) + "".join(map(str.rjust, row[1:], widths[1:])) for row in rows]
    lines.insert(0, f"Perplexity by position, and whether the pass key of token {data['pass_key_at']:,} was found:\n")
    return "\n".join(lines)


def trailing(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Moving geometric mean of the last ``TRAILING`` points, which smooths out the text's varying difficulty."""
    logs = [math.log(value) for _, value in curve]
    return [(place, math.exp(fmean(logs[max(i + 1 - TRAILING, 0) : i + 1]))) for i, (place, _) in enumerate(curve)]


def draw(data: dict[str, Any], path: Path) -> Path:
    """Plot perplexity over position, one line per method, from half of the native length on."""
    figure = plotting.new_figure(figsize=(8, 4.2))
    axes = figure.subplots()
    native = data["native"]
    curves = {
        method: [point for point in trailing(reading["curve"]) if point[0] >= native // 2]
        for method, reading in data["readings"].items()
    }
    for method, points in curves.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.8, **plotting.line(method))
    # The unpatched model leaves the chart, so that it does not hide how the others differ.
    shown = [value for method, points in curves.items() if method != PLAIN for _, value in points]
    if shown:
        axes.set_ylim(min(shown) / HEADROOM, HEADROOM * max(shown))
    axes.axvline(native, color="gray", linewidth=1)
    axes.annotate("trained length", (native, 0.97), xycoords=("data", "axes fraction"), xytext=(-5, 0),
                  textcoords="offset points", ha="right", va="top", color="dimgray")  # fmt: skip
    tokens = TRAILING * math.ceil(data["tokens"] / POINTS)
    axes.set(xlabel="position (tokens)", ylabel=f"perplexity of the last {tokens} tokens", yscale="log")
    axes.set_title(data.get("model", ""))
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks("{x:g}")
    if data["tokens"] > 2 * native:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xticks(range(native // 2, data["tokens"] + 1, native // 8))
    axes.xaxis.set_major_formatter(lambda place, _: short(round(place)))
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower left")
    return plotting.save(figure, path)
