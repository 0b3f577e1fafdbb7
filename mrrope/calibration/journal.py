"""The journal of a calibration: every reading is on disk as soon as it is done, so a killed run resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = "mrrope.calibration-journal/1"
BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()


class Journal:
    """A JSON-lines file: a header with the settings of the run, then one line per reading."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Open the journal of an earlier run with the same settings, or create it.

        Raises:
            ValueError: the file is in use, belongs to a run with other settings, or is no journal.
            OSError: the file cannot be written.
        """
        self.path = path
        self._readings: dict[str, dict[str, Any]] = {}
        header = json.loads(json.dumps({"format": FORMAT, **about}))
        self._file = path.open("ab")
        try:
            self._lock()
            whole = self._whole_lines()
            if whole:
                self._resume(whole, header)
        except BaseException:
            self._file.close()
            raise
        # Only a line that a kill cut off is lost.
        self._file.truncate(sum(map(len, whole)))
        if not whole:
            self._append(header)

    def __len__(self) -> int:
        return len(self._readings)

    def get(self, key: str) -> dict[str, Any] | None:
        """A reading of this run or of the run it resumes."""
        return self._readings.get(key)

    def put(self, key: str, reading: dict[str, Any]) -> None:
        """Append a reading, durably: neither a kill nor a power cut after the return loses it."""
        self._readings[key] = {"key": key, **reading}
        self._append(self._readings[key])

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def _lock(self) -> None:
        """Lock the file until it is closed; the system releases the lock of a killed run."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--output must be another one: the journal {self.path} is in use by another run"
            ) from None

    def _resume(self, whole: list[bytes], header: dict[str, Any]) -> None:
        try:
            found, *readings = map(json.loads, whole)
        except ValueError as error:
            raise ValueError(f"--output must be a new one: the journal {self.path} is damaged: {error}") from None
        self._check(found, header)
        self._readings = {reading["key"]: reading for reading in readings}

    def _whole_lines(self) -> list[bytes]:
        content = self.path.read_bytes()
        if not content.startswith(BEGINNING[: len(content)]):
            raise ValueError(f"--output must be a new one: {self.path} is there already, and is no journal")
        return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if differing := sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key)):
            raise ValueError(
                f"--output must be that of the same run or a new one, and {self.path} is of a run with another "
                f"{', '.join(differing)}"
            )


class UnsavedJournal(Journal):
    """A journal in memory, for processes that leave the file to another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readings = {}

    def close(self) -> None:
        """There is nothing to close."""

    def _append(self, entry: dict[str, Any]) -> None:
        pass
