"""Run a script with torchrun on two CPU ranks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def run_on_two_ranks(script: str, folder: Path) -> Callable[[str], dict[str, Any]]:
    """Run a script that saves results in the folder given as its argument; return a function that loads one by name."""
    file = folder / "script.py"
    file.write_text(script)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file, folder],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    def result(part: str) -> dict[str, Any]:
        if not (folder / part).exists():
            pytest.fail(run.stderr[-6000:])
        found: dict[str, Any] = torch.load(folder / part)
        return found

    return result
