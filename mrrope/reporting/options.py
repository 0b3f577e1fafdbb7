"""Command-line options that several commands have, and checks of their values."""

from __future__ import annotations

import argparse
import math

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_CHUNK = 4096


def add_model_and_text(command: argparse.ArgumentParser, several: str = "") -> None:
    """``MODEL --text FILE``; with ``several``, which says what for, ``--text FILE --text FILE ...``, a list."""
    command.add_argument("model", metavar="MODEL", help="a model's folder, its name on the hub, or a .gguf file")
    command.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        action="append" if several else "store",
        help=f"a text (.xz too; NUL between documents), or a folder of them{several and f'; {several}'}",
    )


def add_forward_options(command: argparse.ArgumentParser) -> None:
    """``--chunk``, ``--dtype`` and ``--device`` of forward passes."""
    command.add_argument(
        "--chunk", type=int, default=DEFAULT_CHUNK, metavar="N", help="tokens per forward pass (default: %(default)s)"
    )
    command.add_argument("--dtype", help=f"one of {', '.join(DTYPES)} (default: bfloat16 on GPUs, else float32)")
    add_device(command)


def add_original_max_position(command: argparse.ArgumentParser) -> None:
    """``--original-max-position``."""
    command.add_argument(
        "--original-max-position", type=float, metavar="N", help="extend plain RoPE, trained on N tokens"
    )


def checked_original_max_position(length: float | None) -> None:
    """Raise ValueError for a length below 1."""
    if length is not None and not 1.0 <= length < math.inf:
        raise ValueError(f"--original-max-position must be 1 or more, got {length:g}")


def add_device(command: argparse.ArgumentParser) -> None:
    """``--device``."""
    command.add_argument("--device", help="a torch device (default: a GPU if there is one)")


def add_output(command: argparse.ArgumentParser, default: str, files: str) -> None:
    """``--output NAME`` and ``--json``."""
    command.add_argument("--output", default=default, metavar="NAME", help=f"for {files} (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the results as JSON")


def comma_separated(text: str) -> list[str]:
    """The distinct names of a comma-separated list, in order."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def checked_lengths(text: str) -> list[int]:
    """The distinct lengths of ``--lengths``, ascending."""
    try:
        lengths = sorted({int(length) for length in comma_separated(text)})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 2:
        raise ValueError(f"--lengths must be numbers of tokens, 2 or more, with commas between them, got {text!r}")
    return lengths


def checked_positive(option: str, value: int | None) -> None:
    """Raise ValueError for a count below 1."""
    if value is not None and value < 1:
        raise ValueError(f"{option} must be a positive number, got {value}")
