"""The command ``mrrope calibrate``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrrope.calibration import report
from mrrope.calibration.calibrate import Calibration, CalibrationStoppedError
from mrrope.calibration.descent import LEARNING_RATE
from mrrope.calibration.document_sets import DocumentSets, document_sets, lengths_up_to
from mrrope.calibration.gradient import GradientCalibration, why_no_query_factors
from mrrope.calibration.journal import Journal, UnsavedJournal
from mrrope.calibration.kinds import named_texts
from mrrope.calibration.learnable_tables import SHARINGS
from mrrope.calibration.objective import Readings, fingerprint, weights_fingerprint
from mrrope.calibration.output_files import Files
from mrrope.calibration.processes import ALONE, Processes, joined_processes, local_device
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation import model_loading
from mrrope.evaluation import report as evaluation_report
from mrrope.evaluation.documents import Document, long_documents, opening_tokens, text_files
from mrrope.evaluation.evaluate import is_out_of_memory
from mrrope.evaluation.results import Results, UnsavedResults
from mrrope.evaluation.truncated import SHIFTS_PER_WINDOW, TRUNCATED, Truncation
from mrrope.hf import rope_config
from mrrope.reporting.machine import measured_with
from mrrope.reporting.optional_packages import progress_bar, require
from mrrope.reporting.options import (
    add_forward_options,
    add_model_and_text,
    add_original_max_position,
    add_output,
    checked_lengths,
    checked_original_max_position,
    checked_positive,
)
from mrrope.reporting.output import checked_stem
from mrrope.tables import shipped
from mrrope.tables.frequency_table import SCALE_ONLY_METHODS, FrequencyTable
from mrrope.tables.lookup import ModelTables, NativeRope, is_saved_table, load_tables, resolve_table

DEFAULT_BUDGET = 10.0
DEFAULT_DOCUMENTS = 6
DEFAULT_HELD_OUT = 3
DEFAULT_RETRIEVAL = 0.1
GRADIENT_DOCUMENTS = 64
GRADIENT_RETRIEVAL = 0.4
MAX_DECIDING = 4
"""Validation documents of a search by gradient, which reads them five times and more; the others are for the search.
More texts than that have one each."""
BUDGET_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s{postfix}"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope calibrate``."""
    add = command.add_argument
    add_model_and_text(command, several="repeated for texts of several kinds, which get equal shares of the search")
    add("--held-out", metavar="FILE", help="another text, to report on (default: a third of the documents)")
    add(
        "--other-text",
        action="append",
        default=[],
        metavar="FILE",
        help="a text of another kind, repeated for several, to report on in a column of their own",
    )
    add("--scale", type=float, required=True, metavar="S", help="factor by which to extend the context")
    add("--per", metavar="PART", help=f"what gets a table of its own: {', '.join(SHARINGS)} (default: model)")
    add(
        "--query-factors",
        action=argparse.BooleanOptionalAction,
        help="with --per head: find a factor for every query head, too (default: where the model can be patched with "
        "them)",
    )
    add(
        "--by",
        metavar="METHOD",
        help="search, without gradients, or gradient (default: search; gradient with --per layer or head)",
    )
    add(
        "--start",
        metavar="TABLES",
        help="by gradient: a method, a .json or a shipped name to start from (default: the best fixed method)",
    )
    add(
        "--learning-rate",
        type=float,
        metavar="R",
        help=f"by gradient: peak step of the log scale of slow pairs (default: {LEARNING_RATE})",
    )
    add("--lengths", metavar="N,N,...", help="in tokens (default: the native length, doubled up to the scale)")
    add_original_max_position(command)
    add(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET,
        metavar="MINUTES",
        help="for the search; the report on held-out documents follows (default: %(default)s)",
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        help="at most N for search and validation, as many of each text (default: "
        f"{DEFAULT_DOCUMENTS}; by gradient {GRADIENT_DOCUMENTS})",
    )
    add(
        "--held-out-documents",
        type=int,
        metavar="N",
        help=f"at most N to report on, as many of each text (default: {DEFAULT_HELD_OUT})",
    )
    add("--join", action="store_true", help="concatenate documents that are too short")
    add(
        "--retrieval",
        type=float,
        metavar="W",
        help="weight of hidden pass keys: nats added to the loss if all are forgotten (default: "
        f"{DEFAULT_RETRIEVAL}; by gradient {GRADIENT_RETRIEVAL}, times the loss of their digits)",
    )
    add("--sweep", type=int, metavar="N", help="also measure and plot an N x N grid of bounds (d_l, d_h)")
    add_forward_options(command)
    add_output(
        command,
        "mrrope-calibrate",
        "NAME.table.json, NAME.json, NAME.*.png and NAME.journal, from which an interrupted run resumes",
    )


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


def by_gradient(options: argparse.Namespace) -> bool:
    """Whether to search by gradient: with ``--by gradient``, and for tables per layer or head.

    Raises:
        ValueError: the options contradict each other.
    """
    if options.per not in (None, *SHARINGS):
        raise ValueError(f"--per must be {', '.join(SHARINGS[:-1])} or {SHARINGS[-1]}, got {options.per!r}")
    if options.by not in (None, "search", "gradient"):
        raise ValueError(f"--by must be search or gradient, got {options.by!r}")
    if options.query_factors is not None and options.per != "head":
        given = "--query-factors" if options.query_factors else "--no-query-factors"
        raise ValueError(f"{given} goes with --per head, got --per {options.per or 'model'}")
    is_by_part = options.per in ("layer", "head")
    if is_by_part and options.by == "search":
        raise ValueError(
            f"--by must be gradient with --per {options.per}, got search, which finds one table for the model"
        )
    found = is_by_part or options.by == "gradient"
    if found and options.sweep:
        raise ValueError(f"--sweep goes with --by search, got {options.sweep} with a search by gradient")
    if not found:
        for option in ("start", "learning_rate"):
            if (value := getattr(options, option)) is not None:
                raise ValueError(f"--{option.replace('_', '-')} goes with --by gradient, got {value}")
    return bool(found)


def check(options: argparse.Namespace) -> None:
    """Check the options before a model is loaded, and fill in the defaults that depend on others."""
    require("matplotlib")
    is_gradient = by_gradient(options)
    texts = len(options.text)
    reported_texts = texts if options.held_out is None else 1
    if options.documents is None:
        default = GRADIENT_DOCUMENTS if is_gradient else DEFAULT_DOCUMENTS
        options.documents = texts * max(2, math.ceil(default / texts))
    if options.held_out_documents is None:
        options.held_out_documents = reported_texts * math.ceil(DEFAULT_HELD_OUT / reported_texts)
    if options.retrieval is None:
        options.retrieval = GRADIENT_RETRIEVAL if is_gradient else DEFAULT_RETRIEVAL
    if is_gradient and options.learning_rate is None:
        options.learning_rate = LEARNING_RATE
    if not 1.0 < options.scale < math.inf:
        raise ValueError(f"--scale must be a number above 1, got {options.scale:g}")
    if not 0.0 < options.budget < math.inf:
        raise ValueError(f"--budget must be a positive number of minutes, got {options.budget:g}")
    if not 0.0 <= options.retrieval < math.inf:
        raise ValueError(f"--retrieval must be a number, 0 or more, got {options.retrieval:g}")
    if options.learning_rate is not None and not 0.0 < options.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be a positive number, got {options.learning_rate:g}")
    checked_original_max_position(options.original_max_position)
    each = "" if texts == 1 else f" of each of {texts} texts"
    if options.documents < 2 * texts:
        raise ValueError(
            f"--documents must be at least {2 * texts}, one to search and one to decide with{each}, got "
            f"{options.documents}"
        )
    if options.lengths:
        checked_lengths(options.lengths)
    for option in ("held_out_documents", "chunk", "sweep"):
        checked_positive(f"--{option.replace('_', '-')}", getattr(options, option))
    if options.held_out_documents < reported_texts:
        raise ValueError(
            f"--held-out-documents must be at least {reported_texts}, one{each}, got {options.held_out_documents}"
        )
    checked_stem(options.output)
    for option, paths in (("text", options.text), ("other-text", options.other_text)):
        if repeated := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"--{option} must be another text each time, got {repeated[0]} {len(repeated)} times")
    for path in (*options.text, *filter(None, [options.held_out]), *options.other_text):
        text_files(path)
    if options.start and not is_saved_table(options.start) and options.start not in SCALE_ONLY_METHODS:
        raise ValueError(
            f"--start must be one of {', '.join(SCALE_ONLY_METHODS)}, a .json of tables or a shipped name "
            f"({shipped.listed()}), got {options.start!r}"
        )


def run(options: argparse.Namespace) -> None:
    """Calibrate and print the report; of several processes by gradient, the first prints."""
    check(options)
    device = local_device(options.device) if by_gradient(options) else options.device
    model, tokenizer = model_loading.load(options.model, dtype=options.dtype, device=device)
    if not by_gradient(options):
        results = calibrate(options, model, tokenizer)
    else:
        with joined_processes(model.device) as processes:
            results = calibrate(options, model, tokenizer, processes)
        if not processes.is_first:
            return
    if options.json:
        print(json.dumps(results.data))
    else:
        print(evaluation_report.table(results.data), report.summary(results.data), sep="\n\n")
        files = Files(Path(options.output))
        print("\nwritten:", *files.written(by_gradient=by_gradient(options), with_sweep=bool(options.sweep)))
        if options.original_max_position is not None:
            length = f"{options.original_max_position:.15g}"
            print(
                f"to use the table: mrrope.patch(model, {str(files.table)!r}, original_max_position={length}), and "
                f"--original-max-position {length} of mrrope eval and mrrope export"
            )


def calibrate(
    options: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    processes: Processes = ALONE,
) -> Results:
    """Calibrate and return the results; the best table so far is on disk at any time.

    Of several processes, the first writes files and measures the report.
    """
    trained = trained_with(model, options.original_max_position)
    has_query_factors = searches_query_factors(options, model, trained, processes)
    lengths = chosen_lengths(options, trained)
    documents = chosen_documents(options, tokenizer, lengths)
    others = [
        replace(document, kind=name)
        for name, path in named_texts(options.other_text).items()
        for document in long_documents(path, tokenizer, lengths[-1])
    ]
    about = {
        "model": model_loading.short_name(options.model),
        "weights": weights_fingerprint(model),
        "scale": options.scale,
        "original_max_position": trained.original_max_position,
        "plain_rope": options.original_max_position is not None,
        "lengths": lengths,
        "chunk": options.chunk,
        "retrieval": options.retrieval,
        "documents": {
            name: [[document.name, fingerprint(document.tokens)] for document in getattr(documents, name)]
            for name in ("search", "decide", "held_out")
        },
        "texts": documents.texts(),
        **gradient_settings(options, processes),
        # Runs without them are those of releases that had none.
        **({"query_factors": True} if has_query_factors else {}),
        **measured_with(model),
    }
    searched_on = {name: about[name] for name in ("model", "weights", "lengths", "retrieval", "texts")}
    if options.start is not None:
        searched_on["start"] = Path(options.start).name
    files = Files(Path(options.output), searched_on)
    path = files.named("journal")
    with closing(Journal(path, about) if processes.is_first else UnsavedJournal(path)) as journal:
        results = (Results if processes.is_first else UnsavedResults)(files.named("json"), about)
        readings = Readings(model, lengths, journal, chunk=options.chunk, retrieval=options.retrieval)
        seconds = 60 * options.budget
        try:
            calibration: Calibration | GradientCalibration
            if by_gradient(options):
                calibration = GradientCalibration(
                    readings,
                    trained,
                    options.scale,
                    documents,
                    seconds,
                    options.per or "model",
                    tokenizer,
                    files.named("state.pt"),
                    given_start(options, trained),
                    processes,
                    options.learning_rate,
                    has_query_factors,
                )
                search_by_gradient(calibration, files, results)
                if not processes.is_first:
                    return results
            else:
                calibration = Calibration(readings, trained, options.scale, documents, seconds)
                search(calibration, files, results)
            opening = len(opening_tokens(tokenizer))
            truncation = row_of_truncation(
                trained, lengths, opening, is_plain=options.original_max_position is not None
            )
            read_reports(calibration, others, files, results, options.sweep, truncation)
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


def gradient_settings(options: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    """The settings that a resumed search by gradient must have in common; none for a search without."""
    if not by_gradient(options):
        return {}
    return {
        "by": "gradient",
        "per": options.per or "model",
        "start": options.start,
        "learning_rate": options.learning_rate,
        "processes": processes.size,
    }


def searches_query_factors(options: argparse.Namespace, model: Any, trained: NativeRope, processes: Processes) -> bool:
    """Whether to search factors of query heads: with ``--per head``, where the model can be patched with them.

    Raises:
        ValueError: ``--query-factors`` is given, and the model cannot.
    """
    if options.per != "head" or options.query_factors is False:
        return False
    reason = why_no_query_factors(model, trained, options.scale)
    if reason is not None and options.query_factors:
        raise ValueError(f"--query-factors must be left out for {type(model).__name__}: {reason}")
    if reason is not None and processes.is_first:
        print(f"mrrope calibrate: no factors of query heads are searched: {reason}", file=sys.stderr)
    return reason is None


def given_start(options: argparse.Namespace, trained: NativeRope) -> ModelTables | None:
    """The tables of ``--start``."""
    if options.start is None:
        return None
    if not is_saved_table(options.start):
        return resolve_table(trained, options.start, options.scale, {})
    tables = load_tables(options.start)
    known = {"rotary_dim": trained.rotary_dim, "base": trained.base, "scale": options.scale}
    known["original_max_position"] = trained.original_max_position
    for name, value in known.items():
        if getattr(tables, name) != value:
            raise ValueError(f"--start must be tables of {name} {value:g}, got {getattr(tables, name):g}")
    return tables


def chosen_documents(options: argparse.Namespace, tokenizer: Any, lengths: list[int]) -> DocumentSets:
    """Three sets of documents as long as the longest length; by gradient those of the search are whole."""
    is_gradient = by_gradient(options)
    texts = len(options.text)
    count = options.documents // texts
    documents = document_sets(
        options.text,
        tokenizer,
        lengths[-1],
        count=count,
        held_out_count=options.held_out_documents // (texts if options.held_out is None else 1),
        held_out=options.held_out,
        join=options.join,
        deciding_count=min(max(1, MAX_DECIDING // texts), count // 2) if is_gradient else None,
        whole_search=is_gradient,
    )
    if not options.retrieval:
        return documents
    keyed = documents.with_keys(tokenizer, lengths)
    # By gradient every step hides keys of its own.
    return replace(keyed, search=documents.search) if is_gradient else keyed


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


def search_by_gradient(calibration: GradientCalibration, files: Files, results: Results) -> None:
    """Search for the tables and write them; the progress bar shows the budget."""
    is_first = calibration.processes.is_first
    total = round(calibration.seconds)
    with progress_bar(desc="calibrate", total=total, bar_format=BUDGET_BAR, disable=not is_first) as bar:
        calibration.readings.progress = lambda seconds: bar.update(min(round(seconds), total) - bar.n)
        descent = calibration.descent()
        before = calibration.readings.spent
        calibration.readings.progress = lambda _: None
        if descent.step:
            bar.write(f"resuming after {descent.step} steps from {calibration.state_path}", file=sys.stderr)

        def progress(seconds: float, loss: float) -> None:
            best = f", {descent.best:.4f} on validation documents" if descent.evaluations else ""
            bar.set_postfix_str(f"loss {loss:.4f}{best}", refresh=False)
            bar.update(min(round(before + seconds), total) - bar.n)

        descent.progress = progress
        descent.improved = lambda tables, _: files.save_table(tables)
        tables = descent.run()
    if not is_first:
        return
    files.save_table(tables)
    evaluations = descent.evaluations
    is_start = min(evaluations, key=lambda one: one["loss"])["step"] == 0
    results.data["calibration"] = {
        "chosen": calibration.started_from if is_start else f"gradient per {calibration.per}",
        "started_from": calibration.started_from,
        **report.range_of_query_factors(tables),
        "seconds": before + descent.spent,
        "steps": descent.step,
        "evaluations": evaluations,
        "curve": descent.curve,
    }
    results.save()


def row_of_truncation(
    trained: NativeRope, lengths: Sequence[int], opening: int, *, is_plain: bool
) -> dict[str, Truncation]:
    """The row of the stock model over windows of its native length, where a length exceeds that; else none.

    Args:
        trained: the RoPE that is extended.
        lengths: in tokens, ascending.
        opening: tokens at the beginning of every text that windows keep.
        is_plain: whether plain RoPE replaces the model's own.
    """
    assert trained.original_max_position is not None
    native_length = int(trained.original_max_position)
    if lengths[-1] <= native_length or native_length < SHIFTS_PER_WINDOW:
        return {}
    plain = resolve_table(trained, "rope", 1.0, {}) if is_plain else None
    return {TRUNCATED: Truncation(native_length, opening, plain)}


def read_reports(
    calibration: Calibration | GradientCalibration,
    others: Sequence[Document],
    files: Files,
    results: Results,
    sweep: int | None,
    truncation: dict[str, Truncation],
) -> None:
    """Measure the held-out documents and draw the plots."""
    tables = {**calibration.fixed, **truncation, report.CALIBRATED: load_tables(files.table)}
    count = len(tables) * (len(calibration.documents.held_out) + len(others))
    print(f"mrrope calibrate: the search has ended; the report is outside --budget: {count} readings", file=sys.stderr)
    report.read_held_out(calibration.readings, tables, calibration.documents.held_out, results)
    evaluation_report.draw(results.data, files.stem)
    found = results.data["calibration"]
    found["held_out_geometric_means"] = report.geometric_means(results)
    if others:
        part = results.part(report.OTHER_KINDS)
        part.data["texts"] = report.counted_texts(others)
        report.read_held_out(calibration.readings, tables, others, part)
        found["other_kinds_geometric_means"] = report.geometric_means(part)
    if sweep:
        assert isinstance(calibration, Calibration)
        results.data["sweep"] = report.read_sweep(calibration, sweep)
        report.draw_sweep(results.data["sweep"], files.named("sweep.png"))


def stopped(reason: str, files: Files, results: Results) -> CalibrationStoppedError:
    """Record the reason in the results and return the error to raise."""
    results.finish(reason)
    table = f", the best table so far in {files.table}" if files.table.exists() else ""
    return CalibrationStoppedError(f"{reason}. What was read is in {files.named('journal')}{table}")
