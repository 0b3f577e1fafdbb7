"""Where a command writes: files that share a name, with endings of their own."""

from __future__ import annotations

from pathlib import Path


def checked_stem(output: str) -> Path:
    """What ``--output`` stands for; refused before anything is measured where there is no such folder."""
    stem = Path(output)
    if not stem.parent.is_dir():
        raise ValueError(f"--output must be in a folder that exists, and there is no {stem.parent}")
    return stem
