"""The texts of a calibration: some to search with, others to decide with, others again to report on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrrope.calibration.keys import with_keys
from mrrope.calibration.readings import fingerprint
from mrrope.evaluation.texts import Document, encode, long_documents, opening_tokens, read_texts


@dataclass(frozen=True)
class DocumentSets:
    """Three sets that have no document in common."""

    search: Sequence[Document]
    """What candidates are compared on."""
    decide: Sequence[Document]
    """What the finalists are compared on, so that none is chosen for having learnt the first set by heart."""
    held_out: Sequence[Document]
    """What is reported, and nothing else."""

    def with_keys(self, tokenizer: Any, lengths: Sequence[int]) -> DocumentSets:
        """Keys to remember, in all but the held-out documents."""
        search, decide = (
            [with_keys(document, tokenizer, lengths) for document in documents]
            for documents in (self.search, self.decide)
        )
        return DocumentSets(search, decide, self.held_out)


class NotYetSeen:
    """Whether a text begins otherwise than all before it, in whatever file they are."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.repeated: list[str] = []

    def __call__(self, document: Document) -> bool:
        who = fingerprint(document.tokens)
        if who in self._seen:
            self.repeated.append(document.name)
            return False
        self._seen.add(who)
        return True

    def warn(self, path: str | Path) -> None:
        """Tells what was left out of a file or folder."""
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
) -> DocumentSets:
    """The first documents of at least ``length`` tokens, cut to it, dealt out to the three sets in turn.

    Args:
        path: a file or folder, as ``mrrope eval`` takes them.
        tokenizer: the model's.
        length: in tokens.
        count: how many documents to search and to decide with, at most.
        held_out_count: how many to report on, at most.
        held_out: another file or folder to report on.
        join: whether documents that are too short are put together, end to end, until they are long enough.

    Warns:
        UserWarning: where documents are left out because they begin, as far as they are read, as others that are used.

    Raises:
        ValueError: where there are not enough for every set to have one.
    """
    is_new = NotYetSeen()
    find = joined_documents if join else long_documents
    sizes = [math.ceil(count / 2), count // 2, *([held_out_count] if held_out is None else [])]
    documents = find(path, tokenizer, length, sum(sizes), is_new)
    is_new.warn(path)
    if len(documents) < len(sizes):
        raise ValueError(
            f"text must hold at least {len(sizes)} documents of {length} tokens, to search, decide and report on, and "
            f"{path} has {len(documents)}" + ("" if join else "; --join puts shorter ones together")
        )
    hands: list[list[Document]] = [[] for _ in sizes]
    for document in documents:
        open_hands = (hand for hand, size in zip(hands, sizes, strict=True) if len(hand) < size)
        min(open_hands, key=len).append(document)
    if held_out is None:
        return DocumentSets(*hands)
    try:
        return DocumentSets(hands[0], hands[1], find(held_out, tokenizer, length, held_out_count, is_new))
    except ValueError:
        if not is_new.repeated:
            raise
        raise ValueError(
            f"held_out must hold documents that text does not, and {held_out} has none left of {length} tokens"
        ) from None
    finally:
        is_new.warn(held_out)


def joined_documents(
    path: str | Path,
    tokenizer: Any,
    length: int,
    limit: int | None = None,
    is_wanted: Callable[[Document], bool] = lambda _: True,
) -> list[Document]:
    """Documents of exactly ``length`` tokens, each of one long document or of several in a row; none is in two."""
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
    """From the native length on, doubled until the whole scale."""
    lengths: Iterator[float] = (native * 2**i for i in range(64))
    longest = round(native * scale)
    return [*(round(length) for length in lengths if length < longest * 0.999), longest]
