"""What a benchmark leaves behind: its rows, and where they were measured."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from mrrope import __version__


def machine(device: str) -> str:
    """The GPU by name, or the processor and how much of it is used."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def write(path: Path, device: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Writes a JSON file, with its folders, and returns what is in it."""
    record = {"machine": machine(device), "torch": torch.__version__, "mrrope": __version__, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record
