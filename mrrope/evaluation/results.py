"""The results file of an evaluation, rewritten as figures arrive."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

FORMAT = "mrrope.evaluation/1"
SECONDS_BETWEEN_SAVES = 5.0


class EvaluationStoppedError(RuntimeError):
    """An evaluation stopped early; the figures measured so far are in its results file."""


class Results:
    """Figures by task, method and length, and the settings they were measured with."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self._saved = -math.inf
        self.data: dict[str, Any] = {"format": FORMAT, **about, "stopped": None, "complete": False, "results": {}}

    @classmethod
    def resumed(cls, path: Path, about: dict[str, Any]) -> Results:
        """Resume from the file of an earlier run with the same settings, or start with no figures.

        Raises:
            ValueError: the file belongs to a run with other settings.
        """
        results = cls(path, json.loads(json.dumps(about)))
        if path.exists():
            found = json.loads(path.read_text())
            if differing := sorted(name for name in about if found.get(name) != results.data[name]):
                raise ValueError(
                    f"--output must be that of the same run or a new one, and {path} is of a run with another "
                    f"{', '.join(differing)}"
                )
            results.data = found
        return results

    def part(self, name: str) -> Results:
        """A named part, stored in the same file."""
        return _Part(self, self.data.setdefault("parts", {}).setdefault(name, {"results": {}}))

    def put(self, task: str, method: str, length: int, figures: dict[str, Any]) -> None:
        """Store figures, replacing older ones, and save."""
        by_length = self.data["results"].setdefault(task, {}).setdefault(method, {})
        by_length[str(length)] = figures
        self.save()

    def finish(self, stopped: str | None = None) -> None:
        """Mark the results complete, or stopped for a reason, and save."""
        self.data |= {"complete": stopped is None, "stopped": stopped}
        self.save()

    def save(self) -> None:
        """Write the file atomically: a kill leaves either the old or the new one."""
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)
        self._saved = time.monotonic()


class UnsavedResults(Results):
    """Results of a process that leaves the file to another one."""

    def save(self) -> None:
        """Nothing is written."""


class _Part(Results):
    """A part of a large file, which is saved at most every ``SECONDS_BETWEEN_SAVES``."""

    def __init__(self, whole: Results, data: dict[str, Any]) -> None:
        self.path, self.data, self._whole = whole.path, data, whole

    def save(self) -> None:
        """Save the whole file if the last save is old enough; the caller saves it at the end."""
        if time.monotonic() - self._whole._saved > SECONDS_BETWEEN_SAVES:
            self._whole.save()
