"""What to say where a package of the extra ``eval`` is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str, extra: str = "eval") -> Iterator[None]:
    """Around an import: where it fails, says how to get the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"this needs the package {package}: pip install 'mrrope[{extra}]' ({error})") from None
