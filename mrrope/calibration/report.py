"""The report of a calibration: held-out perplexity of all methods, and the sweep over the bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mrrope.calibration.calibrate import Calibration
from mrrope.calibration.kinds import by_kind, mean_over_kinds
from mrrope.calibration.objective import Readings, Rung
from mrrope.calibration.spaces import PowerSpace, clamp
from mrrope.evaluation.documents import Document
from mrrope.evaluation.evaluate import PERPLEXITY, perplexity_figures
from mrrope.evaluation.perplexity import perplexity
from mrrope.evaluation.results import Results
from mrrope.evaluation.truncated import TRUNCATED, Truncation
from mrrope.reporting import plotting
from mrrope.reporting.optional_packages import progress_bar
from mrrope.tables.lookup import ModelTables
from mrrope.tables.table_set import TableSet

CALIBRATED = "calibrated"
OTHER_KINDS = "other kinds"
"""The part of the results on texts of other kinds than any that were searched."""


def read_held_out(
    readings: Readings, tables: Mapping[str, ModelTables | Truncation], documents: Sequence[Document], results: Results
) -> None:
    """Measure perplexity of all rows on documents, in the format of ``mrrope eval``; all kinds weigh the same."""
    for method, one in progress_bar(tables.items(), desc="held-out documents", unit="table"):
        found = [readings.read(one, document, readings.lengths[-1]) for document in documents]
        for losses in zip(*found, strict=True):
            named = [(document.name, loss) for document, loss in zip(documents, losses, strict=True)]
            figures = perplexity_figures(named, partial(mean_over_kinds, documents))
            results.put(PERPLEXITY, method, losses[0].length, figures)


def geometric_means(results: Results) -> dict[str, float]:
    """Geometric mean over lengths of each method's second-half perplexity."""
    by_method = results.data["results"][PERPLEXITY]
    return {
        method: math.exp(
            sum(math.log(figures["second_half_perplexity"]) for figures in by_length.values()) / len(by_length)
        )
        for method, by_length in by_method.items()
    }


def summary(data: dict[str, Any]) -> str:
    """The chosen tables, their perplexity relative to the best fixed method, and the texts of the search."""
    found = data["calibration"]
    columns = {"held-out": found["held_out_geometric_means"]}
    if "other_kinds_geometric_means" in found:
        columns["other kinds"] = found["other_kinds_geometric_means"]
    header = [f"{'':<12}" + "".join(f"{name:>13}" for name in columns)] if len(columns) > 1 else []
    width = 13 if header else 10
    changes = [change_against_best(means) for means in columns.values()]
    names = ["", " on texts of other kinds"]
    lines = [
        "geometric mean over all lengths, second half, held-out documents",
        *header,
        *(
            f"{method:<12}" + "".join(f"{means[method]:>{width}.3f}" for means in columns.values())
            for method in columns["held-out"]
        ),
        "",
        f"chosen: {found['chosen']}, " + ", ".join(map(str.__add__, changes, names)),
    ]
    lines += advice(columns["held-out"])
    lines += truncation_advice(data, columns["held-out"], "held-out documents")
    if "other kinds" in columns:
        other = data.get("parts", {}).get(OTHER_KINDS, {})
        lines += truncation_advice(other, columns["other kinds"], "texts of other kinds")
    if "query_factors" in found:
        one = found["query_factors"]
        lines.append(
            f"factors of query heads: {one['lowest']:.3f} to {one['highest']:.3f}, geometric mean "
            f"{one['geometric_mean']:.3f}, of {counted(one['layers'], 'layer')} with {one['query_heads']} each"
        )
    if "steps" in found:
        lines.append(f"search by gradient: {counted(found['steps'], 'step')} in {found['seconds']:.0f} s")
    return "\n".join([*lines, *searched_texts(data.get("texts", []))])


def counted_texts(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """The texts of other kinds: their names and numbers of documents."""
    return [{"name": kind, "documents": len(some)} for kind, some in by_kind(documents).items()]


def searched_texts(texts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of the search, their shares of it, and their documents."""
    if not texts:
        return []
    width = max(len("documents of"), *(len(text["name"]) for text in texts))
    columns = {"search": "search", "decide": "decision", "held_out": "held-out"}
    header = "".join(f"{name:>10}" for name in ("share", *columns.values()))
    rows = (
        f"{text['name']:<{width}}{text['share']:>10.0%}" + "".join(f"{text[part]:>10}" for part in columns)
        for text in texts
    )
    return ["", f"{'documents of':<{width}}{header}", *rows]


def counted(count: int, thing: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def best_fixed(means: Mapping[str, float]) -> str:
    """The fixed method with the lowest perplexity."""
    return min((method for method in means if method not in (CALIBRATED, TRUNCATED)), key=means.__getitem__)


def change_against_best(means: Mapping[str, float]) -> str:
    """The calibrated tables relative to the best fixed method and to truncation."""
    others = [best_fixed(means), *(name for name in (TRUNCATED,) if name in means)]
    return " and ".join(f"{means[CALIBRATED] / means[other] - 1:+.1%} against {other}" for other in others)


def range_of_query_factors(tables: ModelTables) -> dict[str, Any]:
    """The range of the factors of query heads, as an entry of the results; none where there are none."""
    layers = [one.query_factors for one in (tables if isinstance(tables, TableSet) else [tables])]
    factors = [factor for of_layer in layers for factor in of_layer or ()]
    if not factors:
        return {}
    return {
        "query_factors": {
            "lowest": min(factors),
            "highest": max(factors),
            "geometric_mean": math.exp(fmean(map(math.log, factors))),
            "layers": len(layers),
            "query_heads": tables.query_heads,
        }
    }


def advice(means: Mapping[str, float]) -> list[str]:
    """What to use instead, where a fixed method is better on held-out documents than the calibrated tables."""
    best = best_fixed(means)
    if means[CALIBRATED] <= means[best]:
        return []
    instead = "leave the model unpatched" if best == "rope" else f"patch with {best}"
    return [f"this is worse than {best}: {instead}, or calibrate with a larger --budget or more documents"]


def truncation_advice(data: dict[str, Any], means: Mapping[str, float], texts: str) -> list[str]:
    """Whether the stock model over windows of its native length is better than the calibrated tables, and where."""
    if TRUNCATED not in means:
        return []
    by_method = data.get("results", {}).get(PERPLEXITY, {})
    ours, truncated = (by_method.get(method, {}) for method in (CALIBRATED, TRUNCATED))
    better = [
        f"{length} tokens {figures['second_half_perplexity']:.3f} against {ours[length]['second_half_perplexity']:.3f}"
        for length, figures in truncated.items()
        if figures["second_half_perplexity"] < ours[length]["second_half_perplexity"]
    ]
    where = f" (at {', '.join(better)})" if better else ""
    if means[TRUNCATED] < means[CALIBRATED]:
        return [
            f"{TRUNCATED} is better than the calibrated tables on {texts}: {means[TRUNCATED]:.3f} against "
            f"{means[CALIBRATED]:.3f}{where}. What reads the last native length of tokens with the unpatched model "
            "predicts these texts better"
        ]
    return [f"{TRUNCATED} is better than the calibrated tables on {texts} at some lengths{where}"] if better else []


def swept_bounds(space: PowerSpace, side: int) -> tuple[list[int], list[int]]:
    """``side`` values each of d_l and d_h around the table's bounds, in steps of two pairs."""
    assert space.origin.bounds is not None
    last = space.origin.rotary_dim // 2 - 1
    lows, highs = (
        sorted({int(clamp(bound + 2 * (i - side // 2), 0, last)) for i in range(side)}) for bound in space.origin.bounds
    )
    return lows, highs


def read_sweep(calibration: Calibration, side: int) -> dict[str, Any]:
    """The paper's sweep over d_l and d_h, with the calibrated power and temperature, on one held-out document."""
    space = calibration.power_space
    power, _, _, temperature = space.start
    lows, highs = swept_bounds(space, side)
    rung = Rung(calibration.documents.held_out[:1], calibration.readings.lengths[-1])
    perplexities: dict[tuple[int, int], float] = {}
    for low, high in progress_bar(
        [(low, high) for low in lows for high in highs if low < high], desc="bounds", unit="table"
    ):
        table = space.table((power, low, high, temperature))
        perplexities[low, high] = perplexity([calibration.readings.loss(table, rung)])
    return {
        "power": power,
        "temperature": temperature,
        "d_l": lows,
        "d_h": highs,
        "perplexity": [[perplexities.get((low, high)) for high in highs] for low in lows],
    }


def draw_sweep(sweep: dict[str, Any], path: Path) -> None:
    """Plot perplexity by d_l and d_h."""
    rows = [[math.nan if cell is None else cell for cell in row] for row in sweep["perplexity"]]
    figure = plotting.new_figure(figsize=(2.5 + 0.75 * len(sweep["d_h"]), 1.5 + 0.5 * len(sweep["d_l"])))
    axes = figure.subplots()
    shown = [cell for row in rows for cell in row if not math.isnan(cell)]
    # Clip the colour scale, so that failing bounds do not hide the differences of the others.
    lowest, highest = min(shown), min(max(shown), 1.5 * min(shown))
    image = axes.imshow(rows, aspect="auto", cmap="viridis_r", origin="lower", vmin=lowest, vmax=highest)
    axes.set_xticks(range(len(sweep["d_h"])), sweep["d_h"])
    axes.set_yticks(range(len(sweep["d_l"])), sweep["d_l"])
    middle = (lowest + highest) / 2
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if not math.isnan(cell):
                axes.text(j, i, f"{cell:.2f}", ha="center", va="center", color="black" if cell < middle else "white")
    axes.set(xlabel="d_h", ylabel="d_l", title=f"power {sweep['power']:g}, temperature {sweep['temperature']:g}")
    figure.colorbar(image, label="perplexity (geo. mean over lengths)")
    figure.savefig(path, dpi=120)
