"""Calibrated tables and table sets that ship with the package: one JSON file each in this folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names that ``load`` of tables and sets and :func:`mrrope.patch` take in place of a path."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


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
