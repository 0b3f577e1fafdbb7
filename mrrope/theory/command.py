"""The command ``mrrope plot``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import compress
from statistics import fmean
from typing import Any

from mrrope.evaluation import model_loading
from mrrope.evaluation.documents import encode, opening_tokens
from mrrope.evaluation.sample_text import library_texts
from mrrope.hf.rope_config import global_settings
from mrrope.reporting.optional_packages import require
from mrrope.reporting.options import add_output
from mrrope.reporting.output import checked_stem, with_ending
from mrrope.tables.lookup import load_tables
from mrrope.theory import drawing, figure_data, table_set_figure
from mrrope.theory.figure_data import Setting

FORMAT = "mrrope.theory/1"
ATTENTION = "attention"
HEADS = "heads"
TOKENS_READ = 2048

NUMBERS: dict[str, Callable[[Setting], Any]] = {
    "scale": figure_data.cumulative_scales,
    "radix": figure_data.radix_factors,
    "digits": figure_data.spelled_numbers,
    "similarity": figure_data.similarities,
}


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``mrrope plot``."""
    add = command.add_argument
    add(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help=f"of {', '.join(drawing.FIGURES)} (default: all; {ATTENTION} needs --model, {HEADS} --table)",
    )
    add("--rotary-dim", type=int, default=128, metavar="N", help="components of a head that rotate (default: 128)")
    add("--base", type=float, default=10_000.0, help="RoPE's theta (default: 10000)")
    add("--original-max-position", type=int, default=4096, metavar="N", help="the trained length (default: 4096)")
    add("--scale", type=float, default=16.0, help="factor of the extension (default: 16)")
    add("--model", metavar="MODEL", help=f"a folder, a name on the hub or a .gguf file, whose {ATTENTION} is drawn")
    add("--table", metavar="FILE", help=f"JSON or shipped name of a table set, of which only {HEADS} is drawn")
    add_output(command, "mrrope-theory", "NAME.json and NAME.FIGURE.png")


def chosen_figures(names: list[str], *, has_model: bool, has_table: bool) -> list[str]:
    """The distinct figures to draw, in their fixed order."""
    unknown = [name for name in names if name not in drawing.FIGURES]
    if unknown:
        raise ValueError(f"figures must be of {', '.join(drawing.FIGURES)}, got {unknown[0]!r}")
    if ATTENTION in names and not has_model:
        raise ValueError(f"{ATTENTION} needs --model, whose heads it is about")
    if HEADS in names and not has_table:
        raise ValueError(f"{HEADS} needs --table, whose scales it shows")
    if not names:
        names = [HEADS] if has_table else [*NUMBERS, *[ATTENTION] * has_model]
    return [name for name in drawing.FIGURES if name in names]


def attention_of(source: str, scale: float) -> dict[str, Any]:
    """The data of the attention figure, with tables made for the model."""
    model, tokenizer = model_loading.load(source)
    trained = global_settings(model)
    if trained.original_max_position is None:
        raise ValueError(f"model must have a native length, and the configuration of {source} states none")
    # The methods extend plain RoPE here, even if the model is extended already.
    length = int(trained.trained_length or trained.original_max_position)
    setting = Setting(trained.rotary_dim, trained.base, length, scale)
    figure_data.require_distances_past_native(setting)
    tokens = opening_tokens(tokenizer)
    for text in library_texts():
        tokens += encode(tokenizer, text)
        if len(tokens) >= TOKENS_READ:
            break
    found = figure_data.middle_attention(setting, model, tokens[: min(TOKENS_READ, setting.original_max_position)])
    return {"model": model_loading.short_name(source), "setting": asdict(setting), **found}


def theory_of(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The data of the figures about methods, and of the attention figure."""
    setting = Setting(options.rotary_dim, options.base, options.original_max_position, options.scale)
    middle = setting.middle
    # First, since a model may turn out to be unsuitable.
    of_model = {ATTENTION: attention_of(options.model, options.scale)} if ATTENTION in names else {}
    return {
        "setting": asdict(setting),
        "bounds": [middle.start, middle.stop],
        **{name: NUMBERS[name](setting) for name in names if name in NUMBERS},
        **of_model,
    }


def run(options: argparse.Namespace) -> None:
    """Compute the data of the figures, write it, and draw."""
    require("matplotlib")
    names = chosen_figures(options.figures, has_model=options.model is not None, has_table=options.table is not None)
    stem = checked_stem(options.output)
    data: dict[str, Any] = {"format": FORMAT}
    if HEADS in names:
        data[HEADS] = table_set_figure.numbers(load_tables(options.table))
    if names != [HEADS]:
        data |= theory_of(names, options)
    numbers = with_ending(stem, "json")
    numbers.write_text(json.dumps(data) + "\n")
    pictures = drawing.draw(data, stem)
    if options.json:
        print(json.dumps(data))
    else:
        print(summary(data), "\nwritten:", *(str(path) for path in (numbers, *pictures)))


def summary(data: dict[str, Any]) -> str:
    """The results that are single numbers or words."""
    lines = []
    if "radix" in data:
        lines += ["radix factors of the middle pairs:"]
        lines += [f"  {method:12} {found['trend']}" for method, found in data["radix"].items()]
    if "similarity" in data:
        lines += ["", f"first zero of B(m): {'all pairs':>14}{'middle pairs':>15}"]
        both = (data["similarity"][name] for name in ("all", "middle"))
        for (method, of_all), of_middle in zip(next(both).items(), next(both).values(), strict=True):
            zeros = [found["first_zero"] or "none" for found in (of_all, of_middle)]
            lines += [f"  {method:18}{zeros[0]:>14}{zeros[1]:>15}"]
    if ATTENTION in data:
        found = data[ATTENTION]
        lines += ["", f"standard deviation of the middle pairs' score past the native length of {found['model']}"]
        lines += [f"({found['layers']}):"]
        lines += [f"  {method:12} {wavering:.2f}" for method, wavering in wavering_past_native(found).items()]
    if HEADS in data:
        lines += ["", *table_set_figure.summary(data[HEADS])]
    return "\n".join([*lines, ""])


def wavering_past_native(found: dict[str, Any]) -> dict[str, float]:
    """Per method, the mean deviation over the bins of distances past the native length."""
    native = found["setting"]["original_max_position"]
    past = [place >= native for place in found["distances"]]
    return {method: fmean(compress(curves["wavering"], past)) for method, curves in found["methods"].items()}
