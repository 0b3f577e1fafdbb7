"""Perplexity by context length.

Reading a text once gives the likelihood of every token after all those before it, and with it the figures of every
length: a causal model's token does not know how much is to come. Only a table that follows the length of the text
does; it is read anew for every length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from mrrope.evaluation.reading import DEFAULT_CHUNK, Progress, Reader

# Rows of logits that are turned to float32 at a time.
FLOAT32_ROWS = 1024


@dataclass(frozen=True)
class DocumentLoss:
    """The mean negative log-likelihood, in nats, of a document's first ``length`` tokens."""

    length: int
    whole: float
    """Of all its tokens but the first: the usual protocol, and the papers'."""
    second_half: float
    """Of the tokens from ``length / 2`` on, each of which has at least half of the context before it."""


def token_losses(
    model: nn.Module, tokens: Sequence[int], *, chunk: int = DEFAULT_CHUNK, progress: Progress | None = None
) -> Iterator[torch.Tensor]:
    """The negative log-likelihood of every token but the first, float32 on the CPU, one chunk at a time."""
    return losses_ahead(Reader(model, chunk=chunk, progress=progress), tokens)


def losses_ahead(reader: Reader, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """The same of the tokens that come after those that were read already; all but the last are read then."""
    for logits in reader.read(tokens[reader.position : -1]):
        following = torch.tensor(tokens[reader.position - len(logits) + 1 : reader.position + 1], device=logits.device)
        rows = zip(torch.split(logits, FLOAT32_ROWS), torch.split(following, FLOAT32_ROWS), strict=True)
        losses = [nn.functional.cross_entropy(some.float(), target, reduction="none") for some, target in rows]
        yield torch.cat(losses).cpu()


def loss_at(length: int, losses: torch.Tensor) -> DocumentLoss:
    """The figures of the first ``length`` tokens, from the losses of all tokens but the first."""
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
) -> Iterator[DocumentLoss]:
    """A document's figures at every length, the shortest first, each as soon as it is known.

    Args:
        model: a causal language model of transformers.
        tokens: the document, at least as long as the longest length.
        lengths: in tokens, from 2 on.
        one_reading: whether one reading of the longest serves all lengths, as it does for a fixed table; otherwise
            every length is read by itself.
        chunk: how many tokens go through the model at a time; their logits are in memory together.
        progress: told how many tokens were read, after every chunk.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 2:
        raise ValueError(f"lengths must be 2 tokens or more, got {lengths}")
    if len(tokens) < lengths[-1]:
        raise ValueError(f"tokens must be at least {lengths[-1]}, the longest of lengths, got {len(tokens)}")
    for together in [lengths] if one_reading else [[length] for length in lengths]:
        losses = torch.empty(0)
        pending = list(together)
        for more in token_losses(model, tokens[: together[-1]], chunk=chunk, progress=progress):
            losses = torch.cat([losses, more])
            while pending and pending[0] - 1 <= len(losses):
                yield loss_at(pending.pop(0), losses)


def perplexity(losses: Sequence[float]) -> float:
    """The perplexity of several documents: the exponential of the mean of their mean losses."""
    mean = fmean(losses)
    return math.exp(mean) if mean < 700 else math.inf
