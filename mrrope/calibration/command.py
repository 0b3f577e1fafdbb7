"""The command ``mrrope calibrate``."""

from __future__ import annotations

import argparse
import glob
import json
import math
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrrope.calibration import report
from mrrope.calibration.calibrate import Calibration, CalibrationStoppedError
from mrrope.calibration.document_sets import DocumentSets, document_sets, lengths_up_to
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Readings, fingerprint, weights_fingerprint
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation import model_loading
from mrrope.evaluation import report as evaluation_report
from mrrope.evaluation.documents import text_files
from mrrope.evaluation.evaluate import is_out_of_memory
from mrrope.evaluation.results import Results
from mrrope.hf import rope_config
from mrrope.reporting.machine import measured_with
from mrrope.reporting.optional_packages import progress_bar, require
from mrrope.reporting.options import (
    add_forward_options,
    add_model_and_text,
    add_output,
    checked_lengths,
    checked_positive,
)
from mrrope.reporting.output import checked_stem, with_ending
from mrrope.table_lookup import NativeRope
from mrrope.tables import FrequencyTable

DEFAULT_BUDGET = 10.0
DEFAULT_RETRIEVAL = 0.1
BUDGET_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s{postfix}"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope calibrate``."""
    add = command.add_argument
    add_model_and_text(command)
    add("--held-out", metavar="FILE", help="another text, to report on (default: a third of the documents)")
    add("--scale", type=float, required=True, metavar="S", help="factor by which to extend the context")
    add("--lengths", metavar="N,N,...", help="in tokens (default: the native length, doubled up to the scale)")
    add("--original-max-position", type=float, metavar="N", help="extend plain RoPE, trained on N tokens")
    add("--budget", type=float, default=DEFAULT_BUDGET, metavar="MINUTES", help="for the search (default: %(default)s)")
    add(
        "--documents",
        type=int,
        default=6,
        metavar="N",
        help="at most N for search and validation (default: %(default)s)",
    )
    add("--held-out-documents", type=int, default=3, metavar="N", help="at most N to report on (default: %(default)s)")
    add("--join", action="store_true", help="concatenate documents that are too short")
    add(
        "--retrieval",
        type=float,
        default=DEFAULT_RETRIEVAL,
        metavar="W",
        help="weight of hidden pass keys: nats added to the loss if all are forgotten (default: %(default)s)",
    )
    add("--sweep", type=int, metavar="N", help="also measure and plot an N x N grid of bounds (d_l, d_h)")
    add_forward_options(command)
    add_output(
        command,
        "mrrope-calibrate",
        "NAME.table.json, NAME.json, NAME.*.png and NAME.journal, from which an interrupted run resumes",
    )


@dataclass(frozen=True)
class Files:
    """The output files of a calibration."""

    stem: Path

    def named(self, ending: str) -> Path:
        """``NAME.ending``."""
        return with_ending(self.stem, ending)

    @property
    def table(self) -> Path:
        return self.named("table.json")

    def written(self) -> list[Path]:
        """All existing output files."""
        return sorted(self.stem.parent.glob(f"{glob.escape(self.stem.name)}.*"))

    def save_table(self, table: FrequencyTable) -> None:
        """Write the table atomically: a kill leaves either the old or the new one."""
        new = self.named("table.json.new")
        table.save(new)
        new.replace(self.table)


def trained_with(model: Any, original_max_position: float | None) -> NativeRope:
    """The RoPE settings of the model's global layers; ``original_max_position`` replaces them by plain RoPE."""
    held = rope_config.held_attention_factor(model)
    found = {
        NativeRope(own.rotary_dim, own.base, original_max_position, held_attention_factor=held)
        if original_max_position
        else NativeRope(own.rotary_dim, own.base, own.original_max_position, own.native)
        for rotary in rope_config.rotary_embeddings(model)
        for own in (
            rope_config.settings(rotary, layer_type)
            for layer_type in rope_config.layer_types(rotary)
            if not rope_config.is_local(layer_type)
        )
    }
    if len(found) != 1:
        raise ValueError(
            f"model must have one kind of rotary position embedding to calibrate, and {type(model).__name__} has "
            f"{len(found)}"
        )
    trained = found.pop()
    if trained.original_max_position is None:
        raise ValueError("--original-max-position must be given: the model's configuration does not say it")
    return trained


def check(options: argparse.Namespace) -> None:
    """Check the options before a model is loaded."""
    require("matplotlib")
    if not 1.0 < options.scale < math.inf:
        raise ValueError(f"--scale must be a number above 1, got {options.scale:g}")
    if not 0.0 < options.budget < math.inf:
        raise ValueError(f"--budget must be a positive number of minutes, got {options.budget:g}")
    if not 0.0 <= options.retrieval < math.inf:
        raise ValueError(f"--retrieval must be a number, 0 or more, got {options.retrieval:g}")
    if options.original_max_position is not None and not 1.0 <= options.original_max_position < math.inf:
        raise ValueError(f"--original-max-position must be 1 or more, got {options.original_max_position:g}")
    if options.documents < 2:
        raise ValueError(
            f"--documents must be at least 2, one to search and one to decide with, got {options.documents}"
        )
    if options.lengths:
        checked_lengths(options.lengths)
    for option in ("held_out_documents", "chunk", "sweep"):
        checked_positive(f"--{option.replace('_', '-')}", getattr(options, option))
    checked_stem(options.output)
    for text in filter(None, (options.text, options.held_out)):
        text_files(text)


def run(options: argparse.Namespace) -> None:
    """Calibrate and print the report."""
    check(options)
    model, tokenizer = model_loading.load(options.model, dtype=options.dtype, device=options.device)
    results = calibrate(options, model, tokenizer)
    if options.json:
        print(json.dumps(results.data))
    else:
        print(evaluation_report.table(results.data), report.summary(results.data), sep="\n\n")
        print("\nwritten:", *map(str, Files(Path(options.output)).written()))


def calibrate(options: argparse.Namespace, model: Any, tokenizer: Any) -> Results:
    """Calibrate and return the results; the best table so far is on disk at any time."""
    files = Files(Path(options.output))
    trained = trained_with(model, options.original_max_position)
    lengths = chosen_lengths(options, trained)
    documents = chosen_documents(options, tokenizer, lengths)
    about = {
        "model": model_loading.short_name(options.model),
        "weights": weights_fingerprint(model),
        "scale": options.scale,
        "original_max_position": trained.original_max_position,
        "lengths": lengths,
        "chunk": options.chunk,
        "retrieval": options.retrieval,
        "documents": {
            name: [[document.name, fingerprint(document.tokens)] for document in getattr(documents, name)]
            for name in ("search", "decide", "held_out")
        },
        **measured_with(model),
    }
    with closing(Journal(files.named("journal"), about)) as journal:
        results = Results(files.named("json"), about)
        readings = Readings(model, lengths, journal, chunk=options.chunk, retrieval=options.retrieval)
        calibration = Calibration(readings, trained, options.scale, documents, 60 * options.budget)
        try:
            search(calibration, files, results)
            read_reports(calibration, files, results, options.sweep)
        except BudgetSpentError:
            reason = f"--budget must be above {options.budget:g} minutes, which did not do for comparing fixed methods"
            raise stopped(reason, files, results) from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory; a smaller --chunk than {options.chunk} or shorter --lengths need less"
            raise stopped(reason, files, results) from error
        except KeyboardInterrupt:
            results.finish("interrupted")
            raise KeyboardInterrupt(f"the same command resumes from {journal.path}") from None
    results.finish()
    return results


def chosen_documents(options: argparse.Namespace, tokenizer: Any, lengths: list[int]) -> DocumentSets:
    """Three sets of documents as long as the longest length."""
    documents = document_sets(
        options.text,
        tokenizer,
        lengths[-1],
        count=options.documents,
        held_out_count=options.held_out_documents,
        held_out=options.held_out,
        join=options.join,
    )
    return documents.with_keys(tokenizer, lengths) if options.retrieval else documents


def chosen_lengths(options: argparse.Namespace, trained: NativeRope) -> list[int]:
    """The lengths of ``--lengths``; by default the native length, doubled up to the scale."""
    if options.lengths:
        return checked_lengths(options.lengths)
    assert trained.original_max_position is not None
    return lengths_up_to(trained.original_max_position, options.scale)


def search(calibration: Calibration, files: Files, results: Results) -> None:
    """Search for the table and write it; the progress bar shows the budget."""
    before = len(calibration.readings.journal)
    with progress_bar(desc="calibrate", total=round(calibration.seconds), bar_format=BUDGET_BAR) as bar:
        if before:
            bar.write(f"resuming with {before} readings from {calibration.readings.journal.path}", file=sys.stderr)

        def progress(seconds: float) -> None:
            bar.update(min(round(seconds), bar.total) - bar.n)

        def improved(part: str, table: FrequencyTable, loss: float) -> None:
            files.save_table(table)
            bar.set_postfix_str(f"loss {loss:.4f} by {part}")

        calibration.readings.progress = progress
        calibration.improved = improved
        chosen = calibration.run()
        calibration.readings.progress = lambda _: None
    files.save_table(calibration.finalists[chosen].table)
    results.data["calibration"] = {
        "chosen": chosen,
        "seconds": calibration.readings.spent,
        "readings": calibration.readings.count,
        "finalists": {part: {**vars(one), "table": one.table.to_dict()} for part, one in calibration.finalists.items()},
    }
    results.save()


def read_reports(calibration: Calibration, files: Files, results: Results, sweep: int | None) -> None:
    """Measure the held-out documents and draw the plots."""
    table = FrequencyTable.load(files.table)
    report.read_held_out(calibration, table, results)
    evaluation_report.draw(results.data, files.stem)
    results.data["calibration"]["held_out_geometric_means"] = report.geometric_means(results)
    if sweep:
        results.data["sweep"] = report.read_sweep(calibration, sweep)
        report.draw_sweep(results.data["sweep"], files.named("sweep.png"))


def stopped(reason: str, files: Files, results: Results) -> CalibrationStoppedError:
    """Record the reason in the results and return the error to raise."""
    results.finish(reason)
    table = f", the best table so far in {files.table}" if files.table.exists() else ""
    return CalibrationStoppedError(f"{reason}. What was read is in {files.named('journal')}{table}")
