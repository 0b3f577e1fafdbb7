"""Tables of docs/evaluation.md, docs/auto-scale.md, and of the numerics that `mrrope demo` measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measurements import FIGURES, NOT_MEASURED, figure_data, perplexity, result, rows_of, short_exponent, table
from pictures import Picture

from mrrope.demo import report
from mrrope.demo.report import short
from mrrope.reporting.plotting import thousands


def long_reading() -> list[str]:
    """Return time and memory of a Llama-3-8B shape in `mrrope eval`."""
    rows = rows_of("long_reading.json")
    if not rows:
        return NOT_MEASURED
    return table(
        ["", "seconds", "weights, GB", "peak, GB"],
        [
            [
                row["name"],
                f"{row['seconds']:.1f}",
                *(f"{row[part] / 1e9:.1f}" for part in ("weights_bytes", "peak_bytes")),
            ]
            for row in rows
        ],
    )


def auto_scale() -> list[str]:
    """Return perplexity by length of scale="auto" and of every fixed scale."""
    by_scale = result("auto_scale_lengths.json").get("perplexity", {})
    if not by_scale:
        return NOT_MEASURED
    lengths = sorted(by_scale["auto"], key=int)

    def cells(scale: str) -> list[str]:
        return [scale, *(perplexity(by_scale[scale][length]["second half"]) for length in lengths)]

    return table(
        ["", *(thousands(int(length)) for length in lengths)],
        [[f"**{cell}**" for cell in cells(scale)] if scale == "auto" else cells(scale) for scale in by_scale],
    )


def auto_scale_step() -> list[str]:
    """Return perplexity past a step of the ladder, with re-rotated keys and with a fresh prefill."""
    data = result("auto_scale_step.json")
    names = {
        "re-rotated keys": "perplexity after the step",
        "fresh prefill with the new table": "perplexity after a fresh prefill with the new table",
    }
    if not all(key in data for key in names.values()):
        return NOT_MEASURED
    return table(
        [f"tokens {data['from']} to {data['to']}", "perplexity"],
        [[name, perplexity(data[key])] for name, key in names.items()],
    )


def demo() -> list[str]:
    """Return the time of the demo, its perplexity and its pass keys."""
    data = demo_data()
    first = next(iter(data["readings"].values()))
    spans = [" to ".join(short(int(edge)) for edge in span.split("-")) for span in first["perplexity"]]
    queried = [f"pass key of {short(data['pass_key_at'])}, queried at {short(int(stop))}" for stop in first["pass_key"]]
    measured = f"Measured on two cores, in {data['seconds']:.0f} s ([`demo.json`](figures/demo.json), by `make demo`):"
    rows = [
        [reading["label"], *(f"{value:.2f}" for value in reading["perplexity"].values())]
        + ["found" if answer["found"] else "lost" for answer in reading["pass_key"].values()]
        for reading in data["readings"].values()
    ]
    return [measured, "", *table(["", f"perplexity, {spans[0]}", *spans[1:], *queried], rows)]


def numerics() -> list[str]:
    """Return rotation errors by position, as the demo measures them."""
    names = ("mrrope", "plain PyTorch")
    errors_by_end: dict[int, list[float]] = {}
    for row in demo_data()["rotation"]:
        errors_by_end.setdefault(row["positions near"], []).extend(row[name] for name in names)

    def position(end: int) -> str:
        power = end.bit_length() - 1
        return f"2^{power}" if end == 2**power and power > 20 else str(end)

    return table(
        ["positions near", "float32: mrrope", names[1], "bfloat16: mrrope", names[1]],
        [
            [position(end), *(short_exponent(f"{error:.1e}") for error in errors)]
            for end, errors in errors_by_end.items()
        ],
    )


def demo_data() -> dict[str, Any]:
    """Return the stored results of the demo."""
    return figure_data("demo.json")


DEMO = Picture(FIGURES / "demo.png", demo_data, lambda: report.figure_of(demo_data()))
TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (long_reading, auto_scale, auto_scale_step, demo, numerics)
}
