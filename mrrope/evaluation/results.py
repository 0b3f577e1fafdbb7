"""What was measured, kept on disk as it grows."""

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
    """Why an evaluation could not go on; what it had measured by then is kept."""


class Results:
    """Figures by task, method and length, and what they were measured on."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self._saved = -math.inf
        self.data: dict[str, Any] = {"format": FORMAT, **about, "stopped": None, "complete": False, "results": {}}

    @classmethod
    def going_on(cls, path: Path, about: dict[str, Any]) -> Results:
        """What an earlier run on the same things left in the file, or nothing yet.

        Raises:
            ValueError: where the file is of a run on other things.
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
        """One part of several, which is kept in the file of the whole."""
        return _Part(self, self.data.setdefault("parts", {}).setdefault(name, {"results": {}}))

    def put(self, task: str, method: str, length: int, figures: dict[str, Any]) -> None:
        """Keeps some figures, in place of those that were there, and writes the file."""
        by_length = self.data["results"].setdefault(task, {}).setdefault(method, {})
        by_length[str(length)] = figures
        self.save()

    def finish(self, stopped: str | None = None) -> None:
        """Notes that all was measured, or why not."""
        self.data |= {"complete": stopped is None, "stopped": stopped}
        self.save()

    def save(self) -> None:
        """Writes the file in one step, so that a kill leaves either the old one or the new one."""
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)
        self._saved = time.monotonic()


class _Part(Results):
    """Figures that are saved with those of the other parts; now and then, since the file of the whole is large."""

    def __init__(self, whole: Results, data: dict[str, Any]) -> None:
        self.path, self.data, self._whole = whole.path, data, whole

    def save(self) -> None:
        """A kill loses the last seconds at most; who measures saves the whole at the end."""
        if time.monotonic() - self._whole._saved > SECONDS_BETWEEN_SAVES:
            self._whole.save()
