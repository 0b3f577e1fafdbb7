"""The record of the last GPU test run, and how far it is behind the sources that it speaks of."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "benchmarks" / "results" / "gpu_tests.json"
SOURCE_FOLDERS = "csrc", "kernels", "bindings"
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def sources_hash(root: Path = ROOT) -> str:
    """Return a hash of the names and contents of all C++ and CUDA sources."""
    digest = hashlib.sha256()
    files = (path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in SOURCE_SUFFIXES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Return git's output, or None where it fails: outside a checkout, or of a commit that is not there."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if run.returncode else run.stdout.strip()


def staleness(record: dict[str, Any], root: Path = ROOT) -> str | None:
    """Return one line that says how far the record is behind the sources, or None where it is of these sources."""
    if record["sources"] == sources_hash(root):
        return None
    line = f"the GPU test record is of {record['commit'][:10]} and of other sources in {', '.join(SOURCE_FOLDERS)}"
    commits = git("rev-list", "--count", f"{record['commit']}..HEAD", "--", *SOURCE_FOLDERS, root=root)
    changes = git("diff", "--shortstat", record["commit"], "--", *SOURCE_FOLDERS, root=root)
    behind = "" if not commits or not changes else f" ({commits} commits since: {changes})"
    return f"{line}{behind}: run make gpu-test on a machine with a GPU"


PARTS = "cpp", "python", "fuzz", "sanitizers"


def gaps(record: dict[str, Any]) -> str | None:
    """Return one line that says what the record leaves open, or None where every part is there and passed."""
    parts = record["parts"]
    found = [f"no part {name}" for name in PARTS if name not in parts]
    for name, part in parts.items():
        for what, entries in (("failures", part["failures"]), ("runs not finished", part.get("not_finished", []))):
            if entries:
                found.append(f"{len(entries)} {what} in {name}")
    return f"the GPU test record has {', '.join(found)}" if found else None


def load(path: Path = RECORD) -> dict[str, Any]:
    """Return the stored record."""
    return json.loads(path.read_text())
