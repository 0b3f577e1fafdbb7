"""The documents of a calibration: search, validation and held-out sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrrope.calibration.kinds import by_kind, named_texts
from mrrope.calibration.objective import fingerprint
from mrrope.calibration.pass_keys import with_keys
from mrrope.evaluation.documents import Document, encode, long_documents, opening_tokens, read_texts


@dataclass(frozen=True)
class DocumentSets:
    """Three disjoint sets of documents."""

    search: Sequence[Document]
    """The set that the search minimizes the loss of."""
    decide: Sequence[Document]
    """The validation set, which selects among the finalists, so that none wins by overfitting the search set."""
    held_out: Sequence[Document]
    """The set that is reported on, used for nothing else."""

    def with_keys(self, tokenizer: Any, lengths: Sequence[int]) -> DocumentSets:
        """The same sets with pass keys hidden in all but the held-out documents."""
        search, decide = (
            [with_keys(document, tokenizer, lengths) for document in documents]
            for documents in (self.search, self.decide)
        )
        return DocumentSets(search, decide, self.held_out)

    def texts(self) -> list[dict[str, Any]]:
        """The texts of the search: name, share of the search, and number of documents in every set."""
        kinds = by_kind(self.search)
        sets = {"search": self.search, "decide": self.decide, "held_out": self.held_out}
        return [
            {
                "name": kind,
                "share": 1 / len(kinds),
                **{name: sum(one.kind == kind for one in some) for name, some in sets.items()},
            }
            for kind in kinds
        ]


class Deduplicator:
    """Accepts each document once; documents with equal tokens, up to the length used, are duplicates."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.repeated: list[str] = []

    def __call__(self, document: Document) -> bool:
        key = fingerprint(document.tokens)
        if key in self._seen:
            self.repeated.append(document.name)
            return False
        self._seen.add(key)
        return True

    def warn(self, path: str | Path) -> None:
        """Warn about the duplicates of a file or folder."""
        if self.repeated:
            names = ", ".join(self.repeated)
            warnings.warn(f"left out of {path}, for beginning as others that are used: {names}", stacklevel=4)
            self.repeated = []


def document_sets(
    paths: Sequence[str | Path],
    tokenizer: Any,
    length: int,
    *,
    count: int,
    held_out_count: int,
    held_out: str | Path | None = None,
    join: bool = False,
    deciding_count: int | None = None,
    whole_search: bool = False,
) -> DocumentSets:
    """Deal the first documents of at least ``length`` tokens of every text, cut to it, to the three sets round-robin.

    Args:
        paths: files or folders, as for ``mrrope eval``; the documents of each are of one kind.
        tokenizer: the model's.
        length: in tokens.
        count: maximum number of search and validation documents of each text.
        held_out_count: maximum number of held-out documents, of each text or of ``held_out``.
        held_out: another file or folder for the held-out documents.
        join: concatenate documents of a text that are too short.
        deciding_count: maximum number of validation documents, of ``count``; by default half.
        whole_search: leave search documents whole instead of cutting them.

    Warns:
        UserWarning: documents are skipped because their first ``length`` tokens equal those of another.

    Raises:
        ValueError: a text has no document for one of the sets.
    """
    deduplicate = Deduplicator()
    deciding_count = count // 2 if deciding_count is None else deciding_count
    sizes = [count - deciding_count, deciding_count, held_out_count if held_out is None else 0]
    search: list[Document] = []
    decide: list[Document] = []
    reported: list[Document] = []
    for kind, path in named_texts(paths).items():
        documents = new_documents(
            path,
            tokenizer,
            length,
            sum(sizes),
            deduplicate,
            join=join,
            whole=whole_search,
            expected="text must hold documents that the texts before it do not" if search else "",
        )
        dealt = dealt_documents(documents, sizes)
        needed = sum(size > 0 for size in sizes)
        if sum(map(bool, dealt)) < needed:
            raise ValueError(
                f"text must hold at least {needed} documents of {length} tokens, to search, decide and report on, and "
                f"{path} has {len(documents)}" + ("" if join else "; --join puts shorter ones together")
            )
        search += [replace(one, kind=kind) for one in dealt[0]]
        for some, found in ((decide, dealt[1]), (reported, dealt[2])):
            some += [replace(one, kind=kind, tokens=one.tokens[:length]) for one in found]
    if held_out is not None:
        expected = "held_out must hold documents that text does not"
        reported = new_documents(held_out, tokenizer, length, held_out_count, deduplicate, join=join, expected=expected)
    return DocumentSets(search, decide, reported)


def dealt_documents(documents: Sequence[Document], sizes: Sequence[int]) -> list[list[Document]]:
    """Deal documents round-robin to sets of at most these sizes."""
    dealt: list[list[Document]] = [[] for _ in sizes]
    for document in documents:
        not_full = (one for one, size in zip(dealt, sizes, strict=True) if len(one) < size)
        min(not_full, key=len).append(document)
    return dealt


def new_documents(
    path: str | Path,
    tokenizer: Any,
    length: int,
    limit: int,
    deduplicate: Deduplicator,
    *,
    join: bool,
    whole: bool = False,
    expected: str = "",
) -> list[Document]:
    """Documents of a text that were not read before, with a warning about those that were.

    Args:
        path: a file or folder.
        tokenizer: the model's.
        length: in tokens.
        limit: maximum number of documents.
        deduplicate: of this text and those before it.
        join: concatenate documents that are too short.
        whole: leave documents whole instead of cutting them, where they are not joined.
        expected: how the error begins where all were read before; none for the first text.

    Raises:
        ValueError: there is no document.
    """
    try:
        if join:
            return joined_documents(path, tokenizer, length, limit, deduplicate)
        return long_documents(path, tokenizer, length, limit, deduplicate, whole=whole)
    except ValueError:
        if not (expected and deduplicate.repeated):
            raise
        raise ValueError(f"{expected}, and {path} has none left of {length} tokens") from None
    finally:
        deduplicate.warn(path)


def joined_documents(
    path: str | Path,
    tokenizer: Any,
    length: int,
    limit: int | None = None,
    is_wanted: Callable[[Document], bool] = lambda _: True,
) -> list[Document]:
    """Documents of exactly ``length`` tokens, each one document or several in a row; none is used twice."""
    documents: list[Document] = []
    names: list[str] = []
    tokens = opening = opening_tokens(tokenizer)
    for name, text in read_texts(path):
        encoded = encode(tokenizer, text)
        if not is_wanted(Document(name, encoded[:length])):
            continue
        names.append(name)
        tokens = tokens + encoded
        if len(tokens) >= length:
            documents.append(Document(" + ".join(names), tokens[:length]))
            names, tokens = [], opening
            if len(documents) == limit:
                break
    if not documents:
        raise ValueError(f"text must hold {length} tokens in all, and {path} has {len(tokens)}")
    return documents


def lengths_up_to(native: float, scale: float) -> list[int]:
    """The native length, doubled up to ``native * scale``."""
    lengths: Iterator[float] = (native * 2**i for i in range(64))
    longest = round(native * scale)
    return [*(round(length) for length in lengths if length < longest * 0.999), longest]
