"""Output files of a command: one stem, several endings."""

from __future__ import annotations

from pathlib import Path


def checked_stem(output: str) -> Path:
    """The stem that ``--output`` names.

    Raises:
        ValueError: its folder does not exist; commands check this before they measure anything.
    """
    stem = Path(output)
    if not stem.parent.is_dir():
        raise ValueError(f"--output must be in a folder that exists, and there is no {stem.parent}")
    return stem


def with_ending(stem: Path, ending: str) -> Path:
    """``NAME.ending``; a dot in NAME is no suffix to replace (``mrrope-0.5``)."""
    return stem.with_name(f"{stem.name}.{ending}")
