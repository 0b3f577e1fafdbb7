"""The command ``mrrope eval``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from mrrope.evaluation import lm_eval_harness, model_loading, report
from mrrope.evaluation.compared_methods import STOCK, Method, check_methods, methods_named, truncation_past
from mrrope.evaluation.documents import long_documents, text_files
from mrrope.evaluation.evaluate import DEFAULT_TRIALS, KNOWN_TASKS, PERPLEXITY, Evaluation
from mrrope.evaluation.results import Results
from mrrope.hf.rope_config import global_settings
from mrrope.reporting.machine import measured_with
from mrrope.reporting.optional_packages import require
from mrrope.reporting.options import (
    add_forward_options,
    add_model_and_text,
    add_original_max_position,
    add_output,
    checked_lengths,
    checked_original_max_position,
    checked_positive,
    comma_separated,
)
from mrrope.reporting.output import checked_stem, with_ending
from mrrope.tables.lookup import needs_scale

DEFAULT_METHODS = "rope,yarn,mrrope_uni,mrrope_pro"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope eval``."""
    add = command.add_argument
    add_model_and_text(command)
    add(
        "--methods",
        metavar="M,M,...",
        help=f"methods, tables' .json files, {' or '.join(STOCK)} (default: {DEFAULT_METHODS}, and {STOCK[1]} where "
        "--lengths exceed the native length)",
    )
    add(
        "--scale",
        metavar="S",
        help="factor by which methods extend the context, or auto (default: the smallest of 2, 4, 8, ... that covers "
        "the longest of --lengths)",
    )
    add("--max-scale", type=float, metavar="S", help="largest factor of --scale auto")
    add_original_max_position(command)
    add("--lengths", required=True, metavar="N,N,...", help="in tokens; every document is cut to the longest")
    add(
        "--tasks",
        default=PERPLEXITY,
        metavar="T,T,...",
        help=f"of {', '.join(KNOWN_TASKS)}, any of {lm_eval_harness.NAME}, or its .yaml (default: %(default)s)",
    )
    add("--documents", type=int, metavar="N", help="at most N documents (default: all that are long enough)")
    add("--trials", type=int, default=DEFAULT_TRIALS, metavar="N", help="prompts per length (default: %(default)s)")
    add_forward_options(command)
    add_output(command, "mrrope-eval", "NAME.json and NAME.TASK.png")


def checked_tasks(text: str) -> list[str]:
    """The distinct tasks of ``--tasks``, in order."""
    tasks = comma_separated(text)
    others = [task for task in tasks if task not in KNOWN_TASKS]
    expected = (
        f"--tasks must be of {', '.join(KNOWN_TASKS)} or tasks of {lm_eval_harness.NAME}, with commas between them"
    )
    try:
        unknown = set(others) - lm_eval_harness.known(others) if others else set()
    except ImportError as error:
        raise ValueError(f"{expected}, got {text!r}; for the latter, {error}") from None
    if unknown or not tasks:
        raise ValueError(f"{expected}, got {text!r}")
    return tasks


def patch_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :func:`mrrope.patch`."""
    checked_original_max_position(options.original_max_position)
    length = options.original_max_position
    return {**scale_options(options), **({} if length is None else {"original_max_position": length})}


def scale_options(options: argparse.Namespace) -> dict[str, Any]:
    """The scale arguments of :func:`mrrope.patch`; none where :func:`covering_scale` chooses."""
    extra = {} if options.max_scale is None else {"max_scale": options.max_scale}
    if options.scale == "auto":
        if extra and not 1.0 < options.max_scale < math.inf:
            raise ValueError(f"--max-scale must be a number above 1, got {options.max_scale:g}")
        return {"scale": "auto", **extra}
    if extra:
        got = "no --scale" if options.scale is None else f"--scale {options.scale}"
        raise ValueError(f"--max-scale goes with --scale auto, got {got}")
    if options.scale is None:
        return {}
    try:
        scale = float(options.scale)
    except ValueError:
        scale = math.nan
    if not 1.0 <= scale < math.inf:
        raise ValueError(f"--scale must be a number, 1 or more, or auto, got {options.scale!r}")
    return {"scale": scale}


def covering_scale(model: nn.Module, longest: int, original_max_position: float | None) -> float:
    """The smallest of 2, 4, 8, ... with which a method extends a model over a length.

    Args:
        model: the unpatched model.
        longest: the length to cover.
        original_max_position: the length that is extended; by default the native length.

    Raises:
        ValueError: the configuration states no native length.
    """
    native = original_max_position or global_settings(model).original_max_position
    if native is None:
        raise ValueError("--scale must be given for this model: its configuration states no native length")
    scale = 2.0
    while native * scale < longest:
        scale *= 2.0
    print(f"mrrope eval: --scale {scale:g} extends {native:.15g} tokens over the longest of --lengths", file=sys.stderr)
    return scale


def warn_if_identical(methods: Sequence[Method]) -> None:
    """Warn that at scale 1 every method's table is the model's own, so that all figures will be equal."""
    alike = [method.name for method in methods if dict(method.options).get("scale") == 1.0]
    if len(alike) > 1:
        print(
            f"mrrope eval: {', '.join(alike)} are the unpatched model at --scale 1; they differ at a larger --scale",
            file=sys.stderr,
        )


def run(options: argparse.Namespace) -> None:
    """Measure, print a table or JSON, and draw; after an error the partial results are reported too."""
    require("matplotlib")
    lengths, tasks = checked_lengths(options.lengths), checked_tasks(options.tasks)
    for option in ("documents", "trials", "chunk"):
        checked_positive(f"--{option}", getattr(options, option))
    given = patch_options(options)
    stem = checked_stem(options.output)
    text_files(options.text)  # fails before the model is loaded
    names = comma_separated(DEFAULT_METHODS if options.methods is None else options.methods)
    methods = methods_named(names, **given)
    warn_if_identical(methods)
    model, tokenizer = model_loading.load(options.model, dtype=options.dtype, device=options.device)
    if options.scale is None and any(map(needs_scale, names)):
        given["scale"] = covering_scale(model, lengths[-1], options.original_max_position)
        methods = methods_named(names, **given)
    if options.methods is None:
        methods += truncation_past(lengths[-1], model, **given)
    check_methods(methods, model)
    documents = long_documents(options.text, tokenizer, lengths[-1], options.documents)
    about = {
        "model": str(options.model),
        "text": str(options.text),
        "documents": [document.name for document in documents],
        "methods": [method.name for method in methods],
        **given,
        "lengths": lengths,
        "tasks": tasks,
        "trials": options.trials,
        "chunk": options.chunk,
        **measured_with(model),
    }
    results = Results(with_ending(stem, "json"), about)
    evaluation = Evaluation(model, tokenizer, documents, lengths, results, options.trials, options.chunk)
    try:
        evaluation.run(methods, tasks)
    except KeyboardInterrupt:
        results.finish("interrupted")
        raise KeyboardInterrupt(f"what was measured is in {results.path}") from None
    finally:
        if results.data["results"]:
            pictures = report.draw(results.data, stem)
            print(json.dumps(results.data) if options.json else report.table(results.data))
            if not options.json:
                print("\nwritten:", *(str(path) for path in (results.path, *pictures)))
