"""An evaluation of a tiny model, as several test files run it."""

from pathlib import Path

import torch
from byte_llama import random_words, save_byte_llama
from command_line import as_arguments

import mrrope
from mrrope.cli import main

FLOAT32_EPS = torch.finfo(torch.float32).eps


def evaluation_folder(folder: Path) -> Path:
    """Save a tiny random model, a text and a table in ``folder``."""
    save_byte_llama(folder / "model", 64, layers=2, heads=2, initializer_range=0.2)
    (folder / "text.txt").write_text("\0".join(random_words(120, seed) for seed in range(3)))
    table = mrrope.frequency_table("mrrope_uni", rotary_dim=16, base=1e4, original_max_position=64, scale=8.0)
    table.save(folder / "table.json")
    return folder


def evaluate(folder: Path, *options: str, **replaced: str) -> int:
    given = {"--text": str(folder / "text.txt"), "--device": "cpu", "--lengths": "64,600", "--chunk": "100", **replaced}
    given = {"--output": str(folder / "out"), **given}
    model = given.pop("model", str(folder / "model"))
    return main(["eval", model, *options, *as_arguments(given)])
