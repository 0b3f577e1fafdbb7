"""The JSON file of a benchmark: its rows, the machine and the versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mrrope.reporting.machine import VERSION, machine_name


def write(path: Path, device: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Write the file, with its folders, and return its content."""
    record = {"machine": machine_name(device), "torch": torch.__version__, "mrrope": VERSION, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record
