"""Kinds of text, which have equal shares of a search whatever their numbers of documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from mrrope.evaluation.documents import Document


def named_texts(paths: Sequence[str | Path]) -> dict[str, str | Path]:
    """Files and folders by their names, or by their paths where two have one name."""
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, paths, strict=True)}


def by_kind(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """The documents of each kind."""
    found: dict[str, list[Document]] = {}
    for document in documents:
        found.setdefault(document.kind, []).append(document)
    return found


def first_of_each_kind(documents: Iterable[Document]) -> list[Document]:
    """The first document of every kind, for cheap rungs."""
    return [some[0] for some in by_kind(documents).values()]


def mean_over_kinds(documents: Iterable[Document], values: Iterable[float]) -> float:
    """The mean of a value per document in which all kinds weigh the same: the mean over kinds of their means."""
    found: dict[str, list[float]] = {}
    for document, value in zip(documents, values, strict=True):
        found.setdefault(document.kind, []).append(value)
    return fmean(map(fmean, found.values()))
