"""Results of ``mrrope eval`` as a table and as plots."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median_low
from typing import Any

from mrrope.reporting import plotting
from mrrope.reporting.output import with_ending

FIGURES = {"perplexity": {"perplexity": "perplexity", "second_half_perplexity": "perplexity of the second half"}}
"""Result fields to show per task, with their titles; all other tasks show their score."""

MAX_PANELS_PER_ROW = 3


def figures_of(task: str) -> dict[str, str]:
    """The fields to show, each with its title."""
    return FIGURES.get(task, {"score": task})


def table(data: dict[str, Any]) -> str:
    """One block per field: a row per method, a column per length; an asterisk marks figures of fewer documents."""
    blocks = []
    for task, by_method in data["results"].items():
        lengths, partial = lengths_in(by_method), partly_read(data, by_method)
        width = max(len(method) for method in by_method) + 2
        for field, name in figures_of(task).items():
            lines = [name, " " * width + "".join(f"{length:>10}" for length in lengths)]
            for method, by_length in by_method.items():
                cells = ((by_length.get(str(length), {}).get(field), (method, length) in partial) for length in lengths)
                row = "".join(f"{'-' if cell is None else f'{cell:.3f}' + '*' * mark:>10}" for cell, mark in cells)
                lines.append(f"{method:<{width}}{row}")
            lines += [
                f"* {method} at {length}: {read}; not to be compared" for (method, length), read in partial.items()
            ]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def partly_read(data: dict[str, Any], by_method: dict[str, dict[str, Any]]) -> dict[tuple[str, int], str]:
    """How many documents were read, in words, for every method and length that lacks some: of a run that stopped."""
    counts = {
        (method, int(length)): len(figures["documents"])
        for method, by_length in by_method.items()
        for length, figures in by_length.items()
        if "documents" in figures
    }
    # In a calibration's file `documents` are those of its search; its report has all documents in every figure.
    expected = len(data["documents"]) if isinstance(data.get("documents"), list) else max(counts.values(), default=0)
    return {
        place: f"{count} of {expected} documents"
        for place, count in sorted(counts.items(), key=lambda one: one[0][1])
        if count < expected
    }


def lengths_in(by_method: dict[str, dict[str, Any]]) -> list[int]:
    """All measured lengths, ascending."""
    return sorted({int(length) for by_length in by_method.values() for length in by_length})


def draw(data: dict[str, Any], stem: Path) -> list[Path]:
    """Write one plot per task, ``STEM.TASK.png``, and return the paths."""
    paths = []
    for task, by_method in data["results"].items():
        figure = plotting.new_figure()
        if task == "needle":
            draw_grid(figure, task, by_method)
        else:
            draw_lines(figure, task, by_method, partly_read(data, by_method))
        paths.append(with_ending(stem, f"{task}.png"))
        figure.savefig(paths[-1], dpi=120)
    return paths


def draw_lines(
    figure: Any, task: str, by_method: dict[str, dict[str, Any]], partial: dict[tuple[str, int], str]
) -> None:
    """Plot a task's fields over length, one line per method; those with figures of fewer documents say so."""
    fields = figures_of(task)
    figure.set_size_inches(1.5 + 5 * len(fields), 4.2)
    lengths = lengths_in(by_method)
    for axes, (field, name) in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields.items(), strict=True):
        lines = {
            method: {int(length): figures[field] for length, figures in by_length.items()}
            for method, by_length in by_method.items()
        }
        for method, line in lines.items():
            style = plotting.line(Path(method).name)
            # The last is the longest length, which the fewest documents were read to.
            for read in [read for (name, _), read in partial.items() if name == method][-1:]:
                style["label"] += f" ({read})"
            axes.plot(line.keys(), line.values(), marker="o", markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.minorticks_off()
        axes.set(xlabel="tokens", ylabel="share found" if field == "score" else "", title=name)
        axes.grid(alpha=0.3)
        if field == "score":
            axes.set_ylim(-0.03, 1.03)
        else:
            cut_off_explosions(axes, [list(line.values()) for line in lines.values()])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)


def cut_off_explosions(axes: Any, lines: list[list[float]]) -> None:
    """Limit the y axis so that diverging methods do not flatten the others."""
    top = 1.5 * median_low(max(line) for line in lines)
    if any(value > top for line in lines for value in line):
        lowest = min(min(line) for line in lines)
        axes.set_ylim(lowest - 0.05 * (top - lowest), top)
        axes.set_title(f"{axes.get_title()} (cut off at {top:.3g})")


def draw_grid(figure: Any, task: str, by_method: dict[str, dict[str, Any]]) -> None:
    """Plot scores by length and depth, one panel per method."""
    lengths = lengths_in(by_method)
    wide = min(len(by_method), MAX_PANELS_PER_ROW)
    high = math.ceil(len(by_method) / wide)
    figure.set_size_inches(1.8 + (0.8 + 0.5 * len(lengths)) * wide, 0.8 + 3.2 * high)
    panels = figure.subplots(high, wide, squeeze=False, sharex=True, sharey=True).flatten()
    for axes in panels[len(by_method) :]:
        axes.set_visible(False)
    for axes, (method, by_length) in zip(panels, by_method.items(), strict=False):
        columns = [by_length.get(str(length), {"trials": []})["trials"] for length in lengths]
        depths = max(([trial["depth"] for trial in column] for column in columns), key=len)
        missing = [float("nan")] * len(depths)
        scores = [[trial["score"] for trial in column] or missing for column in columns]
        image = axes.imshow(list(zip(*scores, strict=True)), aspect="auto", cmap="RdYlGn", vmin=0, vmax=1)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_title(Path(method).name)
    figure.supxlabel("tokens", fontsize="medium")
    figure.supylabel(f"depth of the {task}", fontsize="medium")
    figure.colorbar(image, ax=panels.tolist(), label="share found", pad=0.01, fraction=0.05)
