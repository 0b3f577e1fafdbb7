"""A tiny model and texts, as several test files calibrate it."""

from pathlib import Path

from byte_llama import random_words, save_byte_llama


def calibration_folder(folder: Path) -> Path:
    """Save a tiny random model, a text to search and a held-out one in ``folder``."""
    save_byte_llama(folder / "model", 32, heads=2, initializer_range=0.5)
    (folder / "text.txt").write_text("\0".join(random_words(24, seed) for seed in range(6)))
    (folder / "other.txt").write_text("\0".join(random_words(24, seed) for seed in (7, 8)))
    return folder
