"""An evaluation of a tiny model, as several test files run it."""

from pathlib import Path

import torch
from command_line import as_arguments

from mrrope.cli import main

FLOAT32_EPS = torch.finfo(torch.float32).eps


# The command


def evaluate(folder: Path, *options: str, **replaced: str) -> int:
    given = {"--text": str(folder / "text.txt"), "--device": "cpu", "--lengths": "64,600", "--chunk": "100", **replaced}
    given = {"--output": str(folder / "out"), **given}
    model = given.pop("model", str(folder / "model"))
    return main(["eval", model, *options, *as_arguments(given)])
