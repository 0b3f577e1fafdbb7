"""Variation over seeds: small byte-level models, trained from scratch with several seeds, then extended.

    python studies/small_model_study.py TRAIN HELD_OUT [--models FOLDER] [--head-dims 64 128] [--seeds 0 1 2]
        [--minutes-per-model 0.8] [--scales 2 4 8 16] [--documents 8] [--trials 32] [--calibrate 8]
        [--calibration-seconds 5] [--minutes N] [--output benchmarks/results/small_models]

TRAIN and HELD_OUT are files or folders as for mrrope eval: TRAIN of 20 MB or more, HELD_OUT with documents of at least
16K bytes, which are sampled evenly. The models have 25M parameters and a trained length of 1024 bytes. Half of the
training rows contain pass keys; a model that finds less than 95 % of them at the trained length is excluded. At every
scale S each method, and the stock model over windows of the trained length, is measured on held-out documents and on
pass keys at S times the trained length. At the scales of --calibrate a calibrated table is measured too; its search
uses other documents of HELD_OUT.

Models are stored in FOLDER, figures in NAME.json and NAME.png. After --minutes the study stops; a second run resumes
it, also with other head_dims or minutes per model.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compared_tables import as_methods, tables_to_compare
from small_model_training import ByteTokenizer, Recipe, Shape, trained_model
from study_script import OutOfTimeError, TimeLimit, script_parser
from transformers import LlamaForCausalLM

from mrrope.calibration.calibrate import Calibration
from mrrope.calibration.command import DEFAULT_RETRIEVAL, trained_with
from mrrope.calibration.document_sets import DocumentSets, lengths_up_to
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Readings
from mrrope.calibration.report import CALIBRATED
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation.chunked_reader import Reader, ReaderMaker, greedy_answers
from mrrope.evaluation.documents import Document, long_documents, read_texts
from mrrope.evaluation.model_loading import chosen_device, chosen_dtype
from mrrope.evaluation.perplexity import document_losses, perplexity
from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.results import Results
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.reporting import plotting
from mrrope.reporting.machine import measured_with
from mrrope.reporting.output import with_ending
from mrrope.tables.frequency_table import FrequencyTable

ANSWER = 8
"""Tokens of an answer: a space, five digits and what follows."""
CALIBRATION_DOCUMENTS = 8
FIGURES = {"perplexity": "second_half_perplexity", "passkey": "score"}


@dataclass(frozen=True)
class Examined:
    """A trained model and the documents and trials it is measured on."""

    model: LlamaForCausalLM
    documents: Sequence[Document]
    trials: int
    chunk: int

    def perplexities(self, lengths: Sequence[int], reader: ReaderMaker = Reader) -> dict[int, dict[str, float]]:
        """Perplexities of both protocols at every length."""
        found = [
            list(document_losses(self.model, one.tokens, lengths, chunk=self.chunk, reader=reader))
            for one in self.documents
        ]
        return {
            losses[0].length: {
                "perplexity": perplexity([loss.whole for loss in losses]),
                "second_half_perplexity": perplexity([loss.second_half for loss in losses]),
            }
            for losses in zip(*found, strict=True)
        }

    def passkeys(self, length: int, reader: ReaderMaker = Reader) -> float:
        """Share of pass keys found; prompt and answer together have the length."""
        trials = TASKS["passkey"](Haystack(ByteTokenizer(), self.documents), length - ANSWER, self.trials)
        answers = greedy_answers(
            self.model, [trial.prompt for trial in trials], [ANSWER] * len(trials), chunk=self.chunk, reader=reader
        )
        return statistics.fmean(trial.score(answer) for trial, answer in zip(trials, answers, strict=True))


def calibrated(examined: Examined, documents: DocumentSets, scale: float, seconds: float) -> FrequencyTable:
    """Calibrate a table for the model; the journal is temporary, since this takes seconds."""
    trained = trained_with(examined.model, None)
    assert trained.original_max_position is not None
    lengths = lengths_up_to(trained.original_max_position, scale)
    keyed = documents.with_keys(ByteTokenizer(), lengths)
    with tempfile.TemporaryDirectory() as folder, closing(Journal(Path(folder) / "journal", {})) as journal:
        readings = Readings(examined.model, lengths, journal, chunk=examined.chunk, retrieval=DEFAULT_RETRIEVAL)
        calibration = Calibration(readings, trained, scale, keyed, seconds)
        try:
            return calibration.finalists[calibration.run()].table
        except BudgetSpentError:
            raise ValueError(f"--calibration-seconds must be enough for the fixed methods, got {seconds:g}") from None


def measure(
    examined: Examined, others: DocumentSets, options: argparse.Namespace, part: Results, time_limit: TimeLimit
) -> None:
    """Measure every method at every scale; known figures are skipped."""
    trained = trained_with(examined.model, None)
    assert trained.original_max_position is not None
    known = part.data.setdefault("calibrated", {})
    for scale in options.scales:
        lengths = lengths_up_to(trained.original_max_position, scale)
        tables = tables_to_compare(trained, scale)
        if scale in options.calibrate:
            if f"{scale:g}" not in known:
                time_limit.check(options.calibration_seconds)
                known[f"{scale:g}"] = calibrated(examined, others, scale, options.calibration_seconds).to_dict()
            tables[CALIBRATED] = FrequencyTable.from_dict(known[f"{scale:g}"])
        for method in as_methods(tables):
            if method.name not in part.data["results"].get(f"passkey {scale:g}", {}):
                time_limit.check()
                with method.applied(examined.model):
                    reader = method.reader(examined.model, ByteTokenizer())
                    for length, figures in examined.perplexities(lengths, reader).items():
                        part.put(f"perplexity {scale:g}", method.name, length, figures)
                    score = examined.passkeys(lengths[-1], reader)
                    part.put(f"passkey {scale:g}", method.name, lengths[-1], {"score": score})


def over_seeds(data: dict[str, Any], head_dim: int, scale: float, task: str, method: str) -> list[float]:
    """The figures of all judged models at the longest length: perplexity or pass keys."""
    return [
        by_length[max(by_length, key=int)][FIGURES[task]]
        for part in data["parts"].values()
        if part.get("head_dim") == head_dim and part["judged"]
        if (by_length := part["results"].get(f"{task} {scale:g}", {}).get(method))
    ]


def summarised(data: dict[str, Any]) -> dict[str, Any]:
    """Mean and range over seeds, by head_dim, task, method and scale."""
    tasks = [by_method for part in data["parts"].values() for by_method in part["results"].values()]
    methods = dict.fromkeys(method for by_method in tasks for method in by_method)

    def by_scale(head_dim: int, task: str, method: str) -> dict[str, dict[str, float]]:
        return {
            f"{scale:g}": {
                "mean": statistics.fmean(figures),
                "lowest": min(figures),
                "highest": max(figures),
                "models": len(figures),
            }
            for scale in data["scales"]
            if (figures := over_seeds(data, head_dim, scale, task, method))
        }

    return {
        str(head_dim): {task: {method: by_scale(head_dim, task, method) for method in methods} for task in FIGURES}
        for head_dim in data["head_dims"]
    }


def table(data: dict[str, Any]) -> str:
    """The summary as text."""
    lines = []
    for head_dim, by_task in data["summary"].items():
        for task, by_method in by_task.items():
            lines += ["", f"head_dim {head_dim}, {task}: mean, lowest, highest over seeds"]
            lines.append(" " * 16 + "".join(f"{scale:>23g}x" for scale in data["scales"]))
            for method, by_scale in by_method.items():
                cells = [by_scale.get(f"{scale:g}") for scale in data["scales"]]
                shown = (
                    f"{cell['mean']:>8.2f}{cell['lowest']:>8.2f}{cell['highest']:>8.2f}" if cell else f"{'-':>24}"
                    for cell in cells
                )
                lines.append(f"{method:<16}" + "".join(shown))
    return "\n".join(lines)


def draw(data: dict[str, Any], path: Path) -> None:
    """Plot mean and range over seeds by scale, one panel per head_dim and task."""
    wide = len(data["head_dims"])
    figure = plotting.new_figure(figsize=(2 + 4.5 * wide, 8))
    panels = figure.subplots(len(FIGURES), wide, squeeze=False)
    for row, task in zip(panels, FIGURES, strict=True):
        for axes, (head_dim, by_task) in zip(row, data["summary"].items(), strict=True):
            means: list[list[float]] = []
            for method, by_scale in by_task[task].items():
                cells = list(by_scale.values())
                means.append([cell["mean"] for cell in cells])
                # Shifted horizontally, so that error bars do not overlap.
                places = [float(scale) * 1.015 ** len(means) for scale in by_scale]
                spread = [
                    [cell["mean"] - cell["lowest"] for cell in cells],
                    [cell["highest"] - cell["mean"] for cell in cells],
                ]
                axes.errorbar(places, means[-1], spread, marker="o", markersize=4, capsize=3, **plotting.line(method))
            axes.set_xscale("log", base=2)
            axes.set_xticks(data["scales"], [f"{scale:g}x" for scale in data["scales"]])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set(title=f"head_dim {head_dim}", xlabel="scale", ylabel=task)
            if task == "passkey":
                axes.set_ylim(-0.03, 1.03)
            elif any(means):
                # Perplexity is at least 1.
                axes.set_ylim(bottom=1.0, top=min(axes.get_ylim()[1], 3 * min(max(line) for line in means if line)))
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False)
    plotting.save(figure, path)


def training_summary(part: dict[str, Any]) -> str:
    """One line about a model's training."""
    training = part["training"]
    return (
        f"{training['parameters'] / 1e6:.1f}M parameters, {training['tokens'] / 1e6:.1f}M tokens in "
        f"{training['seconds']:.0f} s, loss {training['losses'][-1][1]:.3f}, {part['passkey']:.0%} of pass keys"
        + ("" if part["judged"] else ": not judged")
    )


def evenly(documents: Sequence[Document], count: int) -> list[Document]:
    """``count`` documents, evenly spaced over the list."""
    return [documents[i * len(documents) // count] for i in range(min(count, len(documents)))]


def training_text(path: Path, device: torch.device) -> torch.Tensor:
    """All documents, concatenated, as bytes."""
    data = bytearray("\n".join(text for _, text in read_texts(path)).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def run(options: argparse.Namespace) -> Results:
    """Train, measure and extend the models within the time limit."""
    time_limit = TimeLimit(options.minutes)
    device = chosen_device()
    shapes = {head_dim: Shape(head_dim, **options.shape) for head_dim in options.head_dims}
    recipe = Recipe(60 * options.minutes_per_model, **options.recipe)
    longest = round(max(options.scales) * shapes[options.head_dims[0]].trained_length)
    found = long_documents(options.held_out, ByteTokenizer(), longest)
    documents = evenly(found, options.documents)
    rest = evenly([document for document in found if document not in documents], CALIBRATION_DOCUMENTS)
    others = DocumentSets(rest[::2], rest[1::2], [])
    text = training_text(options.train, device)
    about = {
        "train": options.train.name,
        "train_bytes": len(text),
        "held_out": [document.name for document in documents],
        "scales": options.scales,
        "trained_length": shapes[options.head_dims[0]].trained_length,
        "trials": options.trials,
        "enough": options.enough,
    }
    results = Results.resumed(with_ending(options.output, "json"), about)
    results.data.setdefault("parts", {})
    ready: dict[Shape, LlamaForCausalLM] = {}
    stopped = None
    try:
        # Seeds in the outer loop, so that a time limit leaves results for every head_dim.
        for seed in options.seeds:
            for head_dim, shape in shapes.items():
                name = f"head{head_dim}_seed{seed}"
                time_limit.check()
                part = results.part(name)
                folder = options.models / name
                training = trained_model(folder, shape, seed, text, recipe, ready)
                if part.data.get("training") != training:  # retrained since
                    part.data.clear()
                    part.data |= {"results": {}, "training": training}
                model = LlamaForCausalLM.from_pretrained(folder, dtype=chosen_dtype(None, device)).to(device).eval()
                examined = Examined(model, documents, options.trials, options.chunk)
                if "judged" not in part.data:
                    share = examined.passkeys(shape.trained_length)
                    judged = share >= options.enough
                    part.data |= {"head_dim": head_dim, "seed": seed, "passkey": share, "judged": judged}
                    results.data |= measured_with(model)
                    results.save()
                print(f"{name}: {training_summary(part.data)}", flush=True)
                if part.data["judged"]:
                    measure(examined, others, options, part, time_limit)
    except OutOfTimeError:
        stopped = f"{options.minutes:g} minutes were over"
    known = {part["head_dim"] for part in results.data["parts"].values() if "judged" in part}
    results.data["head_dims"] = sorted({*known, *options.head_dims})
    results.data["summary"] = summarised(results.data)
    results.finish(stopped)
    print(table(results.data))
    draw(results.data, with_ending(options.output, "png"))
    return results


def parser() -> argparse.ArgumentParser:
    """The parser of the script."""
    options = script_parser(__doc__, "small_models")
    options.add_argument("train", type=Path)
    options.add_argument("held_out", type=Path)
    options.add_argument("--models", type=Path, default=Path("build/small_models"))
    options.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--shape", type=json.loads, default={}, help="JSON of Shape fields to change")
    options.add_argument("--recipe", type=json.loads, default={}, help="JSON of Recipe fields to change")
    options.add_argument("--minutes-per-model", type=float, default=0.8)
    options.add_argument("--scales", type=float, nargs="+", default=[2.0, 4.0, 8.0, 16.0])
    options.add_argument("--documents", type=int, default=8)
    options.add_argument("--trials", type=int, default=32)
    options.add_argument("--enough", type=float, default=0.95, help="share of pass keys to find at the trained length")
    options.add_argument("--calibrate", type=float, nargs="*", default=[8.0], help="scales to calibrate at")
    options.add_argument("--calibration-seconds", type=float, default=5.0)
    options.add_argument("--chunk", type=int, default=524288, help="tokens per forward pass")
    options.add_argument("--minutes", type=float, default=math.inf)
    return options


def main() -> None:
    """Train, measure, print and write."""
    options = parser().parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    results = run(options)
    print(f"\nwritten: {results.path}", f"({results.data['stopped']})" if results.data["stopped"] else "")


if __name__ == "__main__":
    main()
