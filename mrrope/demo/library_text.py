"""A long real text that every Python has: its own documentation, then sources of its library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

MODULES = ("argparse", "typing", "tarfile", "inspect", "subprocess", "doctest", "turtle", "pickletools", "ipaddress")
"""Long modules of the library with much prose in them; for readings longer than the documentation."""


def library_texts() -> Iterator[str]:
    """The documentation of the language, topic by topic, then the modules."""
    # Not before it is wanted: it is large.
    from pydoc_data.topics import topics

    yield from topics.values()
    for name in MODULES:
        # Found, not imported: turtle would want a screen.
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            yield Path(found.origin).read_text(encoding="utf-8")
