"""Writes the tables in README.md and docs/ that come from benchmarks/results/ and docs/figures/.

    python benchmarks/tables.py [--check]

A table stands between <!-- table NAME --> and <!-- end -->, a figure in a sentence between <!-- figure NAME --> and
<!-- -->; what is between is replaced. With --check nothing is
written, and the exit status tells whether anything would have been.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from mrrope.demo.report import short
from mrrope.pictures import thousands
from mrrope.theory.command import wavering_past_native

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
GUIDES = ("speed", "following", "projection", "evaluation", "theory", "study", "calibration")
PAGES = ("README.md", *(f"docs/{guide}.md" for guide in GUIDES))
FEWEST_ROWS = 512
"""Of a projection; with fewer, the product and the rotation are done apart by far."""
MODEL_KINDS = ("stock", "patched", "with fuse_projection")
STUDY, SMALL_MODELS = "study.json", "small_models.json"
STUDY_SCALES = (2, 4, 8, 16)
HEAD_DIMS = (64, 128)
NOT_MEASURED = ["Not measured yet."]

Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def microseconds(seconds: float) -> str:
    """Three digits, and no more of large numbers."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def with_error(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return ""
    return f"{microseconds(row['seconds'][name])} · {row['errors'][name]:.1e}".replace("e-0", "e-")


def as_ratio(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return "fails" if name in row.get("failures", {}) else ""
    return f"{row['seconds'][name] / row['seconds']['copy']:.2f}"


def rotary() -> list[str]:
    """The rows that people ask for first."""
    others = {"Liger": "liger_kernel", "FlashInfer": "flashinfer", "transformers, compiled": "transformers compiled"}
    others["transformers"] = "transformers eager"
    wanted = [f"{tokens} x 32/8" for tokens in (1, 64, 256, 1024, 8192, 131072)]
    measured = {row["name"]: row for row in rows_of("rotary_cuda.json")}
    rows = [measured[name] for name in (*wanted, "131072 x 4/1", "8192 x 32/8, float32")]
    return table(
        ["tokens x q/k heads", "copy of the bytes", "**mrrope**", *others],
        [
            [row["name"], microseconds(row["seconds"]["copy"]), f"**{with_error(row, 'mrrope')}**"]
            + [with_error(row, name) for name in others.values()]
            for row in rows
        ],
    )


def rotary_ratios() -> list[str]:
    """All rows, as so many copies."""
    rows = rows_of("rotary_cuda.json")
    names = [name for name in dict.fromkeys(name for row in rows for name in row["seconds"]) if name != "copy"]
    return table(
        ["tokens x q/k heads", "copy, us", *names],
        [[row["name"], microseconds(row["seconds"]["copy"]), *(as_ratio(row, name) for name in names)] for row in rows],
    )


def host() -> list[str]:
    """What a call costs in Python and C++."""
    seconds = json.loads((RESULTS / "rotary_cuda.json").read_text())["host_seconds"]
    return table(list(seconds), [[microseconds(value) for value in seconds.values()]])


def cache() -> list[str]:
    """Rotary and the cache's write in one launch."""
    names = ("rotary_and_cache_", "rotary_, compiled scatter", "rotary_, scatter")
    return table(
        ["tokens, cache", "copy", *(f"`{names[0]}`", *names[1:])],
        [
            [
                row["name"].replace("1 tokens", "1 token"),
                *(microseconds(row["seconds"][name]) for name in ("copy", *names)),
            ]
            for row in rows_of("cache_cuda.json")
        ],
    )


def norm() -> list[str]:
    """Norms and rotary in one launch."""
    names = ("copy", "mrrope", "mrrope in place", "apart", "transformers")
    return table(
        ["tokens x q/k heads, norm over", *names],
        [
            [row["name"].replace("_", " ").replace(" bfloat16", "")]
            + [microseconds(row["seconds"][name]) if name in row["seconds"] else "" for name in names]
            for row in rows_of("qk_norm_cuda.json")
        ],
    )


def model(results: str) -> list[str]:
    """A patched model beside the stock one."""
    rows = rows_of(results)
    stock, *others = (kind for kind in MODEL_KINDS if any(kind in row["seconds"] for row in rows))

    def shown(values: Row, kind: str, form: Callable[[float], str]) -> str:
        return form(values[kind]) if kind in values else ""

    return table(
        ["", f"{stock}, ms", *others, *(f"{kind} / {stock}" for kind in others), "peak GB, of each"],
        [
            [
                row["name"],
                *(shown(row["seconds"], kind, lambda time: f"{time * 1e3:.2f}") for kind in (stock, *others)),
                *(shown(row["ratios"], kind, lambda ratio: f"{ratio:.3f}") for kind in others),
                ", ".join(
                    f"{row['peak_bytes'][kind] / 1e9:.2f}" for kind in (stock, *others) if kind in row["seconds"]
                ),
            ]
            for row in rows
        ],
    )


def long_reading() -> list[str]:
    """A large model that reads as ``mrrope eval`` does."""
    if not (RESULTS / "long_reading.json").exists():
        return NOT_MEASURED
    return table(
        ["", "seconds", "weights, GB", "peak, GB"],
        [
            [
                row["name"],
                f"{row['seconds']:.1f}",
                *(f"{row[part] / 1e9:.1f}" for part in ("weights_bytes", "peak_bytes")),
            ]
            for row in rows_of("long_reading.json")
        ],
    )


def rescale() -> list[str]:
    """A cache turned."""
    return table(
        ["cached tokens", "copy of its keys", "turning them", "asking, with nothing to turn"],
        [
            [str(row["tokens"])]
            + [f"{microseconds(row['seconds'][what])} us" for what in ("copy", "turn", "nothing to turn")]
            for row in rows_of("rescale_cuda.json")
        ],
    )


def following() -> list[str]:
    """The scale that follows the text, beside every fixed one."""
    by_scale = json.loads((RESULTS / "following_lengths.json").read_text())["perplexity"]
    lengths = sorted(by_scale["auto"], key=int)

    def cells(scale: str) -> list[str]:
        return [scale, *(figure(by_scale[scale][length]["second half"]) for length in lengths)]

    return table(
        ["", *(thousands(int(length)) for length in lengths)],
        [[f"**{cell}**" for cell in cells(scale)] if scale == "auto" else cells(scale) for scale in by_scale],
    )


def demo() -> list[str]:
    """What the demo read, and what it answered."""
    data = json.loads((FIGURES / "demo.json").read_text())
    first = next(iter(data["readings"].values()))
    spans = [" to ".join(short(int(edge)) for edge in span.split("-")) for span in first["perplexity"]]
    asked = [f"pass key of {short(data['pass_key_at'])}, asked at {short(int(stop))}" for stop in first["pass_key"]]
    return table(
        ["", f"perplexity, {spans[0]}", *spans[1:], *asked],
        [
            [f"`{method}`", *(f"{value:.2f}" for value in reading["perplexity"].values())]
            + ["found" if answer["found"] else "lost" for answer in reading["pass_key"].values()]
            for method, reading in data["readings"].items()
        ],
    )


def numerics() -> list[str]:
    """Errors near and far, as the demo measured them."""
    names = ("mrrope", "plain PyTorch")
    by_place: dict[int, list[float]] = {}
    for row in json.loads((FIGURES / "demo.json").read_text())["rotation"]:
        by_place.setdefault(row["positions near"], []).extend(row[name] for name in names)

    def place(end: int) -> str:
        power = end.bit_length() - 1
        return f"2^{power}" if end == 2**power and power > 20 else str(end)

    return table(
        ["positions near", "float32: mrrope", names[1], "bfloat16: mrrope", names[1]],
        [[place(end), *(f"{error:.1e}".replace("e-0", "e-") for error in by_place[end])] for end in by_place],
    )


def zeros() -> list[str]:
    """Where B(m) is first not positive."""
    similarity = json.loads((FIGURES / "theory.json").read_text())["similarity"]
    methods = [method for method in similarity["all"] if method != "pi"]
    return table(
        ["", *methods],
        [
            [name, *(str(similarity[pairs][method]["first_zero"]) for method in methods)]
            for name, pairs in (("all pairs", "all"), ("middle pairs alone", "middle"))
        ],
    )


def zeros_by_scale() -> list[str]:
    """The same for other scales, of the methods that a scale makes a difference to."""
    by_scale = json.loads((FIGURES / "theory.json").read_text())["similarity"]["first_zero_by_scale"]
    methods = [method for method in next(iter(by_scale.values())) if method not in ("rope", "pi")]
    return table(
        ["scale", *methods],
        [[scale, *(str(zeros[method]) for method in methods)] for scale, zeros in by_scale.items()],
    )


def wavering() -> list[str]:
    """How steady the middle pairs' scores are in a real model."""
    by_method = wavering_past_native(json.loads((FIGURES / "theory.json").read_text())["attention"])
    return table(by_method, [[f"{value:.2f}" for value in by_method.values()]])


def projection() -> list[str]:
    """The projection that rotates, beside cuBLAS; every kernel by its best way through the tiles."""
    kernels = ("halves", "halves transposed")

    def best(row: Row, kernel: str, to: str) -> float:
        values: dict[str, float] = row[to]
        return min(value for plan, value in values.items() if plan.split(",")[0] == kernel)

    rows = [row for row in rows_of("qkv_rotary_plans.json") if row["rows"] >= FEWEST_ROWS]
    return table(
        [
            "rows x outputs x inputs",
            "cuBLAS, us",
            "then rotary",
            "tiles of 128 tokens",
            "of 160",
            "best / cuBLAS",
            "best / then rotary",
        ],
        [
            [
                f"{row['name']} ({row['geometry']})",
                *(microseconds(row["seconds"][name]) for name in ("cuBLAS", "cuBLAS, then rotary")),
                *(microseconds(best(row, kernel, "seconds")) for kernel in kernels),
                *(f"{min(best(row, kernel, to) for kernel in kernels):.3f}" for to in ("to cuBLAS", "to apart")),
            ]
            for row in sorted(rows, key=lambda one: (one["geometry"], one["rows"]))
        ],
    )


def projection_op() -> list[str]:
    """The op as it is, by its own plan."""
    return table(
        ["rows x outputs x inputs", "cuBLAS, us", "then rotary", "`qkv_rotary`", "/ cuBLAS", "/ then rotary", "error"],
        [
            [
                f"{row['name']} ({row['geometry']})",
                *(microseconds(row["seconds"][name]) for name in ("cuBLAS", "cuBLAS, then rotary", "mrrope")),
                *(f"{row[to]:.3f}" for to in ("op / cuBLAS", "op / apart")),
                f"{row['errors']['mrrope']:.2e}".replace("e-0", "e-"),
            ]
            for row in sorted(rows_of("qkv_rotary_cuda.json"), key=lambda one: (one["geometry"], one["rows"]))
        ],
    )


def parts_of(name: str) -> dict[str, Any]:
    """The parts of a study's results; none before it was run."""
    path = RESULTS / name
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    return parts


def figure(value: float) -> str:
    """Three digits or so; large ones have left what is worth comparing."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def with_lowest_marked(column: dict[str, float]) -> dict[str, str]:
    """A column in print, its lowest figure in bold."""
    lowest = min(column.values())
    return {row: f"**{figure(value)}**" if value == lowest else figure(value) for row, value in column.items()}


def pictured(name: str, text: str) -> list[str]:
    """A picture, where it was drawn."""
    return ["", f"![{text}](../benchmarks/results/{name})"] if (RESULTS / name).exists() else []


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
                mean = figure(means[method]) if method in means else ""
                rows.append([scale, f"`{method}`", f"{tokens / 1e6:.2f}M", f"{loss:.4f}", mean])
    header = ["scale", "", "tokens read", "loss, documents of the search", "held-out perplexity, geo. mean"]
    return table(header, rows) if rows else NOT_MEASURED


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
    path = RESULTS / SMALL_MODELS
    data = json.loads(path.read_text()) if path.exists() else {"summary": {}, "scales": []}
    by_method = data["summary"].get(str(head_dim), {}).get(task, {})
    scales = [f"{scale:g}" for scale in data["scales"]]

    def shown(cell: Row | None) -> str:
        return f"{cell['mean']:.2f} ({cell['lowest']:.2f} to {cell['highest']:.2f})" if cell else ""

    rows = [[f"`{method}`", *(shown(cells.get(scale)) for scale in scales)] for method, cells in by_method.items()]
    return table(["", *(f"{scale}x" for scale in scales)], rows) if rows else NOT_MEASURED


TABLES: dict[str, Callable[[], list[str]]] = {
    **{
        function.__name__: function
        for function in (
            rotary,
            rotary_ratios,
            host,
            cache,
            norm,
            long_reading,
            rescale,
            following,
            demo,
            numerics,
            zeros,
            zeros_by_scale,
            wavering,
            projection,
            projection_op,
        )
    },
    "model": partial(model, "model_cuda.json"),
    "model_compiled": partial(model, "model_compiled_cuda.json"),
    **{function.__name__: function for function in (study_evolution, study_means, small_training)},
    **{f"study_perplexity_{scale}": partial(study_perplexity, scale) for scale in STUDY_SCALES},
    **{f"study_tasks_{scale}": partial(study_tasks, scale) for scale in STUDY_SCALES},
    **{
        f"small_{task}_{head_dim}": partial(small_models, task, head_dim)
        for task in ("perplexity", "passkey")
        for head_dim in HEAD_DIMS
    },
    "small_picture": lambda: pictured("small_models.png", "Small models by scale")[1:] or NOT_MEASURED,
}


def most_copies() -> str:
    """How many copies the rotation takes at most, of all there is to rotate and as projections give it; rounded up."""
    rows = [
        row["seconds"]
        for row in rows_of("rotary_cuda.json")
        if row["head_dim"] == row["rotary_dim"] == 128 and row["layout"] != "bhsd"
    ]
    most = max(seconds[name] / seconds["copy"] for seconds in rows for name in ("mrrope", "mrrope in place"))
    return f"{math.ceil(100 * most) / 100:.2f}"


def prefill_gain(tokens: int) -> str:
    """By how much less time a patched model reads a text eagerly."""
    ratio = next(
        row["ratios"]["patched"] for row in rows_of("model_cuda.json") if f"prefill {tokens}, e" in row["name"]
    )
    return f"{100 * (1 - ratio):.0f} %"


def study_mean(scale: int, method: str) -> float:
    """Over the lengths of a scale."""
    by_length = parts_of(STUDY)[str(scale)]["results"]["perplexity"][method]
    return geometric_mean(second_halves(by_length).values())


def calibrated_gain(scale: int) -> str:
    """By how much the calibrated table's perplexity is below the best fixed method's."""
    fixed = set(parts_of(STUDY)[str(scale)]["results"]["perplexity"]) - {"calibrated", "evolved"}
    best = min(study_mean(scale, method) for method in fixed)
    return f"{100 * (1 - study_mean(scale, 'calibrated') / best):.0f} %"


def evolved_loss() -> str:
    """By how much evolution's perplexity is above the calibrated table's."""
    return f"{100 * (study_mean(4, 'evolved') / study_mean(4, 'calibrated') - 1):.1f} %"


def calibration_seconds(scale: int) -> str:
    """What the search took."""
    return f"{json.loads((RESULTS / f'calibration_{scale}x.json').read_text())['calibration']['seconds']:.0f}"


def projection_at_once(rows: int) -> str:
    """So many times cuBLAS's product alone, on a GPU that was idle just before; the geometries in their order."""
    ratios = [row["op / cuBLAS"] for row in rows_of("qkv_rotary_at_once_cuda.json") if row["rows"] == rows]
    *first, last = (f"{ratio:.2f}" for ratio in ratios)
    return f"{', '.join(first)} and {last}"


QUOTED: dict[str, Callable[[], str]] = {
    "most_copies": most_copies,
    "evolved_loss": evolved_loss,
    **{f"projection_at_once_{rows}": partial(projection_at_once, rows) for rows in (2048, 8192, 32768)},
    **{f"prefill_gain_{tokens}": partial(prefill_gain, tokens) for tokens in (8192, 32768)},
    **{f"calibrated_gain_{scale}": partial(calibrated_gain, scale) for scale in STUDY_SCALES},
    **{f"calibration_seconds_{scale}": partial(calibration_seconds, scale) for scale in STUDY_SCALES},
}


def filled(text: str) -> str:
    """A page with its tables and figures as the results are now."""

    def write(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *TABLES[match[2]](), "", match[3]])

    def quote(match: re.Match[str]) -> str:
        return f"{match[1]}{QUOTED[match[2]]()}{match[3]}"

    text, quoted = re.subn(r"(<!-- figure (\w+) -->)[^<]*(<!-- -->)", quote, text)
    if not text.count("<!-- figure ") == text.count("<!-- -->") == quoted:
        raise ValueError("every figure must have its end")

    text, written = re.subn(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", write, text, flags=re.DOTALL)
    if not written + quoted or not text.count("<!-- table ") == text.count("<!-- end -->") == written:
        raise ValueError("every page must have tables or figures, and every table its end")
    return text


def main() -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell whether a page is out of date")
    options = parser.parse_args()
    stale = [page for page in PAGES if filled((ROOT / page).read_text()) != (ROOT / page).read_text()]
    for page in stale:
        print(f"{page} {'is out of date' if options.check else 'is written anew'}")
        if not options.check:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
