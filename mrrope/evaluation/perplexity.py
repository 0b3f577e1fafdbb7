"""Perplexity by context length.

One forward pass gives the loss of every token, and thereby the perplexity at every length, because a causal model's
loss at a position does not depend on later tokens. ``scale="auto"`` breaks this: its table depends on the length of
the text, so every length takes its own pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from mrrope.evaluation.chunked_reader import Progress, Reader, ReaderMaker
from mrrope.reporting.options import DEFAULT_CHUNK

FLOAT32_ROWS = 1024
"""Rows of logits that are converted to float32 at a time, to bound memory."""


@dataclass(frozen=True)
class DocumentLoss:
    """The mean negative log-likelihood, in nats, of a document's first ``length`` tokens."""

    length: int
    whole: float
    """Over all tokens but the first: the usual protocol, also that of the papers."""
    second_half: float
    """Over the tokens from ``length / 2`` on, each of which has at least half of the context before it."""


def token_losses(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    chunk: int = DEFAULT_CHUNK,
    progress: Progress | None = None,
    reader: ReaderMaker = Reader,
) -> Iterator[torch.Tensor]:
    """Yield the negative log-likelihood of every token but the first, float32 on the CPU, chunk by chunk."""
    return next_token_losses(reader(model, chunk=chunk, progress=progress), tokens)


def next_token_losses(reader: Reader, tokens: Sequence[int], *, skip: int = 0) -> Iterator[torch.Tensor]:
    """The same for the tokens after the reader's position but the first ``skip``; reads all of them but the last."""
    for rows_of_logits in reader.read_rows(torch.tensor([tokens[reader.position : -1]]), skip=skip):
        logits = rows_of_logits[0]
        following = torch.tensor(tokens[reader.position - len(logits) + 1 : reader.position + 1], device=logits.device)
        rows = zip(torch.split(logits, FLOAT32_ROWS), torch.split(following, FLOAT32_ROWS), strict=True)
        losses = [nn.functional.cross_entropy(some.float(), target, reduction="none") for some, target in rows]
        yield torch.cat(losses).cpu()


def loss_at(length: int, losses: torch.Tensor) -> DocumentLoss:
    """Mean losses of the first ``length`` tokens; ``losses`` starts with the second token."""
    whole, second_half = losses[: length - 1].double(), losses[length // 2 - 1 : length - 1].double()
    return DocumentLoss(length, whole.mean().item(), second_half.mean().item())


def document_losses(
    model: nn.Module,
    tokens: Sequence[int],
    lengths: Sequence[int],
    *,
    one_reading: bool = True,
    chunk: int = DEFAULT_CHUNK,
    progress: Progress | None = None,
    reader: ReaderMaker = Reader,
) -> Iterator[DocumentLoss]:
    """Yield a document's mean losses at every length, the shortest first.

    Args:
        model: a causal language model of transformers.
        tokens: the document, at least as long as the longest length.
        lengths: in tokens, at least 2.
        one_reading: one pass over the longest length serves all lengths, as is right for a fixed table; otherwise
            every length takes its own pass.
        chunk: tokens per forward pass; their logits are in memory together.
        progress: called after every chunk with its number of tokens.
        reader: makes the reader, such as a :class:`~mrrope.evaluation.truncated.TruncatedReader`.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 2:
        raise ValueError(f"lengths must be 2 tokens or more, got {lengths}")
    if len(tokens) < lengths[-1]:
        raise ValueError(f"tokens must be at least {lengths[-1]}, the longest of lengths, got {len(tokens)}")
    for together in [lengths] if one_reading else [[length] for length in lengths]:
        losses = torch.empty(0)
        pending = list(together)
        for more in token_losses(model, tokens[: together[-1]], chunk=chunk, progress=progress, reader=reader):
            losses = torch.cat([losses, more])
            while pending and pending[0] - 1 <= len(losses):
                yield loss_at(pending.pop(0), losses)


def perplexity(losses: Sequence[float], mean: Callable[[Sequence[float]], float] = fmean) -> float:
    """The perplexity of several documents: the exponential of their average mean loss."""
    average = mean(losses)
    return math.exp(average) if average < 700 else math.inf
