"""Tables and figures of the study, and of what was calibrated for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from measurements import NOT_MEASURED, Row, perplexity, pictured, result, table

from mrrope.reporting.plotting import thousands

STUDY, SMALL_MODELS = "study.json", "small_models.json"
STUDY_TEXT, STUDY_KEYS = "study_text.json", "study_keys.json"
"""Of tables that were found with keys counting for less, and for more."""
STUDY_SCALES = (2, 4, 8, 16)
HEAD_DIMS = (64, 128)


def parts_of(name: str) -> dict[str, Any]:
    """The parts of a study's results."""
    parts: dict[str, Any] = result(name).get("parts", {})
    return parts


def with_lowest_marked(column: dict[str, float]) -> dict[str, str]:
    """A column in print, its lowest figure in bold."""
    lowest = min(column.values())
    return {row: f"**{perplexity(value)}**" if value == lowest else perplexity(value) for row, value in column.items()}


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def second_halves(by_length: dict[str, Any]) -> dict[str, float]:
    """By length, rising."""
    return {length: by_length[length]["second_half_perplexity"] for length in sorted(by_length, key=int)}


def study_perplexity(scale: int) -> list[str]:
    """All methods at one scale: every length, and their geometric mean."""
    by_method = parts_of(STUDY).get(str(scale), {}).get("results", {}).get("perplexity", {})
    if not by_method:
        return NOT_MEASURED
    values = {method: second_halves(by_length) for method, by_length in by_method.items()}
    lengths = sorted({length for one in values.values() for length in one}, key=int)
    columns = [{method: one[length] for method, one in values.items() if length in one} for length in lengths]
    columns.append({method: geometric_mean(one.values()) for method, one in values.items() if len(one) == len(lengths)})
    shown = [with_lowest_marked(column) for column in columns]
    return table(
        ["", *(thousands(int(length)) for length in lengths), "geo. mean"],
        [[f"`{method}`", *(column.get(method, "") for column in shown)] for method in values],
    ) + pictured(f"study_{scale}x.perplexity.png", f"Perplexity by length at scale {scale}")


def study_means() -> list[str]:
    """All methods, by the geometric mean over the lengths of each scale."""
    columns: dict[int, dict[str, float]] = {}
    for scale in STUDY_SCALES:
        by_method = parts_of(STUDY).get(str(scale), {}).get("results", {}).get("perplexity", {})
        values = {method: second_halves(by_length) for method, by_length in by_method.items()}
        most = max(map(len, values.values()), default=0)
        columns[scale] = {method: geometric_mean(one.values()) for method, one in values.items() if len(one) == most}
    methods = dict.fromkeys(method for column in columns.values() for method in column)
    if not methods:
        return NOT_MEASURED
    shown = [with_lowest_marked(column) for column in columns.values()]
    return table(
        ["", *(f"{scale}x" for scale in columns)],
        [[f"`{method}`", *(column.get(method, "") for column in shown)] for method in methods],
    )


def study_tasks(scale: int) -> list[str]:
    """All tasks with an answer, at one scale."""
    results = parts_of(STUDY).get(str(scale), {}).get("results", {})
    columns = {
        f"{task} {thousands(int(length))}": {
            method: by_length[length] for method, by_length in by_method.items() if length in by_length
        }
        for task, by_method in results.items()
        if task != "perplexity"
        for length in sorted({length for by_length in by_method.values() for length in by_length}, key=int)
    }
    if not columns:
        return NOT_MEASURED
    methods = dict.fromkeys(method for column in columns.values() for method in column)
    trials = [str(max(len(one["trials"]) for one in column.values())) for column in columns.values()]
    shown = [{method: f"{one['score']:.2f}" for method, one in column.items()} for column in columns.values()]
    return table(
        ["", *columns],
        [
            *([f"`{method}`", *(column.get(method, "") for column in shown)] for method in methods),
            ["prompts", *trials],
        ],
    ) + pictured(f"study_{scale}x.tasks.png", f"Tasks at scale {scale}")


def study_evolution() -> list[str]:
    """Calibration beside evolution, wherever both searched."""
    rows = []
    for scale, part in parts_of(STUDY).items():
        if found := part.get("evolution"):
            means = {
                method: geometric_mean(second_halves(part["results"]["perplexity"][method]).values())
                for method in ("calibrated", "evolved")
                if method in part["results"]["perplexity"]
            }
            for method, tokens, loss in (
                ("calibrated", found["tokens_allowed"], found["calibration_search_loss"]),
                ("evolved", found["tokens"], found["search_loss"]),
            ):
                mean = perplexity(means[method]) if method in means else ""
                rows.append([scale, f"`{method}`", f"{tokens / 1e6:.2f}M", f"{loss:.4f}", mean])
    header = ["scale", "", "tokens read", "loss, documents of the search", "held-out perplexity, geo. mean"]
    return table(header, rows) if rows else NOT_MEASURED


def study_keys() -> list[str]:
    """What a table gains in keys and loses in perplexity where keys count for more."""
    found = {
        "`--retrieval 0.1`": (parts_of(STUDY_TEXT), "calibrated"),
        "`--retrieval 1`, which is `calibrated`": (parts_of(STUDY), "calibrated"),
        "`--retrieval 2`, at 8K, 64K and 128K": (parts_of(STUDY_KEYS), "calibrated"),
        "`evolved`": (parts_of(STUDY), "evolved"),
        "`yarn_ratio`": (parts_of(STUDY), "yarn_ratio"),
    }
    rows = []
    for name, (parts, method) in found.items():
        results = parts.get("16", {}).get("results", {})
        if not all(method in results.get(task, {}) for task in ("perplexity", "passkey")):
            return NOT_MEASURED
        values = second_halves(results["perplexity"][method])
        keys = results["passkey"][method].values()
        rows.append(
            [
                name,
                *(perplexity(value) for value in (*values.values(), geometric_mean(values.values()))),
                *(f"{sum(trial['score'] for trial in one['trials']):g} of {len(one['trials'])}" for one in keys),
            ]
        )
    lengths = [thousands(int(length)) for length in values]
    return table(["", *lengths, "geo. mean", *(f"keys {length}" for length in lengths[-2:])], rows)


def small_training() -> list[str]:
    """How far each small model got."""
    return (
        table(
            ["head_dim", "seed", "parameters", "trained on", "last loss", "pass keys at the trained length", ""],
            [
                [
                    str(part["head_dim"]),
                    str(part["seed"]),
                    f"{part['training']['parameters'] / 1e6:.1f}M",
                    f"{part['training']['tokens'] / 1e6:.0f}M bytes in {part['training']['seconds']:.0f} s",
                    f"{part['training']['losses'][-1][1]:.3f}",
                    f"{part['passkey']:.0%}",
                    "" if part["judged"] else "not judged",
                ]
                for part in sorted(parts_of(SMALL_MODELS).values(), key=lambda one: (one["head_dim"], one["seed"]))
            ],
        )
        if parts_of(SMALL_MODELS)
        else NOT_MEASURED
    )


def small_models(task: str, head_dim: int) -> list[str]:
    """Means over seeds, with the lowest and the highest, at S times the trained length."""
    data = {"summary": {}, "scales": [], **result(SMALL_MODELS)}
    by_method = data["summary"].get(str(head_dim), {}).get(task, {})
    scales = [f"{scale:g}" for scale in data["scales"]]

    def shown(cell: Row | None) -> str:
        return f"{cell['mean']:.2f} ({cell['lowest']:.2f} to {cell['highest']:.2f})" if cell else ""

    rows = [[f"`{method}`", *(shown(cells.get(scale)) for scale in scales)] for method, cells in by_method.items()]
    return table(["", *(f"{scale}x" for scale in scales)], rows) if rows else NOT_MEASURED


def study_mean(scale: int, method: str, study: str = STUDY) -> float:
    """Over the lengths of a scale."""
    by_length = parts_of(study)[str(scale)]["results"]["perplexity"][method]
    return geometric_mean(second_halves(by_length).values())


def calibrated_gain(scale: int) -> str:
    """By how much the calibrated table's perplexity is below the best fixed method's."""
    fixed = set(parts_of(STUDY)[str(scale)]["results"]["perplexity"]) - {"calibrated", "evolved"}
    best = min(study_mean(scale, method) for method in fixed)
    return f"{100 * (1 - study_mean(scale, 'calibrated') / best):.0f} %"


def evolved_loss(scale: int) -> str:
    """By how much evolution's perplexity is above the calibrated table's."""
    return f"{100 * (study_mean(scale, 'evolved') / study_mean(scale, 'calibrated') - 1):.1f} %"


def keys_found(scale: int, length: int, who: str) -> str:
    """How many pass keys a method found, or the best fixed one."""
    by_method = parts_of(STUDY)[str(scale)]["results"]["passkey"]
    found = {
        method: sum(trial["score"] for trial in by_length[str(length)]["trials"])
        for method, by_length in by_method.items()
    }
    best_fixed = max(count for method, count in found.items() if method not in ("calibrated", "evolved"))
    return f"{best_fixed if who == 'fixed' else found[who]:g}"


def keys_back(study: str, length: int) -> str:
    """How far from the end the keys were that a table for scale 16 found."""
    trials = parts_of(study)["16"]["results"]["passkey"]["calibrated"][str(length)]["trials"]
    *first, last = (f"{(1 - trial['depth']) * length / 1024:.0f}K" for trial in reversed(trials) if trial["score"])
    return f"{', '.join(first)} and {last}"


def slowest(calibration: str) -> str:
    """By how much a calibrated table slows the last pairs."""
    found = result(calibration)["calibration"]
    table = found["finalists"][found["chosen"]]["table"]
    pairs = len(table["inv_freq"])
    return f"{table['base'] ** (-(pairs - 1) / pairs) / table['inv_freq'][-1]:.0f}"


def seconds_of_searches() -> str:
    """Of those with keys counting for little, for more and for most."""
    names = ("calibration_text_16x.json", "calibration_16x.json", "calibration_keys_16x.json")
    *first, last = (f"{result(name)['calibration']['seconds']:.0f}" for name in names)
    return f"{', '.join(first)} and {last}"


def cost_of_keys() -> str:
    """How much more perplexity the table for scale 16 has than one found with keys counting little."""
    return f"{100 * (study_mean(16, 'calibrated') / study_mean(16, 'calibrated', STUDY_TEXT) - 1):.0f} %"


def calibration_seconds(scale: int) -> str:
    """What the search took."""
    return f"{result(f'calibration_{scale}x.json')['calibration']['seconds']:.0f}"


TABLES: dict[str, Callable[[], list[str]]] = {
    **{function.__name__: function for function in (study_evolution, study_keys, study_means, small_training)},
    **{f"study_perplexity_{scale}": partial(study_perplexity, scale) for scale in STUDY_SCALES},
    **{f"study_tasks_{scale}": partial(study_tasks, scale) for scale in STUDY_SCALES},
    **{
        f"small_{task}_{head_dim}": partial(small_models, task, head_dim)
        for task in ("perplexity", "passkey")
        for head_dim in HEAD_DIMS
    },
    "small_picture": lambda: pictured("small_models.png", "Small models by scale")[1:] or NOT_MEASURED,
}
QUOTED: dict[str, Callable[[], str]] = {
    **{function.__name__: function for function in (cost_of_keys, seconds_of_searches)},
    **{
        f"keys_{scale}_{thousands(length)}_{who}": partial(keys_found, scale, length, who)
        for scale in STUDY_SCALES
        for length in (4096 * scale, 8192 * scale)
        for who in ("calibrated", "evolved", "fixed")
    },
    "keys_back_text": partial(keys_back, STUDY_TEXT, 65536),
    "keys_back": partial(keys_back, STUDY, 131072),
    "slowest_text": partial(slowest, "calibration_text_16x.json"),
    "slowest": partial(slowest, "calibration_16x.json"),
    **{f"evolved_loss_{scale}": partial(evolved_loss, scale) for scale in STUDY_SCALES},
    **{f"calibrated_gain_{scale}": partial(calibrated_gain, scale) for scale in STUDY_SCALES},
    **{f"calibration_seconds_{scale}": partial(calibration_seconds, scale) for scale in STUDY_SCALES},
}
