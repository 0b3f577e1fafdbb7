"""Tables that were calibrated for models and come with the package: the JSON files of this folder, by their names."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """What :meth:`mrrope.FrequencyTable.load` and :func:`mrrope.patch` take in place of a path."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def listed() -> str:
    """The names, for errors."""
    return ", ".join(names()) or "there is none yet"


def file_of(table: str | Path) -> Path:
    """The file that a path, or the name of a table that comes with the package, stands for."""
    path = Path(table)
    if path.suffix == ".json" or path.exists():
        return path
    if str(table) in names():
        return FOLDER / f"{table}.json"
    raise FileNotFoundError(
        f"path must be that of a table's JSON, or the name of a table that comes with mrrope ({listed()}), "
        f"got {str(table)!r}"
    )
