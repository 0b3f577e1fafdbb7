"""Documents from a text file, from a file with several, or from a folder."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEPARATOR = "\0"
"""Separates the documents of one file."""


@dataclass(frozen=True)
class Document:
    """A named, tokenized text."""

    name: str
    tokens: list[int]
    kind: str = field(default="", kw_only=True)
    """The text that it is from, where a calibration has several."""


def text_files(path: str | Path) -> list[Path]:
    """The file itself, or the files of a folder sorted by name."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"text must be a file or a folder, and there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"text must be a folder with files in it, and {path} is empty")
    return files


def read_texts(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document in a file or folder."""
    for file in text_files(path):
        try:
            data = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
            parts = data.decode().split(SEPARATOR)
        except (lzma.LZMAError, UnicodeDecodeError) as error:
            raise ValueError(f"text must be UTF-8, plain or in .xz, and {file} is not: {error}") from None
        for number, part in enumerate(parts, 1):
            if part.strip():
                yield file.name if len(parts) == 1 else f"{file.name}#{number}", part


def opening_tokens(tokenizer: Any) -> list[int]:
    """The BOS token if the tokenizer prepends one, else nothing."""
    return [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def long_documents(
    path: str | Path,
    tokenizer: Any,
    length: int,
    limit: int | None = None,
    is_wanted: Callable[[Document], bool] = lambda _: True,
    *,
    whole: bool = False,
) -> list[Document]:
    """The first ``length`` tokens of at most ``limit`` documents that are long enough and wanted; or ``whole`` ones.

    Raises:
        ValueError: no document is long enough; the message names the longest.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"documents must be a positive number, got {limit}")
    opening = opening_tokens(tokenizer)
    documents: list[Document] = []
    longest = "", ""
    for name, text in read_texts(path):
        # A byte gives one token at most, rare characters aside: skip encoding what is far too short.
        if 2 * len(text.encode()) >= length:
            tokens = opening + encode(tokenizer, text)
            if len(tokens) >= length and is_wanted(document := Document(name, tokens[:length])):
                documents.append(Document(name, tokens) if whole else document)
                if len(documents) == limit:
                    break
        longest = max(longest, (name, text), key=lambda one: len(one[1]))
    if not documents:
        name, text = longest
        found = len(opening) + len(encode(tokenizer, text))
        raise ValueError(
            f"text must hold a document of at least {length} tokens, and the longest of {path} is {name!r}: {found}"
        )
    return documents
