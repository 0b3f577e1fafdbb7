"""A long real text that ships with Python: its documentation, then sources of its standard library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

MODULES = ("argparse", "typing", "tarfile", "inspect", "subprocess", "doctest", "turtle", "pickletools", "ipaddress")
"""Long standard-library modules with much prose, for lengths beyond the documentation."""


def library_texts() -> Iterator[str]:
    """Yield the topics of Python's documentation, then the source of each module."""
    # Imported on use: the module is large.
    from pydoc_data.topics import topics

    yield from topics.values()
    for name in MODULES:
        # Located without importing: turtle needs a display.
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            yield Path(found.origin).read_text(encoding="utf-8")
