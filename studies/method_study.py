"""Every method at every scale on one model: perplexity by length, and all tasks of mrrope eval at the two longest.

    python studies/method_study.py MODEL TEXTS HELD_OUT [--calibrations benchmarks/results/calibration_*x.json]
        [--scales 2 4 8 16] [--evolve 4] [--minutes N] [--documents 8] [--trials 8] [--other-trials 4]
        [--chunk 524288] [--output benchmarks/results/study]

MODEL, TEXTS and HELD_OUT as studies/calibration_study.py takes them; its results, with the tables and journals
beside them, bring the calibrated table of each scale, and what it measured is not measured again if it had the same
--documents. At the scales of --evolve an evolutionary search reads as many tokens as the calibration did, of the same
documents of TEXTS, and its table is compared with the others.

What matters most comes first; after --minutes it stops and keeps what it has. Run again, it goes on. It writes
NAME.json, and NAME_Sx.perplexity.png and NAME_Sx.tasks.png for every scale S.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compared_tables import EVOLVED, HOPELESS, as_methods, contenders
from evolution import TokenLimitedReadings, TableGenes, evolve

from mrrope.calibration.calibrate import Calibration
from mrrope.calibration.command import trained_with
from mrrope.calibration.document_sets import DocumentSets, lengths_up_to
from mrrope.calibration.journal import Journal
from mrrope.calibration.pass_keys import with_keys
from mrrope.calibration.objective import fingerprint, weights_fingerprint
from mrrope.calibration.report import CALIBRATED
from mrrope.calibration.search import Point
from mrrope.evaluation import models, report
from mrrope.evaluation.command import machine
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.results import Results
from mrrope.evaluation.evaluate import PERPLEXITY, Evaluation
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.evaluation.documents import Document, long_documents
from mrrope.reporting import plotting
from mrrope.table_lookup import NativeRope
from mrrope.tables import FrequencyTable

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PASSKEY = "passkey"
HOPELESS_TRIALS = 2
LONG_TEXT = 10_000
SAME = ("weights", "dtype", "device", "torch")
"""What has to agree for figures of another file to be as good as measured."""


class OutOfTimeError(Exception):
    """The minutes are over."""


class Clock:
    """How long there is."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def check(self, seconds: float = 0.0) -> None:
        """Raises OutOfTimeError where there are not so many seconds left."""
        if time.monotonic() + seconds > self.end:
            raise OutOfTimeError


class CachingTokenizer:
    """A tokenizer that remembers what it made of long texts, which several scales want."""

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
    """What studies/calibration_study.py left of one scale."""

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
        """By search and decision, which are the journal's first readings; their keys end with how many tokens."""
        lines = self.path.with_suffix(".journal").read_text().splitlines()[1:]
        return sum(int(json.loads(line)["key"].split()[-1]) for line in lines[: self.data["calibration"]["readings"]])

    def documents(self, which: str) -> list[list[str]]:
        """Name and fingerprint of each."""
        found: list[list[str]] = self.data["documents"][which]
        return found


@dataclass(frozen=True)
class Stage:
    """A task, at some of a scale's lengths."""

    task: str
    lengths: slice
    trials: int


def stages(trials: int, other_trials: int) -> list[Stage]:
    """What matters most first, and the longest lengths, which take longest, last."""
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
    clock: Clock
    calibrated: Calibrated | None = None

    @property
    def results(self) -> Results:
        return self.evaluation.results

    def measure(self, stage: Stage) -> None:
        """One task with every method, but for what is known already."""
        lengths = list(self.evaluation.lengths)[stage.lengths]
        # One reading gives the perplexities of all lengths.
        together = [lengths] if stage.task == PERPLEXITY else [[length] for length in lengths]
        for method in as_methods(self.tables):
            trials = min(stage.trials, HOPELESS_TRIALS) if method.name in HOPELESS else stage.trials
            for some in together:
                if not self.is_known(stage.task, method, some, trials):
                    self.clock.check()
                    with method.applied(self.evaluation.model):
                        replace(self.evaluation, lengths=some, trials=trials).measure(stage.task, method)

    def is_known(self, task: str, method: Method, lengths: list[int], trials: int) -> bool:
        """Whether all figures are there, or can be had from the calibration, which are then kept."""
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
        """The study's own figures, and the calibration's where it measured the same model on the same documents."""
        found = [self.results.data]
        if self.calibrated is not None:
            documents = [[document.name, fingerprint(document.tokens)] for document in self.evaluation.documents]
            same = all(self.calibrated.data.get(name) == self.about[name] for name in SAME)
            if same and self.calibrated.documents("held_out") == documents:
                found.append(self.calibrated.data)
        return found

    def evolve(self, texts: Path, trained: NativeRope) -> None:
        """Adds the table that evolution finds with as many tokens as the calibration had, unless it is there."""
        if self.calibrated is None:
            raise ValueError(f"--evolve must be scales that --calibrations has, got {self.scale:g}")
        if "evolution" not in self.results.data:
            self.clock.check(self.calibrated.data["calibration"]["seconds"])
            self.results.data["evolution"] = self.evolved(texts, trained, self.calibrated)
        self.tables[EVOLVED] = FrequencyTable.from_dict(self.results.data["evolution"]["table"])

    def evolved(self, texts: Path, trained: NativeRope, calibrated: Calibrated) -> dict[str, Any]:
        """What came of the search, and its readings on the way."""
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
                ration=calibrated.tokens_read(),
                progress=lambda _: self.clock.check(),
            )
            rungs = Calibration(readings, trained, self.scale, DocumentSets(documents, [], []), math.inf).rungs
            fixed = contenders(trained, self.scale)
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
            "tokens_allowed": readings.ration,
            "tokens": readings.tokens,
            "readings": readings.count,
            "seconds": readings.spent,
            "search_loss": readings.loss(found, rungs[-1]),
            "calibration_search_loss": data["calibration"]["finalists"][data["calibration"]["chosen"]]["search_loss"],
            "history": history,
            "table": found.to_dict(),
        }


def search_documents(texts: Path, tokenizer: Any, calibrated: Calibrated) -> list[Document]:
    """The very documents that the calibration searched with, keys and all."""
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
    """Perplexity over length, a line a method; and the share that each found in every task."""
    from matplotlib.figure import Figure

    by_task = part["results"]
    if PERPLEXITY in by_task:
        figure = Figure(figsize=(8.5, 4.5), layout="constrained")
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
        plotting.save(figure, stem.with_name(f"{stem.name}.perplexity.png"))
    columns = [(task, length) for task in TASKS if task in by_task for length in report.lengths_in(by_task[task])]
    if columns:
        draw_tasks(by_task, columns, title, stem.with_name(f"{stem.name}.tasks.png"))


def draw_tasks(by_task: dict[str, Any], columns: list[tuple[str, int]], title: str, path: Path) -> None:
    """A row a method, a column a task and length; what was not measured stays empty."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(method for task, _ in columns for method in by_task[task]))
    scores = [
        [by_task[task].get(method, {}).get(str(length), {}).get("score", math.nan) for task, length in columns]
        for method in methods
    ]
    figure = Figure(figsize=(2.5 + 0.75 * len(columns), 1.8 + 0.36 * len(methods)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(scores, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    names = [f"{task}\n{plotting.thousands(length)}" for task, length in columns]
    axes.set_xticks(range(len(columns)), names, rotation=45)
    axes.set_yticks(range(len(methods)), methods)
    for i, row in enumerate(scores):
        for j, score in enumerate(row):
            if not math.isnan(score):
                axes.text(j, i, f"{score:.2f}", ha="center", va="center", color="white" if score < 0.6 else "black")
    # Over the whole picture, which few tasks make narrower than a line of it.
    figure.suptitle(f"{title}\nshare found", fontsize="medium")
    plotting.save(figure, path)


def scale_studies(
    options: argparse.Namespace, model: Any, tokenizer: Any, trained: NativeRope, results: Results, clock: Clock
) -> Iterator[ScaleStudy]:
    """The scales, each with its methods and documents."""
    found = {one.scale: one for one in map(Calibrated, options.calibrations)}
    assert trained.original_max_position is not None
    for scale in options.scales:
        lengths = lengths_up_to(trained.original_max_position, scale)
        documents = long_documents(options.held_out, tokenizer, lengths[-1], options.documents)
        part = results.part(f"{scale:g}")
        part.data |= {"lengths": lengths, "documents": [document.name for document in documents]}
        tables = contenders(trained, scale)
        if scale in found:
            tables[CALIBRATED] = found[scale].table
        evaluation = Evaluation(model, tokenizer, documents, lengths, part, options.trials, options.chunk)
        yield ScaleStudy(scale, tables, evaluation, results.data, clock, found.get(scale))


def run(options: argparse.Namespace, model: Any, tokenizer: Any) -> Results:
    """As much of the study as there is time for."""
    if others := set(options.evolve) - set(options.scales):
        raise ValueError(f"--evolve must be among --scales, {options.scales}, got {sorted(others)}")
    clock = Clock(options.minutes)
    trained = trained_with(model, None)
    about = {
        "model": models.short_name(options.model),
        "weights": weights_fingerprint(model),
        "held_out": options.held_out.name,
        **machine(model),
    }
    results = Results.going_on(options.output.with_name(f"{options.output.name}.json"), about)
    by_scale = {one.scale: one for one in scale_studies(options, model, tokenizer, trained, results, clock)}
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
    """Everything that can be chosen."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("texts", type=Path)
    options.add_argument("held_out", type=Path)
    options.add_argument("--calibrations", type=Path, nargs="*", default=[])
    options.add_argument("--scales", type=float, nargs="+", default=[2.0, 4.0, 8.0, 16.0])
    options.add_argument("--evolve", type=float, nargs="*", default=[4.0], help="of the scales")
    options.add_argument("--minutes", type=float, default=math.inf)
    options.add_argument("--documents", type=int, default=8, help="held-out ones, at scales without a calibration")
    options.add_argument("--trials", type=int, default=8, help="pass keys a length")
    options.add_argument("--other-trials", type=int, default=4, help="prompts a length, in other tasks")
    options.add_argument("--chunk", type=int, default=524288, help="tokens read at a time")
    options.add_argument("--output", type=Path, default=RESULTS / "study", help="where to write, without ending")
    return options


def main() -> None:
    """Measures, prints, writes."""
    options = parser().parse_args()
    if missing := set(options.evolve) - set(options.scales):
        raise SystemExit(f"--evolve must be of --scales {options.scales}, got {sorted(missing)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = models.load(options.model)
    results = run(options, model, CachingTokenizer(tokenizer))
    print(f"\nwritten: {results.path}", f"({results.data['stopped']})" if results.data["stopped"] else "")


if __name__ == "__main__":
    main()
