"""The command ``mrrope eval``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mrrope.evaluation import harness, models, report
from mrrope.evaluation.methods import UNPATCHED, Method, methods_named, try_methods
from mrrope.evaluation.reading import DEFAULT_CHUNK
from mrrope.evaluation.results import Results
from mrrope.evaluation.run import DEFAULT_TRIALS, KNOWN_TASKS, PERPLEXITY, Evaluation
from mrrope.evaluation.texts import long_documents, text_files
from mrrope.reporting.optional_packages import needs
from mrrope.reporting.output import checked_stem

DEFAULT_METHODS = "rope,yarn,mrrope_uni,mrrope_pro"


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""

    def add(option: str, **how: Any) -> None:
        command.add_argument(option, **how)

    add("model", metavar="MODEL", help="a model's folder, its name on the hub, or a .gguf file")
    add("--text", required=True, metavar="FILE", help="a text (.xz too; NUL between documents), or a folder of them")
    add(
        "--methods",
        default=DEFAULT_METHODS,
        metavar="M,M,...",
        help=f"methods, tables' .json files, or {UNPATCHED} (default: %(default)s)",
    )
    add("--scale", default="1", metavar="S", help="by how much methods extend the context, or auto (default: 1)")
    add("--max-scale", type=float, metavar="S", help="how far --scale auto goes")
    add("--lengths", required=True, metavar="N,N,...", help="in tokens; every document is cut to the longest")
    add(
        "--tasks",
        default=PERPLEXITY,
        metavar="T,T,...",
        help=f"of {', '.join(KNOWN_TASKS)}, any of {harness.NAME}, or its .yaml (default: %(default)s)",
    )
    add("--documents", type=int, metavar="N", help="no more than so many (default: all that are long enough)")
    add("--trials", type=int, default=DEFAULT_TRIALS, metavar="N", help="prompts a length (default: %(default)s)")
    add("--chunk", type=int, default=DEFAULT_CHUNK, metavar="N", help="tokens read at a time (default: %(default)s)")
    add("--dtype", help=f"one of {', '.join(models.DTYPES)} (default: bfloat16 on GPUs, else float32)")
    add("--device", help="as torch names it (default: a GPU where there is one)")
    add(
        "--output", default="mrrope-eval", metavar="NAME", help="for NAME.json and NAME.TASK.png (default: %(default)s)"
    )
    add("--json", action="store_true", help="print the results as JSON")


def named(text: str) -> list[str]:
    """Names with commas between them, once each."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def checked_lengths(text: str) -> list[int]:
    """Rising, once each."""
    try:
        lengths = sorted({int(length) for length in named(text)})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 2:
        raise ValueError(f"--lengths must be numbers of tokens, 2 or more, with commas between them, got {text!r}")
    return lengths


def checked_tasks(text: str) -> list[str]:
    """In their order, once each."""
    tasks = named(text)
    others = [task for task in tasks if task not in KNOWN_TASKS]
    expected = f"--tasks must be of {', '.join(KNOWN_TASKS)} or tasks of {harness.NAME}, with commas between them"
    try:
        unknown = set(others) - harness.known(others) if others else set()
    except ImportError as error:
        raise ValueError(f"{expected}, got {text!r}; for the latter, {error}") from None
    if unknown or not tasks:
        raise ValueError(f"{expected}, got {text!r}")
    return tasks


def scale_options(options: argparse.Namespace) -> dict[str, Any]:
    """What goes to :func:`mrrope.patch` with a method's name."""
    extra = {} if options.max_scale is None else {"max_scale": options.max_scale}
    if options.scale == "auto":
        if extra and not 1.0 < options.max_scale < math.inf:
            raise ValueError(f"--max-scale must be a number above 1, got {options.max_scale:g}")
        return {"scale": "auto", **extra}
    if extra:
        raise ValueError(f"--max-scale goes with --scale auto, got --scale {options.scale}")
    try:
        scale = float(options.scale)
    except ValueError:
        scale = math.nan
    if not 1.0 <= scale < math.inf:
        raise ValueError(f"--scale must be a number, 1 or more, or auto, got {options.scale!r}")
    return {"scale": scale}


def say_if_all_alike(methods: Sequence[Method]) -> None:
    """At scale 1 every method's table is the model's own: hours of reading would only show that."""
    alike = [method.name for method in methods if dict(method.options).get("scale") == 1.0]
    if len(alike) > 1:
        print(
            f"mrrope eval: {', '.join(alike)} all read alike at --scale 1, as the model does unpatched; "
            "a larger --scale tells them apart",
            file=sys.stderr,
        )


def checked_positive(option: str, value: int | None) -> None:
    """Refuses counts of nothing."""
    if value is not None and value < 1:
        raise ValueError(f"{option} must be a positive number, got {value}")


def run(options: argparse.Namespace) -> None:
    """Measures, prints a table or JSON, and draws; partial results are reported too before an error goes on."""
    with needs("matplotlib"):
        import matplotlib  # noqa: F401  # before hours of measuring, not after
    lengths, tasks = checked_lengths(options.lengths), checked_tasks(options.tasks)
    for option in ("documents", "trials", "chunk"):
        checked_positive(f"--{option}", getattr(options, option))
    scale = scale_options(options)
    stem = checked_stem(options.output)
    # A model takes its time to load.
    text_files(options.text)
    methods = methods_named(named(options.methods), **scale)
    say_if_all_alike(methods)
    model, tokenizer = models.load(options.model, dtype=options.dtype, device=options.device)
    try_methods(methods, model)
    documents = long_documents(options.text, tokenizer, lengths[-1], options.documents)
    about = {
        "model": str(options.model),
        "text": str(options.text),
        "documents": [document.name for document in documents],
        "methods": [method.name for method in methods],
        **scale,
        "lengths": lengths,
        "tasks": tasks,
        "trials": options.trials,
        "chunk": options.chunk,
        **machine(model),
    }
    results = Results(stem.with_name(f"{stem.name}.json"), about)
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


def machine(model: Any) -> dict[str, str]:
    """What the figures were measured with."""
    import transformers

    from mrrope import __version__

    device = next(model.parameters()).device
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mrrope": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
