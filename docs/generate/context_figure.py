"""The picture of README.md, and its numbers: perplexity by context length, and the pass keys found."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from measurements import FIGURES, NOT_MEASURED, perplexity, result, table
from pictures import Picture
from study_tables import STUDY, parts_of, second_halves, table_sets_file

from mrrope.reporting import plotting
from mrrope.reporting.plotting import thousands

NATIVE = "8192"
SCALES = {"16384": 2, "32768": 4, "65536": 8, "131072": 16}
"""The smallest scale that covers each length past the native one, as ``scale="auto"`` chooses it."""
STOCK, TRUNCATED, LADDER = "rope", "truncated", "ladder"
TITLES = {
    STOCK: "stock model",
    TRUNCATED: "truncated: stock over its last 8K",
    "yarn": "yarn",
    "yarn_ratio": "yarn_ratio",
    "mrrope_uni": "mrrope_uni",
    "mrrope_pro": "mrrope_pro",
    "shipped": "one calibrated table",
    LADDER: "calibrated per layer and head",
}
DRAWN = (STOCK, TRUNCATED, "yarn", "mrrope_uni", LADDER)
STYLES: dict[str, dict[str, Any]] = {
    LADDER: {"color": "#CC79A7", "linestyle": "-", "linewidth": 2.5},
}
HIGHEST = 20.0
"""The largest perplexity that is drawn."""


@dataclass
class Row:
    """What was measured of one method, by length in tokens."""

    perplexity: dict[str, float] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Pass keys found, of how many."""


def measured(scale: int, method: str, task: str) -> dict[str, Any]:
    """Return the figures of a method at a scale by length; from the study of methods where the other has none.

    At scale 16 both studies have the same documents.
    """
    found: dict[str, Any] = result(table_sets_file(scale)).get("results", {}).get(task, {}).get(method, {})
    if not found and scale == max(SCALES.values()):
        found = parts_of(STUDY).get(str(scale), {}).get("results", {}).get(task, {}).get(method, {})
    return found


def of_another_run() -> str:
    """Return a sentence on the figures at 128K that are those of the study of methods; empty where there are none."""
    own = result(table_sets_file(16)).get("results", {})
    study = parts_of(STUDY).get("16", {}).get("results", {})
    named = {
        method: f"`{method}`" if method not in own["perplexity"] else f"the keys of `{method}`"
        for method in DRAWN
        if method != STOCK and method in study.get("passkey", {}) and method not in own["passkey"]
    }
    if not named:
        return ""
    prompts = max(len(study["passkey"][method]["131072"]["trials"]) for method in named)
    return f" Of another run at 128K, with {prompts} prompts: {' and '.join(named.values())}."


def measured_row(method: str) -> Row:
    """Return a method's figures, each length at the smallest scale that covers it."""
    stock = second_halves(measured(16, STOCK, "perplexity"))
    if method == STOCK:
        return Row(stock)  # its pass keys were tried with two prompts, too few to show
    name = "head" if method == LADDER else method
    if not any(measured(scale, name, "perplexity") for scale in SCALES.values()):
        return Row()
    row = Row({NATIVE: stock[NATIVE]})
    for length, scale in SCALES.items():
        if method == TRUNCATED and not measured(scale, name, "perplexity"):
            scale = max(SCALES.values())  # it is not extended, so that its figures do not depend on the scale
        by_length = measured(scale, name, "perplexity")
        if length in by_length:
            row.perplexity[length] = by_length[length]["second_half_perplexity"]
        trials = measured(scale, name, "passkey").get(length, {}).get("trials")
        if trials:
            row.keys[length] = (round(sum(trial["score"] for trial in trials)), len(trials))
    return row


def rows() -> dict[str, Row]:
    """Return every method that was measured, in the order of the table."""
    if not measured(16, STOCK, "perplexity"):
        return {}
    found = {method: measured_row(method) for method in TITLES}
    return {method: row for method, row in found.items() if row.perplexity}


def context_table(methods: Iterable[str]) -> list[str]:
    """Return perplexity and pass keys by length, every length with the smallest scale that covers it."""
    found = {method: row for method, row in rows().items() if method in methods}
    if not found:
        return NOT_MEASURED
    lowest = {length: min(row.perplexity.get(length, math.inf) for row in found.values()) for length in SCALES}

    def cell(row: Row, length: str) -> str:
        if length not in row.perplexity:
            return ""
        value = perplexity(row.perplexity[length])
        keys = row.keys.get(length)
        shown = f"**{value}**" if row.perplexity[length] == lowest[length] else value
        return f"{shown} · {keys[0]} of {keys[1]}" if keys else shown

    return table(
        ["perplexity · pass keys found", *(thousands(int(length)) for length in SCALES)],
        [[TITLES[method], *(cell(row, length) for length in SCALES)] for method, row in found.items()],
    )


def context() -> list[str]:
    """Return what the picture shows, on what it was measured, what is missing, and its numbers."""
    found, data = rows(), result(table_sets_file(16))
    if not found:
        return NOT_MEASURED
    name, _, quantization = data["model"].partition(".")
    documents = len(measured(16, STOCK, "perplexity")[NATIVE]["documents"])
    text = (
        f"{name}, {quantization} weights, 8192 native tokens, {data['dtype']} on an {data['device']}: perplexity of "
        f"the second half of each length in {documents} held-out documents of Proof-pile, and pass keys found. "
        "Every length has the smallest scale that covers it. Calibrated tables were "
        "searched on other documents of Proof-pile, with pass keys in the loss; on other kinds of text they gain less "
        "([study](docs/study.md#tables-per-layer-and-key-head))."
    )
    text += of_another_run()
    if TRUNCATED not in found:
        text += " **Truncation is not drawn yet**: no stored result has it; `mrrope eval` reports it."
    return [*textwrap.wrap(text, 136, break_long_words=False, break_on_hyphens=False), "", *context_table(DRAWN)]


def picture_data() -> dict[str, Any]:
    """Return the numbers that the picture draws."""
    found = rows()
    return {
        method: {"perplexity": row.perplexity, "keys": row.keys} for method, row in found.items() if method in DRAWN
    }


def figure() -> Any:
    """Draw perplexity and keys by length."""
    found = {method: row for method, row in rows().items() if method in DRAWN}
    drawn = plotting.new_figure(figsize=(10.5, 4.4))
    left, right = drawn.subplots(1, 2, width_ratios=[3, 2])
    places = {length: i for i, length in enumerate((NATIVE, *SCALES))}
    for method, row in found.items():
        style = {"marker": "o", **plotting.line(method), **STYLES.get(method, {}), "label": TITLES[method]}
        left.plot([places[length] for length in row.perplexity], row.perplexity.values(), **style)
        if row.keys:
            shares = [hits / prompts for hits, prompts in row.keys.values()]
            right.plot([places[length] for length in row.keys], shares, **style)
    left.set(yscale="log", ylim=(2.7, HIGHEST), ylabel="perplexity, second half (lower is better)")
    left.set_yticks([3, 4, 5, 7, 10, 20], ["3", "4", "5", "7", "10", "20"])
    left.set_yticks([], minor=True)
    left.set(title="Perplexity by context length")
    left.legend(loc="upper center")
    right.set(title="Pass keys found", ylim=(-0.05, 1.05), ylabel="share of the prompts")
    for axes, shown in ((left, [NATIVE, *SCALES]), (right, [*SCALES])):
        axes.set(xlabel="context, tokens")
        axes.set_xticks([places[length] for length in shown], [thousands(int(length)) for length in shown])
        axes.grid(alpha=0.3)
    data = result(table_sets_file(16))
    drawn.suptitle(f"{data['model']}, native length 8K, past it at the smallest scale that covers the length")
    return drawn


PICTURE = Picture(FIGURES / "context.png", picture_data, figure)
TABLES: dict[str, Callable[[], list[str]]] = {"context": context, "contexts": partial(context_table, tuple(TITLES))}
