"""Output files of a command: one stem, several endings."""

from __future__ import annotations

import tempfile
from pathlib import Path


def checked_stem(output: str) -> Path:
    """The stem that ``--output`` names.

    Raises:
        ValueError: its folder does not exist, or files cannot be written there; commands check this before they
            measure anything.
    """
    stem = Path(output)
    if not stem.parent.is_dir():
        raise ValueError(f"--output must be in a folder that exists, and there is no {stem.parent}")
    try:
        # The mode bits do not tell: the file system may be read-only.
        with tempfile.NamedTemporaryFile(dir=stem.parent, prefix=f"{stem.name}."):
            pass
    except OSError as error:
        raise ValueError(f"--output must be where files can be written, got {output}: {error.strerror}") from None
    return stem


def with_ending(stem: Path, ending: str) -> Path:
    """``NAME.ending``; a dot in NAME is no suffix to replace (``mrrope-0.5``)."""
    return stem.with_name(f"{stem.name}.{ending}")
