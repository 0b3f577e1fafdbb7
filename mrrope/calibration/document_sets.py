"""The documents of a calibration: search, validation and held-out sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
            warnings.warn(f"left out of {path}, for beginning as others that are used: {names}", stacklevel=3)
            self.repeated = []


def document_sets(
    path: str | Path,
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
    """Deal the first documents of at least ``length`` tokens, cut to it, to the three sets round-robin.

    Args:
        path: a file or folder, as for ``mrrope eval``.
        tokenizer: the model's.
        length: in tokens.
        count: maximum number of search and validation documents.
        held_out_count: maximum number of held-out documents.
        held_out: another file or folder for the held-out documents.
        join: concatenate documents that are too short.
        deciding_count: maximum number of validation documents, of ``count``; by default half.
        whole_search: leave search documents whole instead of cutting them.

    Warns:
        UserWarning: documents are skipped because their first ``length`` tokens equal those of another.

    Raises:
        ValueError: there is no document for one of the sets.
    """
    deduplicate = Deduplicator()
    find = joined_documents if join else long_documents
    deciding_count = count // 2 if deciding_count is None else deciding_count
    sizes = [count - deciding_count, deciding_count, *([held_out_count] if held_out is None else [])]
    is_cut = join or not whole_search
    documents = (
        find(path, tokenizer, length, sum(sizes), deduplicate)
        if is_cut
        else long_documents(path, tokenizer, length, sum(sizes), deduplicate, whole=True)
    )
    deduplicate.warn(path)
    if len(documents) < len(sizes):
        raise ValueError(
            f"text must hold at least {len(sizes)} documents of {length} tokens, to search, decide and report on, and "
            f"{path} has {len(documents)}" + ("" if join else "; --join puts shorter ones together")
        )
    dealt: list[list[Document]] = [[] for _ in sizes]
    for document in documents:
        not_full = (one for one, size in zip(dealt, sizes, strict=True) if len(one) < size)
        min(not_full, key=len).append(document)
    dealt[1:] = [[Document(one.name, one.tokens[:length]) for one in some] for some in dealt[1:]]
    if held_out is None:
        return DocumentSets(*dealt)
    try:
        return DocumentSets(dealt[0], dealt[1], find(held_out, tokenizer, length, held_out_count, deduplicate))
    except ValueError:
        if not deduplicate.repeated:
            raise
        raise ValueError(
            f"held_out must hold documents that text does not, and {held_out} has none left of {length} tokens"
        ) from None
    finally:
        deduplicate.warn(held_out)


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
