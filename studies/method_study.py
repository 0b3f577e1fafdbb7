"""Every method at every scale on one model: perplexity by length, and all retrieval tasks at the two longest.

Beside them stands the stock model over windows of its native length, ``truncated``.

    python studies/method_study.py MODEL TEXTS HELD_OUT [--calibrations benchmarks/results/calibration_*x.json]
        [--scales 2 4 8 16] [--evolve 4] [--minutes N] [--documents 8] [--trials 8] [--other-trials 4]
        [--chunk 524288] [--output benchmarks/results/study]

MODEL, TEXTS and HELD_OUT are as for studies/calibration_study.py. --calibrations names its results, with tables and
journals beside them: they give the calibrated table of each scale, and their figures are reused if the documents are
the same. At the scales of --evolve an evolutionary search reads as many tokens of the same documents as the
calibration did, and its table is compared too.

The most important measurements come first; after --minutes the study stops, and a second run resumes it. It writes
NAME.json, and NAME_Sx.perplexity.png and NAME_Sx.tasks.png for every scale S.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compared_tables import EVOLVED, WEAK_METHODS, as_methods, tables_to_compare
from evolutionary_search import TableGenes, TokenLimitedReadings, evolve
from study_script import OutOfTimeError, TimeLimit, script_parser

from mrrope.calibration.calibrate import Calibration
from mrrope.calibration.command import trained_with
from mrrope.calibration.document_sets import DocumentSets, lengths_up_to
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import fingerprint, weights_fingerprint
from mrrope.calibration.pass_keys import with_keys
from mrrope.calibration.report import CALIBRATED
from mrrope.calibration.search import Point
from mrrope.evaluation import model_loading, report
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.documents import Document, long_documents
from mrrope.evaluation.evaluate import PERPLEXITY, Evaluation
from mrrope.evaluation.results import Results
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.reporting import plotting
from mrrope.reporting.machine import measured_with
from mrrope.reporting.output import with_ending
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.lookup import NativeRope

PASSKEY = "passkey"
WEAK_METHOD_TRIALS = 2
LONG_TEXT = 10_000
SAME = ("weights", "dtype", "device", "torch")
"""Settings that must agree for the figures of another file to be reused."""


class CachingTokenizer:
    """A tokenizer that caches the tokens of long texts, which several scales use."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, tuple[str, ...]], Any] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        if len(text) < LONG_TEXT:
            return self._tokenizer(text, **options)
        key = text, tuple(f"{name} {value}" for name, value in options.items())
        if key not in self._known:
            self._known[key] = self._tokenizer(text, **options)
        return self._known[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass(frozen=True)
class Calibrated:
    """The results of studies/calibration_study.py at one scale."""

    path: Path

    @cached_property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    @property
    def scale(self) -> float:
        return float(self.data["scale"])

    @property
    def table(self) -> FrequencyTable:
        return FrequencyTable.load(self.path.with_suffix(".table.json"))

    def tokens_read(self) -> int:
        """Tokens read by search and validation: the journal's first readings, whose keys end with the token count."""
        lines = self.path.with_suffix(".journal").read_text().splitlines()[1:]
        return sum(int(json.loads(line)["key"].split()[-1]) for line in lines[: self.data["calibration"]["readings"]])

    def documents(self, which: str) -> list[list[str]]:
        """Name and fingerprint of each document."""
        found: list[list[str]] = self.data["documents"][which]
        return found


@dataclass(frozen=True)
class Stage:
    """A task at some of a scale's lengths."""

    task: str
    lengths: slice
    trials: int


def stages(trials: int, other_trials: int) -> list[Stage]:
    """The stages by importance; the longest lengths, which take the most time, come at the end."""
    others = [task for task in TASKS if task != PASSKEY]
    return [
        Stage(PERPLEXITY, slice(None), 0),
        Stage(PASSKEY, slice(-2, None), trials),
        *(Stage(task, slice(-2, -1), other_trials) for task in others),
        *(Stage(task, slice(-1, None), other_trials) for task in others),
    ]


@dataclass
class ScaleStudy:
    """All methods at one scale."""

    scale: float
    tables: dict[str, FrequencyTable]
    evaluation: Evaluation
    about: dict[str, Any]
    time_limit: TimeLimit
    calibrated: Calibrated | None = None

    @property
    def results(self) -> Results:
        return self.evaluation.results

    def measure(self, stage: Stage) -> None:
        """Measure one task with every method; known figures are skipped."""
        lengths = list(self.evaluation.lengths)[stage.lengths]
        # One pass gives the perplexities of all lengths.
        together = [lengths] if stage.task == PERPLEXITY else [[length] for length in lengths]
        for method in as_methods(self.tables):
            trials = min(stage.trials, WEAK_METHOD_TRIALS) if method.name in WEAK_METHODS else stage.trials
            for some in together:
                if not self.is_known(stage.task, method, some, trials):
                    self.time_limit.check()
                    with method.applied(self.evaluation.model):
                        replace(self.evaluation, lengths=some, trials=trials).measure(stage.task, method)

    def is_known(self, task: str, method: Method, lengths: list[int], trials: int) -> bool:
        """Whether all figures are there; those of the calibration are copied to the results."""
        count, wanted = ("documents", len(self.evaluation.documents)) if task == PERPLEXITY else ("trials", trials)
        for source in self.sources:
            by_length = source["results"].get(task, {}).get(method.name, {})
            found = {length: by_length.get(str(length), {count: []}) for length in lengths}
            if all(len(figures[count]) == wanted for figures in found.values()):
                for length, figures in found.items() if source is not self.results.data else ():
                    self.results.put(task, method.name, length, figures)
                return True
        return False

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """The study's own figures, and the calibration's if it has the same model and documents."""
        found = [self.results.data]
        if self.calibrated is not None:
            documents = [[document.name, fingerprint(document.tokens)] for document in self.evaluation.documents]
            same = all(self.calibrated.data.get(name) == self.about[name] for name in SAME)
            if same and self.calibrated.documents("held_out") == documents:
                found.append(self.calibrated.data)
        return found

    def evolve(self, texts: Path, trained: NativeRope) -> None:
        """Add the table of an evolutionary search with the token budget of the calibration."""
        if self.calibrated is None:
            raise ValueError(f"--evolve must be scales that --calibrations has, got {self.scale:g}")
        if "evolution" not in self.results.data:
            self.time_limit.check(self.calibrated.data["calibration"]["seconds"])
            self.results.data["evolution"] = self.evolved(texts, trained, self.calibrated)
        self.tables[EVOLVED] = FrequencyTable.from_dict(self.results.data["evolution"]["table"])

    def evolved(self, texts: Path, trained: NativeRope, calibrated: Calibrated) -> dict[str, Any]:
        """Run the search and return its table, losses and history."""
        lengths, data = calibrated.data["lengths"], calibrated.data
        documents = search_documents(texts, self.evaluation.tokenizer, calibrated)
        journal_path = self.results.path.with_name(f"{self.results.path.stem}_{self.scale:g}x.evolution.journal")
        about = {name: data[name] for name in (*SAME, "scale", "lengths", "retrieval", "documents")}
        history: list[list[float]] = []
        with closing(Journal(journal_path, about)) as journal:
            readings = TokenLimitedReadings(
                self.evaluation.model,
                lengths,
                journal,
                chunk=self.evaluation.chunk,
                retrieval=data["retrieval"],
                max_tokens=calibrated.tokens_read(),
                progress=lambda _: self.time_limit.check(),
            )
            rungs = Calibration(readings, trained, self.scale, DocumentSets(documents, [], []), math.inf).rungs
            fixed = tables_to_compare(trained, self.scale)
            genes = TableGenes(fixed["rope"])

            def loss(point: Point, rung: int) -> float:
                return readings.loss(genes.table(point), rungs[rung])

            def improved(_: Point, best: float) -> None:
                history.append([readings.tokens, best])
                print(f"evolution at scale {self.scale:g}: {readings.tokens} tokens read, loss {best:.4f}", flush=True)

            found = genes.table(
                evolve(genes, [genes.point(table) for table in fixed.values()], loss, len(rungs), 0, improved)
            )
        return {
            "tokens_allowed": readings.max_tokens,
            "tokens": readings.tokens,
            "readings": readings.count,
            "seconds": readings.spent,
            "search_loss": readings.loss(found, rungs[-1]),
            "calibration_search_loss": data["calibration"]["finalists"][data["calibration"]["chosen"]]["search_loss"],
            "history": history,
            "table": found.to_dict(),
        }


def search_documents(texts: Path, tokenizer: Any, calibrated: Calibrated) -> list[Document]:
    """The search documents of the calibration, with their pass keys."""
    lengths = calibrated.data["lengths"]
    wanted = dict(calibrated.documents("search"))
    found = long_documents(texts, tokenizer, lengths[-1], len(wanted), lambda document: document.name in wanted)
    if calibrated.data["retrieval"]:
        found = [with_keys(document, tokenizer, lengths) for document in found]
    if {document.name: fingerprint(document.tokens) for document in found} != wanted:
        raise ValueError(f"texts must be those of the calibration {calibrated.path}, and {texts} has others")
    by_name = {document.name: document for document in found}
    return [by_name[name] for name in wanted]


def draw(part: dict[str, Any], title: str, stem: Path) -> None:
    """Plot perplexity over length, one line per method, and the scores of all tasks."""
    by_task = part["results"]
    if PERPLEXITY in by_task:
        figure = plotting.new_figure(figsize=(8.5, 4.5))
        axes = figure.subplots()
        lengths = report.lengths_in(by_task[PERPLEXITY])
        lines = {
            method: [by_length[str(length)]["second_half_perplexity"] for length in lengths if str(length) in by_length]
            for method, by_length in by_task[PERPLEXITY].items()
        }
        for method, line in lines.items():
            axes.plot(lengths[: len(line)], line, marker="o", markersize=4, **plotting.line(method))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, list(map(plotting.thousands, lengths)))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(xlabel="tokens", ylabel="perplexity of the second half", title=title)
        report.cut_off_explosions(axes, list(lines.values()))
        figure.legend(loc="outside right upper", frameon=False)
        plotting.save(figure, with_ending(stem, "perplexity.png"))
    columns = [(task, length) for task in TASKS if task in by_task for length in report.lengths_in(by_task[task])]
    if columns:
        draw_tasks(by_task, columns, title, with_ending(stem, "tasks.png"))


def draw_tasks(by_task: dict[str, Any], columns: list[tuple[str, int]], title: str, path: Path) -> None:
    """Plot scores: a row per method, a column per task and length; missing figures stay blank."""
    methods = list(dict.fromkeys(method for task, _ in columns for method in by_task[task]))
    scores = [
        [by_task[task].get(method, {}).get(str(length), {}).get("score", math.nan) for task, length in columns]
        for method in methods
    ]
    figure = plotting.new_figure(figsize=(2.5 + 0.75 * len(columns), 1.8 + 0.36 * len(methods)))
    axes = figure.subplots()
    axes.imshow(scores, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    names = [f"{task}\n{plotting.thousands(length)}" for task, length in columns]
    axes.set_xticks(range(len(columns)), names, rotation=45)
    axes.set_yticks(range(len(methods)), methods)
    for i, row in enumerate(scores):
        for j, score in enumerate(row):
            if not math.isnan(score):
                axes.text(j, i, f"{score:.2f}", ha="center", va="center", color="white" if score < 0.6 else "black")
    # suptitle, since with few tasks the axes are narrower than the title.
    figure.suptitle(f"{title}\nshare found", fontsize="medium")
    plotting.save(figure, path)


def scale_studies(
    options: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    trained: NativeRope,
    results: Results,
    time_limit: TimeLimit,
) -> Iterator[ScaleStudy]:
    """The study of every scale, with its tables and documents."""
    found = {one.scale: one for one in map(Calibrated, options.calibrations)}
    assert trained.original_max_position is not None
    for scale in options.scales:
        lengths = lengths_up_to(trained.original_max_position, scale)
        documents = long_documents(options.held_out, tokenizer, lengths[-1], options.documents)
        part = results.part(f"{scale:g}")
        part.data |= {"lengths": lengths, "documents": [document.name for document in documents]}
        tables = tables_to_compare(trained, scale)
        if scale in found:
            tables[CALIBRATED] = found[scale].table
        evaluation = Evaluation(model, tokenizer, documents, lengths, part, options.trials, options.chunk)
        yield ScaleStudy(scale, tables, evaluation, results.data, time_limit, found.get(scale))


def run(options: argparse.Namespace, model: Any, tokenizer: Any) -> Results:
    """Run the study within the time limit."""
    if others := set(options.evolve) - set(options.scales):
        raise ValueError(f"--evolve must be among --scales, {options.scales}, got {sorted(others)}")
    time_limit = TimeLimit(options.minutes)
    trained = trained_with(model, None)
    about = {
        "model": model_loading.short_name(options.model),
        "weights": weights_fingerprint(model),
        "held_out": options.held_out.name,
        **measured_with(model),
    }
    results = Results.resumed(with_ending(options.output, "json"), about)
    by_scale = {one.scale: one for one in scale_studies(options, model, tokenizer, trained, results, time_limit)}
    wanted = stages(options.trials, options.other_trials)
    try:
        for stage in wanted[:2]:
            for one in by_scale.values():
                one.measure(stage)
        for scale in options.evolve:
            by_scale[scale].evolve(options.texts, trained)
        for stage in wanted:
            for one in by_scale.values():
                one.measure(stage)
        results.finish()
    except OutOfTimeError:
        results.finish(f"{options.minutes:g} minutes were over")
    for scale, one in by_scale.items():
        title = f"{about['model']}, scale {scale:g}"
        draw(one.results.data, title, options.output.with_name(f"{options.output.name}_{scale:g}x"))
        print(f"\n{title}\n{report.table(one.results.data)}")
    return results


def parser() -> argparse.ArgumentParser:
    """The parser of the script."""
    options = script_parser(__doc__, "study")
    options.add_argument("model")
    options.add_argument("texts", type=Path)
    options.add_argument("held_out", type=Path)
    options.add_argument("--calibrations", type=Path, nargs="*", default=[])
    options.add_argument("--scales", type=float, nargs="+", default=[2.0, 4.0, 8.0, 16.0])
    options.add_argument("--evolve", type=float, nargs="*", default=[4.0], help="scales to evolve at")
    options.add_argument("--minutes", type=float, default=math.inf)
    options.add_argument("--documents", type=int, default=8, help="held-out documents")
    options.add_argument("--trials", type=int, default=8, help="pass keys per length")
    options.add_argument("--other-trials", type=int, default=4, help="prompts per length of the other tasks")
    options.add_argument("--chunk", type=int, default=524288, help="tokens per forward pass")
    return options


def main() -> None:
    """Measure, print and write."""
    options = parser().parse_args()
    if missing := set(options.evolve) - set(options.scales):
        raise SystemExit(f"--evolve must be of --scales {options.scales}, got {sorted(missing)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = model_loading.load(options.model)
    results = run(options, model, CachingTokenizer(tokenizer))
    print(f"\nwritten: {results.path}", f"({results.data['stopped']})" if results.data["stopped"] else "")


if __name__ == "__main__":
    main()
