"""Calibrated tables and table sets that ship with the package: one JSON file each in this folder."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
NAME_WITH_SCALE = re.compile(r"(.+)-(\d+(?:\.\d+)?)x")


def names() -> list[str]:
    """Return the names that ``load`` of tables and sets and :func:`mrrope.patch` take in place of a path."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def ladders() -> list[str]:
    """Return what :func:`ladder` takes: the shipped names without their scale."""
    return sorted({found[1] for found in map(NAME_WITH_SCALE.fullmatch, names()) if found})


def ladder(prefix: str) -> list[str]:
    """Return the shipped names that are a prefix and a scale, such as ``-2x``, the smallest scale first."""
    found = [match for match in map(NAME_WITH_SCALE.fullmatch, names()) if match and match[1] == prefix]
    return [match[0] for match in sorted(found, key=lambda match: float(match[2]))]


def listed() -> str:
    """Return the names, comma-separated, for error messages."""
    return ", ".join(names()) or "there is none yet"


def file_of(table: str | Path) -> Path:
    """Return the file of a path or of a shipped table's name.

    Raises:
        FileNotFoundError: ``table`` is neither.
    """
    path = Path(table)
    if path.suffix == ".json" or path.exists():
        return path
    if str(table) in names():
        return FOLDER / f"{table}.json"
    raise FileNotFoundError(
        f"path must be that of a table's JSON, or the name of a table that comes with mrrope ({listed()}), "
        f"got {str(table)!r}"
    )
