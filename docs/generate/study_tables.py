"""Tables of docs/study.md and docs/calibration.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from measurements import NOT_MEASURED, Row, perplexity, pictured, result, table

from mrrope.reporting.plotting import thousands

STUDY, SMALL_MODELS = "study.json", "small_models.json"
STUDY_TEXT, STUDY_KEYS = "study_text.json", "study_keys.json"
"""Studies of tables that were calibrated with a smaller and a larger weight of retrieval."""
OTHER_KINDS = "other kinds"
"""The part of a study of table sets that is on texts of other kinds than the search's."""
BEST_FIXED = ("yarn_ratio", "mrrope_uni")
"""The best fixed methods at scale 16."""
STUDY_SCALES = (2, 4, 8, 16)
HEAD_DIMS = (64, 128)
SEARCHED = {"calibrated", "evolved"}
"""The tables that were searched for this model; all other methods are fixed."""


def parts_of(name: str) -> dict[str, Any]:
    """Return the parts of a study's results, by scale."""
    parts: dict[str, Any] = result(name).get("parts", {})
    return parts


def with_lowest_marked(column: dict[str, float]) -> dict[str, str]:
    """Format a column with its lowest value in bold."""
    lowest = min(column.values())
    return {row: f"**{perplexity(value)}**" if value == lowest else perplexity(value) for row, value in column.items()}


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def second_halves(by_length: dict[str, Any]) -> dict[str, float]:
    """Return the second-half perplexities, by increasing length."""
    return {length: by_length[length]["second_half_perplexity"] for length in sorted(by_length, key=int)}


def study_perplexity(scale: int) -> list[str]:
    """Return every length of one scale, and the geometric mean."""
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
    """Return the geometric mean over the lengths of each scale."""
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
    """Return the scores of all retrieval tasks at one scale."""
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
    """Return what calibration and evolution found with the same number of tokens."""
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
    """Return keys found and perplexity at scale 16 by the weight of retrieval in the search."""
    studied = {
        "`--retrieval 0.1`": (STUDY_TEXT, "calibrated", "calibration_text_16x.json"),
        "`--retrieval 1`, which is `calibrated`": (STUDY, "calibrated", "calibration_16x.json"),
        "`--retrieval 2`, at 8K, 64K and 128K": (STUDY_KEYS, "calibrated", "calibration_keys_16x.json"),
        "`evolved`": (STUDY, "evolved", None),
        "`yarn_ratio`": (STUDY, "yarn_ratio", None),
    }
    rows = []
    for name, (study, method, calibration) in studied.items():
        results = parts_of(study).get("16", {}).get("results", {})
        if not all(method in results.get(task, {}) for task in ("perplexity", "passkey")):
            return NOT_MEASURED
        values = second_halves(results["perplexity"][method])
        keys = results["passkey"][method]
        found = result(calibration)["calibration"] if calibration else None
        rows.append(
            [
                name,
                *(perplexity(value) for value in (*values.values(), geometric_mean(values.values()))),
                *(
                    f"{sum(trial['score'] for trial in one['trials']):g} of {len(one['trials'])}"
                    for one in keys.values()
                ),
                furthest_key(keys),
                f"{last_scale(found):.0f}" if found else "",
                f"{found['seconds']:.0f}" if found else "",
            ]
        )
    lengths = [thousands(int(length)) for length in values]
    header = ["", *lengths, "geo. mean", *(f"keys {length}" for length in lengths[-2:])]
    return table([*header, "furthest key found, from the end", "scale of the last pair", "search, s"], rows)


def small_training() -> list[str]:
    """Return the training of each small model."""
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
    """Return mean, lowest and highest over seeds, by scale."""
    data = {"summary": {}, "scales": [], **result(SMALL_MODELS)}
    by_method = data["summary"].get(str(head_dim), {}).get(task, {})
    scales = [f"{scale:g}" for scale in data["scales"]]

    def shown(cell: Row | None) -> str:
        return f"{cell['mean']:.2f} ({cell['lowest']:.2f} to {cell['highest']:.2f})" if cell else ""

    rows = [[f"`{method}`", *(shown(cells.get(scale)) for scale in scales)] for method, cells in by_method.items()]
    return table(["", *(f"{scale}x" for scale in scales)], rows) if rows else NOT_MEASURED


def study_mean(scale: int, method: str) -> float:
    """Return a method's geometric mean over the lengths of a scale."""
    by_length = parts_of(STUDY)[str(scale)]["results"]["perplexity"][method]
    return geometric_mean(second_halves(by_length).values())


def study_gains() -> list[str]:
    """Return the best fixed method of each scale, the calibrated table and the evolved one."""
    rows = []
    for scale in STUDY_SCALES:
        by_method = parts_of(STUDY).get(str(scale), {}).get("results", {}).get("perplexity", {})
        if not by_method.keys() >= SEARCHED:
            return NOT_MEASURED
        best = min(
            (method for method in by_method if method not in {*SEARCHED, "truncated"}), key=partial(study_mean, scale)
        )
        fixed, calibrated, evolved = (study_mean(scale, method) for method in (best, "calibrated", "evolved"))
        rows.append(
            [
                str(scale),
                f"`{best}` {perplexity(fixed)}",
                perplexity(calibrated),
                f"{100 * (calibrated / fixed - 1):+.1f} %",
                perplexity(evolved),
                f"{100 * (evolved / calibrated - 1):+.1f} %",
            ]
        )
    header = ["scale", "best fixed method", "`calibrated`", "against fixed", "`evolved`", "against calibrated"]
    return table(header, rows)


def study_passkeys() -> list[str]:
    """Return the pass keys that the searched tables and the best fixed method found."""
    rows = []
    for scale in STUDY_SCALES:
        by_method = parts_of(STUDY).get(str(scale), {}).get("results", {}).get("passkey", {})
        if not by_method.keys() >= SEARCHED:
            return NOT_MEASURED
        for length in sorted(by_method["calibrated"], key=int):
            trials = {method: by_length[length]["trials"] for method, by_length in by_method.items()}
            found = {method: sum(trial["score"] for trial in one) for method, one in trials.items()}
            best = max(count for method, count in found.items() if method not in {*SEARCHED, "truncated"})
            rows.append(
                [str(scale), thousands(int(length)), str(len(trials["calibrated"]))]
                + [f"{count:g}" for count in (best, found["calibrated"], found["evolved"])]
            )
    return table(["scale", "length", "prompts", "best fixed method", "`calibrated`", "`evolved`"], rows)


def table_sets_file(scale: int) -> str:
    """Return the name of the study of tables per layer and key head at a scale."""
    return f"table_sets_{scale}x.json"


def table_sets(scale: int) -> list[str]:
    """Return held-out perplexity of one table and of sets, that on texts of other kinds, and pass keys found."""
    found = result(table_sets_file(scale)).get("results", {})
    if not found.get("perplexity"):
        return NOT_MEASURED
    others = parts_of(table_sets_file(scale)).get(OTHER_KINDS, {}).get("results", {})
    lengths = sorted({length for by_length in found["perplexity"].values() for length in by_length}, key=int)
    columns = []
    for by_method in (found["perplexity"], others.get("perplexity", {})):
        values = {method: second_halves(by_length) for method, by_length in by_method.items()}
        whole = {method: geometric_mean(one.values()) for method, one in values.items() if len(one) == len(lengths)}
        columns.append(with_lowest_marked(whole) if whole else {})
    keys = found.get("passkey", {})
    asked = sorted({length for by_length in keys.values() for length in by_length}, key=int)

    def keys_found(method: str, length: str) -> str:
        trials = keys.get(method, {}).get(length, {}).get("trials")
        return "" if not trials else f"{sum(trial['score'] for trial in trials):g} of {len(trials)}"

    return table(
        ["", "held-out", "other kinds", *(f"keys {thousands(int(length))}" for length in asked)],
        [
            [f"`{method}`", *(column.get(method, "") for column in columns), *(keys_found(method, n) for n in asked)]
            for method in found["perplexity"]
        ],
    )


def table_set_lengths() -> list[str]:
    """Return held-out perplexity by length of the shipped sets, each up to its length, and of fixed methods at 16x."""
    results = {scale: result(table_sets_file(scale)).get("results", {}) for scale in STUDY_SCALES}
    by_scale = {scale: found.get("perplexity", {}) for scale, found in results.items()}
    if not all("head" in by_method for by_method in by_scale.values()):
        return NOT_MEASURED
    widest = by_scale[STUDY_SCALES[-1]]
    rows = {
        "unpatched": second_halves(widest["rope"]),
        **{f"`{method}`, 16x": second_halves(widest[method]) for method in BEST_FIXED},
        **{f"`smollm2-135m-heads-{scale}x`": second_halves(one["head"]) for scale, one in by_scale.items()},
    }
    lengths = list(rows["unpatched"])
    columns = [{row: values[n] for row, values in rows.items() if n in values} for n in lengths]
    shown = [with_lowest_marked(column) for column in columns]
    return table(
        ["", *(thousands(int(length)) for length in lengths)],
        [[row, *(column.get(row, "") for column in shown)] for row in rows],
    )


def last_scale(found: dict[str, Any]) -> float:
    """Return the cumulative scale of the last pair of a calibrated table."""
    chosen = found["finalists"][found["chosen"]]["table"]
    pairs = len(chosen["inv_freq"])
    scale: float = chosen["base"] ** (-(pairs - 1) / pairs) / chosen["inv_freq"][-1]
    return scale


def furthest_key(by_length: dict[str, Any]) -> str:
    """Return the largest distance from the end, in tokens, of a pass key that was found."""
    distances = [
        (1 - trial["depth"]) * int(length)
        for length, one in by_length.items()
        for trial in one["trials"]
        if trial["score"]
    ]
    return f"{max(distances) / 1024:.0f}K" if distances else ""


def calibrated_tables() -> list[str]:
    """Return how each table that ships with the package was found."""
    rows = []
    for scale in STUDY_SCALES:
        data = result(f"calibration_{scale}x.json")
        if not data:
            return NOT_MEASURED
        found = data["calibration"]
        name = f"`smollm2-135m-{scale}x`"
        rows.append(
            [name, f"{data['retrieval']:g}", found["chosen"], str(found["readings"]), f"{found['seconds']:.0f}"]
        )
    return table(["table", "`--retrieval`", "chosen finalist", "readings", "seconds"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    **{
        function.__name__: function
        for function in (
            study_evolution,
            study_gains,
            study_keys,
            study_means,
            study_passkeys,
            small_training,
            table_set_lengths,
            calibrated_tables,
        )
    },
    **{f"study_perplexity_{scale}": partial(study_perplexity, scale) for scale in STUDY_SCALES},
    **{f"study_tasks_{scale}": partial(study_tasks, scale) for scale in STUDY_SCALES},
    **{f"table_sets_{scale}": partial(table_sets, scale) for scale in STUDY_SCALES},
    **{
        f"small_{task}_{head_dim}": partial(small_models, task, head_dim)
        for task in ("perplexity", "passkey")
        for head_dim in HEAD_DIMS
    },
    "small_picture": lambda: pictured("small_models.png", "Small models by scale")[1:] or NOT_MEASURED,
}
