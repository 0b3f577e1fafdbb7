"""Long real texts that are installed with Python and with torch."""

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


def mathematics_texts() -> Iterator[str]:
    """Yield mpmath's reference of mathematical functions, which torch brings with it, then :func:`library_texts`."""
    found = importlib.util.find_spec("mpmath")
    if found is not None and found.origin is not None:
        yield Path(found.origin).with_name("function_docs.py").read_text(encoding="utf-8")
    yield from library_texts()
