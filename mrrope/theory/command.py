"""The command ``mrrope plot``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import compress
from statistics import fmean
from typing import Any

from mrrope.demo.library_text import library_texts
from mrrope.evaluation import models
from mrrope.evaluation.texts import encode, opening_tokens
from mrrope.hf.rope_config import global_settings
from mrrope.reporting.optional_packages import needs
from mrrope.reporting.output import checked_stem
from mrrope.theory import drawing, figures
from mrrope.theory.figures import Setting

FORMAT = "mrrope.theory/1"
ATTENTION = "attention"
TOKENS_READ = 2048

NUMBERS: dict[str, Callable[[Setting], Any]] = {
    "scale": figures.cumulative_scales,
    "radix": figures.radix_factors,
    "digits": figures.spelled_numbers,
    "similarity": figures.similarities,
}


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""

    def add(option: str, **how: Any) -> None:
        command.add_argument(option, **how)

    add(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help=f"of {', '.join(drawing.FIGURES)} (default: all; {ATTENTION} needs --model)",
    )
    add("--rotary-dim", type=int, default=128, metavar="N", help="components of a head that rotate (default: 128)")
    add("--base", type=float, default=10_000.0, help="RoPE's theta (default: 10000)")
    add("--original-max-position", type=int, default=4096, metavar="N", help="the trained length (default: 4096)")
    add("--scale", type=float, default=16.0, help="by how much to extend it (default: 16)")
    add("--model", metavar="MODEL", help=f"a folder, a name on the hub or a .gguf file, whose {ATTENTION} is drawn")
    add(
        "--output",
        default="mrrope-theory",
        metavar="NAME",
        help="for NAME.json and NAME.FIGURE.png (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the numbers as JSON")


def chosen_figures(names: list[str], *, has_model: bool) -> list[str]:
    """In their order, once each."""
    unknown = [name for name in names if name not in drawing.FIGURES]
    if unknown:
        raise ValueError(f"figures must be of {', '.join(drawing.FIGURES)}, got {unknown[0]!r}")
    if ATTENTION in names and not has_model:
        raise ValueError(f"{ATTENTION} needs --model, whose heads it is about")
    return [name for name in drawing.FIGURES if name in names or (not names and (has_model or name != ATTENTION))]


def attention_of(source: str, scale: float) -> dict[str, Any]:
    """The numbers of a model's attention, by tables made for that model."""
    model, tokenizer = models.load(source)
    trained = global_settings(model)
    if trained.original_max_position is None:
        raise ValueError(f"model must say how far it was trained to read, and the configuration of {source} does not")
    # The methods are drawn as they extend plain RoPE.
    length = int(trained.trained_length or trained.original_max_position)
    setting = Setting(trained.rotary_dim, trained.base, length, scale)
    figures.require_distances_past_native(setting)
    tokens = opening_tokens(tokenizer)
    for text in library_texts():
        tokens += encode(tokenizer, text)
        if len(tokens) >= TOKENS_READ:
            break
    found = figures.middle_attention(setting, model, tokens[: min(TOKENS_READ, setting.original_max_position)])
    return {"model": models.short_name(source), "setting": asdict(setting), **found}


def run(options: argparse.Namespace) -> None:
    """Computes, writes the numbers, and draws from them."""
    with needs("matplotlib"):
        import matplotlib  # noqa: F401
    names = chosen_figures(options.figures, has_model=options.model is not None)
    stem = checked_stem(options.output)
    setting = Setting(options.rotary_dim, options.base, options.original_max_position, options.scale)
    middle = setting.middle
    # First, since only the model says whether it can be done.
    of_model = {ATTENTION: attention_of(options.model, options.scale)} if ATTENTION in names else {}
    data: dict[str, Any] = {
        "format": FORMAT,
        "setting": asdict(setting),
        "bounds": [middle.start, middle.stop],
        **{name: NUMBERS[name](setting) for name in names if name != ATTENTION},
        **of_model,
    }
    numbers = stem.with_name(f"{stem.name}.json")
    numbers.write_text(json.dumps(data) + "\n")
    pictures = drawing.draw(data, stem)
    if options.json:
        print(json.dumps(data))
    else:
        print(summary(data), "\nwritten:", *(str(path) for path in (numbers, *pictures)))


def summary(data: dict[str, Any]) -> str:
    """The figures that are single numbers or words."""
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
        lines += ["", f"wavering of the middle pairs' score past the native length of {found['model']}"]
        lines += [f"({found['layers']}):"]
        lines += [f"  {method:12} {wavering:.2f}" for method, wavering in wavering_past_native(found).items()]
    return "\n".join([*lines, ""])


def wavering_past_native(found: dict[str, Any]) -> dict[str, float]:
    """By method, the mean over the stretches of distances past the native length."""
    native = found["setting"]["original_max_position"]
    past = [place >= native for place in found["distances"]]
    return {method: fmean(compress(curves["wavering"], past)) for method, curves in found["methods"].items()}
