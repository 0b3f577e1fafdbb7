"""One table, a table per layer, a table per key head: held-out perplexity and pass keys beside every other method.

    python studies/table_set_study.py MODEL TEXTS HELD_OUT OTHER_KINDS [--scale 16]
        [--rows fixed truncated shipped evolved ...] [--found model=NAME.table.json layer=... head=...]
        [--ladder NAME NAME ...] [--budget 5] [--documents 8] [--trials 12] [--chunk 131072] [--minutes N]
        [--output benchmarks/results/table_sets_16x]

MODEL is a folder, a name on the hub or a .gguf file; the texts are files or folders as for mrrope eval. Rows:

    fixed         the published methods and powers
    truncated     the stock model over windows of its native length
    shipped       the calibrated table that comes with mrrope, smollm2-135m-Sx
    NAME          of --found: tables that mrrope calibrate wrote
    evolved       one table by evolutionary search, within the budget of minutes
    layer_search  a table per layer without gradients, within the same budget
    ladder        the sets of --ladder with scale="auto"

Every row gets perplexity at all lengths on HELD_OUT and on OTHER_KINDS, and pass keys at the three longest lengths.
TEXTS are for the two searches. Rows that are known are skipped, so that rows can be measured in several runs. It
writes NAME.json, NAME.*.png, and NAME.NAME_OF_ROW.tables.png: what the layers and heads of a found set chose.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compared_tables import EVOLVED, WEAK_METHODS, tables_to_compare
from evolutionary_search import TableGenes, evolve
from layer_search import LayerGenes
from study_script import OutOfTimeError, TimeLimit, script_parser

from mrrope.calibration.calibrate import POWER_OF, Calibration
from mrrope.calibration.command import DEFAULT_RETRIEVAL, trained_with
from mrrope.calibration.document_sets import DocumentSets, lengths_up_to
from mrrope.calibration.gradient import ModelShape
from mrrope.calibration.journal import Journal
from mrrope.calibration.learnable_tables import expanded
from mrrope.calibration.objective import Readings, fingerprint, table_numbers, weights_fingerprint
from mrrope.calibration.pass_keys import with_keys
from mrrope.calibration.report import OTHER_KINDS, geometric_means
from mrrope.calibration.search import Point
from mrrope.calibration.spaces import PowerSpace
from mrrope.evaluation import model_loading, report
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.documents import Document, long_documents
from mrrope.evaluation.evaluate import PERPLEXITY, Evaluation
from mrrope.evaluation.results import Results
from mrrope.evaluation.truncated import TRUNCATED
from mrrope.hf.patch import patched
from mrrope.reporting import plotting
from mrrope.reporting.machine import measured_with
from mrrope.reporting.output import with_ending
from mrrope.tables.lookup import ModelTables, NativeRope, load_tables, tables_from_dict

PASSKEY = "passkey"
FIXED, SHIPPED, LAYER_SEARCH, LADDER = "fixed", "shipped", "layer_search", "ladder"
SEARCHED = (EVOLVED, LAYER_SEARCH)
SEARCH_DOCUMENTS = 6


@dataclass(frozen=True)
class LadderMethod(Method):
    """Tables of increasing scale, of which every text gets the smallest that covers it."""

    options: tuple[tuple[str, Any], ...] = (("scale", "auto"),)
    ladder: tuple[ModelTables, ...] = ()

    @contextlib.contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Patch the model with the ladder within a ``with`` block."""
        with patched(model, self.ladder, **dict(self.options)):
            yield


@dataclass
class TableSetStudy:
    """The rows of the study, each measured on its own."""

    options: argparse.Namespace
    model: Any
    tokenizer: Any
    results: Results
    trained: NativeRope
    lengths: list[int]
    time_limit: TimeLimit

    @cached_property
    def documents(self) -> dict[str, list[Document]]:
        """Held-out documents, and those of other kinds."""
        paths = {"": self.options.held_out, OTHER_KINDS: self.options.other_kinds}
        return {
            part: long_documents(path, self.tokenizer, self.lengths[-1], self.options.documents)
            for part, path in paths.items()
        }

    @cached_property
    def fixed(self) -> dict[str, ModelTables]:
        """The methods of the row ``fixed``."""
        return dict(tables_to_compare(self.trained, self.options.scale))

    def methods(self, row: str) -> Iterator[Method]:
        """The methods of a row; the searches run here, unless their tables are known."""
        if row == TRUNCATED:
            yield Method(TRUNCATED)
        elif row == FIXED:
            yield from (Method(name, table=tables) for name, tables in self.fixed.items())
        elif row == LADDER:
            yield LadderMethod(LADDER, ladder=tuple(map(load_tables, self.options.ladder)))
        else:
            yield Method(row, table=self.tables(row))

    def tables(self, row: str) -> ModelTables:
        """The tables of a row with one set."""
        if row == SHIPPED:
            return load_tables(f"smollm2-135m-{self.options.scale:g}x")
        if row not in SEARCHED:
            return load_tables(self.options.found[row])
        known = self.results.data.setdefault("searches", {})
        if row not in known:
            self.time_limit.check(60 * self.options.budget)
            known[row] = self.searched(row)
            self.results.save()
        return tables_from_dict(known[row]["tables"])

    def searched(self, row: str) -> dict[str, Any]:
        """Search without gradients within the budget."""
        documents = [
            with_keys(document, self.tokenizer, self.lengths)
            for document in long_documents(self.options.texts, self.tokenizer, self.lengths[-1], SEARCH_DOCUMENTS)
        ]
        path = self.results.path.with_name(f"{self.results.path.stem}.{row}.journal")
        about = {name: self.results.data[name] for name in ("weights", "scale", "lengths")}
        with closing(Journal(path, about)) as journal:
            readings = Readings(
                self.model, self.lengths, journal, chunk=self.options.chunk, retrieval=DEFAULT_RETRIEVAL
            )
            sets = DocumentSets(documents, [], [])
            rungs = Calibration(readings, self.trained, self.options.scale, sets, math.inf).rungs
            genes, first = self.first_generation(row)
            readings.limit = 60 * self.options.budget
            table = genes.table

            def loss(point: Point, rung: int) -> float:
                return readings.loss(table(point), rungs[rung])

            history: list[list[float]] = []
            best = evolve(genes, first, loss, len(rungs), 0, lambda _, found: history.append([readings.spent, found]))
        return {
            "seconds": readings.spent,
            "readings": readings.count,
            "history": history,
            "tables": table(best).to_dict(),
        }

    def first_generation(self, row: str) -> tuple[Any, Sequence[Point]]:
        """Genes and the first points of a search."""
        fixed = tables_to_compare(self.trained, self.options.scale)
        if row == EVOLVED:
            genes = TableGenes(fixed["rope"])
            return genes, [genes.point(table) for table in fixed.values()]
        layers = ModelShape.of(self.model).layers
        families = [
            LayerGenes(PowerSpace(fixed[family], power, self.trained.native), layers)
            for family, power in POWER_OF.items()
        ]
        # One power for all: that of the first family; the bounds and temperatures of the others start there, too.
        return families[0], list(dict.fromkeys(one.start() for one in families))

    def measure(self, row: str) -> None:
        """Measure what is not known of a row."""
        for method in self.methods(row):
            self.expect_same_tables(method)
            for part, documents in self.documents.items():
                results = self.results.part(part) if part else self.results
                evaluation = Evaluation(
                    self.model,
                    self.tokenizer,
                    documents,
                    self.lengths,
                    results,
                    self.options.trials,
                    self.options.chunk,
                )
                self.measure_task(evaluation, PERPLEXITY, method, len(documents))
                if not part and self.options.trials and method.name not in WEAK_METHODS:
                    longest = replace(evaluation, lengths=self.lengths[-3:])
                    self.measure_task(longest, PASSKEY, method, self.options.trials)

    def expect_same_tables(self, method: Method) -> None:
        """Raise ValueError where a row of this name is known of other tables: it would be skipped."""
        tables = method.ladder if isinstance(method, LadderMethod) else (method.table,)
        found = fingerprint([table_numbers(one) for one in tables if one is not None])
        if self.results.data.setdefault("tables", {}).setdefault(method.name, found) != found:
            raise ValueError(
                f"--output must be a new file for other tables, and {self.results.path} has the row {method.name!r} of "
                "others than are given now"
            )

    def measure_task(self, evaluation: Evaluation, task: str, method: Method, wanted: int) -> None:
        """Measure a task with a method, unless all its figures are known."""
        known = evaluation.results.data["results"].get(task, {}).get(method.name, {})
        count = "documents" if task == PERPLEXITY else "trials"
        if all(len(known.get(str(length), {count: []})[count]) == wanted for length in evaluation.lengths):
            return
        self.time_limit.check()
        with method.applied(self.model):
            evaluation.measure(task, method)
        self.results.save()

    def draw_tables(self, row: str, stem: Path) -> None:
        """Plot what every layer and key head of a set chose."""
        tables = self.tables(row)
        shape = ModelShape.of(self.model)
        rows = [one for layer in expanded(tables, shape.layers, shape.heads) for one in layer]
        figure = plotting.new_figure(figsize=(8, 1.5 + 0.09 * len(rows)))
        scales, factors = figure.subplots(1, 2, width_ratios=(5, 1), sharey=True)
        image = scales.imshow(
            [(one.cumulative_scale.log() / math.log(one.scale)).tolist() for one in rows],
            aspect="auto",
            cmap="viridis",
            interpolation="nearest",
        )
        scales.set_yticks(range(0, len(rows), shape.heads), range(shape.layers), fontsize="x-small")
        scales.set(xlabel="pair, fastest first", ylabel="layer, its key heads below one another", title=row)
        factors.plot([one.attention_factor for one in rows], range(len(rows)), ".", markersize=3)
        factors.set(xlabel="attention factor")
        factors.grid(alpha=0.3)
        figure.colorbar(image, ax=scales, label="log cumulative scale / log scale")
        plotting.save(figure, with_ending(stem, f"{row}.tables.png"))


def summary(results: Results, lengths: Sequence[int]) -> str:
    """Geometric means over lengths, held-out and on other kinds, and pass keys found."""
    held_out, others = geometric_means(results), geometric_means(results.part(OTHER_KINDS))
    scores = results.data["results"].get(PASSKEY, {})
    lines = [f"{'':16}{'held-out':>10}{'other kinds':>13}  pass keys at {', '.join(map(str, lengths[-3:]))}"]
    for name in sorted(held_out, key=held_out.__getitem__):
        cells = [scores.get(name, {}).get(str(length)) for length in lengths[-3:]]
        found = ", ".join("-" if one is None else f"{one['score'] * len(one['trials']):g}" for one in cells)
        lines.append(f"{name:16}{held_out[name]:>10.3f}{others.get(name, math.nan):>13.3f}  {found}")
    return "\n".join(lines)


def named_path(text: str) -> tuple[str, str]:
    """``NAME=PATH``."""
    name, is_there, path = text.partition("=")
    if not is_there or not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path


def run(options: argparse.Namespace, model: Any, tokenizer: Any) -> Results:
    """Measure the rows within the time limit."""
    own = (FIXED, TRUNCATED, SHIPPED, *SEARCHED, LADDER)
    if taken := sorted(options.found.keys() & set(own)):
        raise ValueError(f"--found must have other names than {', '.join(own)}, got {taken}")
    known = (FIXED, TRUNCATED, SHIPPED, *options.found, *SEARCHED, LADDER)
    if unknown := [row for row in options.rows if row not in known]:
        raise ValueError(f"--rows must be of {', '.join(known)}, got {unknown}")
    if LADDER in options.rows and not options.ladder:
        raise ValueError("--ladder must name the sets of the row ladder, got none")
    trained = trained_with(model, None)
    assert trained.original_max_position is not None
    lengths = lengths_up_to(trained.original_max_position, options.scale)
    about = {
        "model": model_loading.short_name(options.model),
        "weights": weights_fingerprint(model),
        "scale": options.scale,
        "lengths": lengths,
        "held_out": options.held_out.name,
        "other_kinds": options.other_kinds.name,
        **measured_with(model),
    }
    results = Results.resumed(with_ending(options.output, "json"), about)
    study = TableSetStudy(options, model, tokenizer, results, trained, lengths, TimeLimit(options.minutes))
    try:
        for row in options.rows:
            study.measure(row)
            if row not in (FIXED, TRUNCATED, LADDER):
                study.draw_tables(row, options.output)
        results.finish()
    except OutOfTimeError:
        results.finish(f"{options.minutes:g} minutes were over")
    report.draw(results.data, options.output)
    print(report.table(results.data), summary(results, lengths), sep="\n\n")
    return results


def parser() -> argparse.ArgumentParser:
    """The parser of the script."""
    options = script_parser(__doc__, "table_sets_16x")
    options.add_argument("model")
    for texts in ("texts", "held_out", "other_kinds"):
        options.add_argument(texts, type=Path)
    options.add_argument("--scale", type=float, default=16.0)
    options.add_argument("--rows", nargs="+", default=[FIXED, TRUNCATED], help="see above")
    options.add_argument("--found", nargs="*", type=named_path, default=[], metavar="NAME=PATH")
    options.add_argument("--ladder", nargs="*", default=[], metavar="TABLES", help="paths or shipped names, ascending")
    options.add_argument("--budget", type=float, default=5.0, help="minutes of each search without gradients")
    options.add_argument("--documents", type=int, default=8, help="held-out documents, and as many of other kinds")
    options.add_argument("--trials", type=int, default=12, help="pass keys per length")
    options.add_argument("--minutes", type=float, default=math.inf)
    options.add_argument("--chunk", type=int, default=131072, help="tokens per forward pass")
    return options


def main() -> None:
    """Measure, print and write."""
    options = parser().parse_args()
    options.found = dict(options.found)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = model_loading.load(options.model)
    run(options, model, tokenizer)


if __name__ == "__main__":
    main()
