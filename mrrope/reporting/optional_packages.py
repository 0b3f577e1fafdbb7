"""Imports of optional packages; the error of a missing one names the extra to install."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def needs(package: str, extra: str = "eval") -> Iterator[None]:
    """Wrap an import: a missing package is an ImportError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"this needs the package {package}: pip install 'mrrope[{extra}]' ({error})") from None


def require(*packages: str) -> None:
    """Import packages of the extra ``eval`` now, so that a missing one fails before the work and not after it."""
    for package in packages:
        with needs(package):
            importlib.import_module(package)


def progress_bar(*args: Any, **options: Any) -> Any:
    """A tqdm progress bar."""
    with needs("tqdm"):
        from tqdm import tqdm
    return tqdm(*args, **options)
