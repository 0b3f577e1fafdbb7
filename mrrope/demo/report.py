"""The results of the demo as JSON, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from mrrope.demo.long_context import CALIBRATED, PASS_KEY, PLAIN, PUBLISHED, UNCALIBRATED, Course, Reading
from mrrope.evaluation.perplexity import perplexity
from mrrope.evaluation.truncated import TRUNCATED
from mrrope.reporting import plotting

FORMAT = "mrrope.demo/2"
POINTS = 80
"""Points per curve."""
TRAILING = 8
"""Points per moving average in the plot."""
HEADROOM = 1.4
"""Margin of the plot above the highest and below the lowest curve of an extended model, as a factor."""


def label(method: str, course: Course) -> str:
    """What a method is, in words of those who have not read about it."""
    by_length = f"scale {course.covering_scale:g} by length"
    return {
        PLAIN: "unmodified model",
        TRUNCATED: f"unmodified, last {short(course.native)} tokens only (truncation)",
        PUBLISHED: f"YaRN, fixed scale {course.set_up_for:g}",
        CALIBRATED: f"mrrope, calibrated per head, {by_length}",
        UNCALIBRATED: f"mrrope_uni, not calibrated, {by_length}",
    }.get(method, method)


def results(course: Course, readings: Mapping[str, Reading]) -> dict[str, Any]:
    """The data of the table and the plot."""
    first = course.scored_from
    step = math.ceil((course.length - first) / POINTS)
    found: dict[str, Any] = {}
    for method, reading in readings.items():
        losses = reading.losses.double()

        def perplexity_of(start: int, end: int, losses: Any = losses) -> float:
            return perplexity([losses[start - first : end - first].mean().item()])

        found[method] = {
            "label": label(method, course),
            "perplexity": {f"{start}-{end}": perplexity_of(start, end) for start, end in pairwise(course.edges)},
            "past_native": perplexity_of(course.native, course.length),
            "pass_key": {
                str(stop): {"answer": answer, "found": PASS_KEY in answer} for stop, answer in reading.answers.items()
            },
            "curve": [
                [min(start + step, course.length), perplexity_of(start, min(start + step, course.length))]
                for start in range(first, course.length, step)
            ],
        }
    return {"format": FORMAT, "native": course.native, "tokens": course.length, "scale": course.set_up_for,
            "pass_key": PASS_KEY, "pass_key_at": course.key_at, "readings": found}  # fmt: skip


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
    queried = [f"queried at {short(int(stop))}" for stop in first["pass_key"]]
    rows = [["", *spans, *queried]]
    for reading in readings.values():
        answers = [
            "found" if answer["found"] else f"no:{first_line(answer['answer'])[:24]}"
            for answer in reading["pass_key"].values()
        ]
        rows.append([reading["label"], *(f"{value:.2f}" for value in reading["perplexity"].values()), *answers])
    widths = [max(len(row[column]) for row in rows) + 3 for column in range(len(rows[0]))]
    lines = [row[0].ljust(widths[0]) + "".join(map(str.rjust, row[1:], widths[1:])) for row in rows]
    lines.insert(0, f"Perplexity by position, and whether the pass key of token {data['pass_key_at']:,} was found:\n")
    return "\n".join(lines)


def trailing(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Moving geometric mean of the last ``TRAILING`` points, which smooths out the text's varying difficulty."""
    logs = [math.log(value) for _, value in curve]
    return [(place, math.exp(fmean(logs[max(i + 1 - TRAILING, 0) : i + 1]))) for i, (place, _) in enumerate(curve)]


def relative(curve: Sequence[tuple[int, float]], baseline: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A curve divided by another: the text's difficulty, which all methods share, cancels out."""
    return [(place, value / other) for (place, value), (_, other) in zip(curve, baseline, strict=True)]


def draw(data: dict[str, Any], path: Path) -> Path:
    """Write the figure as a PNG."""
    return plotting.save(figure_of(data), path)


def figure_of(data: dict[str, Any]) -> Any:
    """Plot perplexity relative to truncation over position, and list perplexities and answers beside it."""
    figure = plotting.new_figure(figsize=(10, 4.4))
    chart, key = figure.subplots(1, 2, width_ratios=[1.2, 1])
    _draw_curves(chart, data)
    _list_answers(key, data)
    figure.suptitle(f"{data.get('model', '')} past its {short(data['native'])} native tokens")
    return figure


def _draw_curves(axes: Any, data: dict[str, Any]) -> None:
    native, readings = data["native"], data["readings"]
    curves = {
        method: trailing(relative(reading["curve"], readings[TRUNCATED]["curve"]))
        for method, reading in readings.items()
    }
    for method, points in curves.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.8, **plotting.line(method))
    # The unmodified model leaves the chart, so that it does not hide how the others differ.
    shown = [value for method, points in curves.items() if method != PLAIN for _, value in points]
    axes.set_ylim(min(1 / 1.02, min(shown) ** HEADROOM), max(1.05, max(shown) ** HEADROOM))
    axes.axvline(native, color="gray", linewidth=1)
    axes.annotate("native length", (native, 0.97), xycoords=("data", "axes fraction"), xytext=(-5, 0),
                  textcoords="offset points", ha="right", va="top", color="dimgray")  # fmt: skip
    tokens = TRAILING * math.ceil((data["tokens"] - native * 3 // 4) / POINTS)
    axes.set(
        xlabel=f"position (tokens); moving average over {tokens}",
        ylabel="perplexity relative to truncation\n(lower is better)",
    )
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{100 * (ratio - 1):+.0f} %" if abs(ratio - 1) > 1e-6 else "equal")
    if data["tokens"] > 2 * native:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xticks(range(native * 3 // 4, data["tokens"] + 1, max(native // 8, 1)))
    axes.xaxis.set_major_formatter(lambda place, _: short(round(place)))
    axes.grid(alpha=0.3)


def _list_answers(axes: Any, data: dict[str, Any]) -> None:
    """One entry per method, with its line as the legend."""
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    last = str(data["tokens"])
    distance = short(data["tokens"] - data["pass_key_at"])
    axes.text(0, 0.98, f"Answers to the query for pass key {data['pass_key']}, {distance} tokens back:", va="top")
    for number, (method, reading) in enumerate(data["readings"].items()):
        top = 0.84 - 0.21 * number
        answer = reading["pass_key"][last]
        style = plotting.line(method) | {"label": None}
        axes.plot([0, 0.09], [top - 0.02, top - 0.02], linewidth=2.2, **style)
        axes.text(0.12, top, reading["label"], va="center", weight="bold")
        shown = "".join(filter(str.isprintable, first_line(answer["answer"]).strip()))[:24]
        axes.text(0.12, top - 0.07, f"✓ {data['pass_key']}" if answer["found"] else f"✗ “{shown}”", va="center",
                  color="#007A5E" if answer["found"] else "#B22222")  # fmt: skip
        past = f"perplexity past {short(data['native'])}: {reading['past_native']:.3g}"
        axes.text(0.12, top - 0.13, past, va="center", color="dimgray")
