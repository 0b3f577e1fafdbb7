"""The machine and library versions that a measurement was made with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

# Read here as in mrrope/__init__.py, which imports the whole public API and is a layer above this one.
VERSION = (Path(__file__).parents[1] / "VERSION").read_text().strip()


def machine_name(device: str) -> str:
    """The name of the GPU, or the CPU architecture and its thread count."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def measured_with(model: Any) -> dict[str, str]:
    """dtype, device and library versions of a model's measurement."""
    import transformers

    device = next(model.parameters()).device
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mrrope": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
