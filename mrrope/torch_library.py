"""Which library registers the ops: the package has one for each minor version of torch that it was built for.

Only the standard library is imported, so that ``mrrope env`` has it where torch does not load.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def minor_of(version: str) -> str:
    """Return the minor version: 2.11 of 2.11.0+cu130."""
    return ".".join(version.split(".")[:2])


def library_for(version: str, package: Path = PACKAGE) -> Path:
    """Return the path of the library for a version of torch, whether it is there or not."""
    return package / f"libmrrope_torch{minor_of(version)}.so"
