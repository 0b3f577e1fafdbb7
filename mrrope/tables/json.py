"""What the JSON files of all kinds of tables have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE_FORMAT = "mrrope.FrequencyTable/1"
HEADS_FORMAT = "mrrope.HeadTables/1"
SET_FORMAT = "mrrope.TableSet/1"
ROWS = {HEADS_FORMAT: "heads", SET_FORMAT: "layers"}
"""The field of a format that holds a list of tables."""
SEARCHED_ON = "searched_on"
"""An optional field about tables that a search found: the model and the texts. It changes no rotation."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def without_format(data: object, expected: str) -> dict[str, Any]:
    """Return the other fields of a dict of one format, without what the tables were searched on.

    Raises:
        TypeError: ``data`` is no dict.
        ValueError: ``data`` has another format; the message names the class that reads it.
    """
    if not isinstance(data, dict):
        raise TypeError(f"data must be a dict as to_dict makes it, got {type(data).__name__}")
    found = data.get("format")
    if found != expected:
        others = {TABLE_FORMAT: "FrequencyTable", HEADS_FORMAT: "HeadTables", SET_FORMAT: "TableSet"}
        reader = f", which mrrope.{others[found]} reads" if isinstance(found, str) and found in others else ""
        raise ValueError(f"format must be {expected!r}, got {found!r}{reader}")
    return {name: value for name, value in data.items() if name not in ("format", SEARCHED_ON)}


def shared_fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields that all rows have with one value: a file states them once."""
    first, *others = rows
    return {name: value for name, value in first.items() if all(name in row and row[name] == value for row in others)}


def unshared_fields(row: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are its own."""
    return {name: value for name, value in row.items() if name not in shared}


def text_of(data: Mapping[str, Any]) -> str:
    """Return a ``to_dict`` dict as JSON; one line for each of several tables is compact, and readable in a diff."""
    rows = ROWS.get(data["format"])
    if rows is None:
        return json.dumps(data, indent=1) + "\n"
    head = json.dumps({name: value for name, value in data.items() if name != rows}, indent=1)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in data[rows])
    return f'{head[:-2]},\n "{rows}": [\n{lines}\n]}}\n'
