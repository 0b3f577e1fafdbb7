"""Chunked forward passes over long texts, with the KV cache carried from chunk to chunk."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mrrope.hf.auto_scale.follower import expecting, followers_in
from mrrope.reporting.options import DEFAULT_CHUNK

LONG_TEXT = 8192
"""From this length on cuDNN attention pays off, although it plans anew for every shape."""
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Progress = Callable[[int], object]
"""Called after every chunk with its number of tokens."""


def fast_attention(rows: torch.Tensor, first_position: int) -> contextlib.AbstractContextManager[object]:
    """Prefer cuDNN attention for a long prefill in one chunk on Hopper and later, where it is the fastest."""
    is_whole = first_position == 0 and rows.shape[1] >= LONG_TEXT
    if not is_whole or not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] < 9:
        return contextlib.nullcontext()
    return sdpa_kernel(PREFERRED, set_priority=True)


class Reader:
    """Position and KV cache of a text, or of a batch of texts of one length, that a model is reading."""

    def __init__(self, model: nn.Module, *, chunk: int = DEFAULT_CHUNK, progress: Progress | None = None) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be a positive number of tokens, got {chunk}")
        self.model = model
        self.chunk = chunk
        self.progress = progress
        self.device = next(model.parameters()).device
        self.position = 0
        self._cache: Any = None

    def read(self, tokens: Sequence[int], *, last_only: bool = False) -> Iterator[torch.Tensor]:
        """Yield the logits of each chunk, ``[tokens, vocabulary]``; with ``last_only``, of its last token."""
        return (logits[0] for logits in self.read_rows(torch.tensor([tokens]), last_only=last_only))

    def read_rows(self, rows: torch.Tensor, *, last_only: bool = False, skip: int = 0) -> Iterator[torch.Tensor]:
        """The same for a batch ``[texts, tokens]``; ``chunk`` counts the tokens of all texts together.

        Args:
            rows: the batch.
            last_only: yield the logits of each chunk's last token.
            skip: tokens at the beginning whose logits are neither computed nor yielded.
        """
        # scale="auto" gets the full length with the first chunk, so that it need not rescale the cache.
        whole, scored_from = self.position + rows.shape[1], self.position + skip
        for part in torch.split(rows.to(self.device), max(self.chunk // len(rows), 1), dim=1):
            scored = min(max(self.position + part.shape[1] - scored_from, 0), part.shape[1])
            positions = torch.arange(self.position, self.position + part.shape[1], device=self.device)
            length_known = expecting(self.model, whole) if followers_in(self.model) else contextlib.nullcontext()
            with torch.inference_mode(), length_known, fast_attention(part, self.position):
                # No mask, so that a text in one chunk takes the causal fast path of SDPA.
                output = self.model(
                    input_ids=part,
                    position_ids=positions[None],
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=self._kept_logits(part.shape[1], 1 if last_only else scored),
                )
            self._cache = output.past_key_values
            self.position += part.shape[1]
            if self.progress:
                self.progress(part.numel())
            if scored:
                yield output.logits

    @staticmethod
    def _kept_logits(tokens: int, wanted: int) -> int:
        """The argument ``logits_to_keep`` of a forward pass: 0 keeps all, so a single one is computed for none."""
        return 0 if wanted == tokens else max(wanted, 1)

    def answer(self, prompt: Sequence[int], count: int, *, end_token: int | None = None) -> list[int]:
        """Read the prompt and decode greedily, ``count`` tokens or until ``end_token``."""
        return self.answers([prompt], count, end_token=end_token)[0]

    def answers(self, prompts: Sequence[Sequence[int]], count: int, *, end_token: int | None = None) -> list[list[int]]:
        """Answer a batch of prompts of one length, as :meth:`answer` does one prompt."""
        answers: list[list[int]] = [[] for _ in prompts]
        unfinished = set(range(len(answers)))
        unread = torch.tensor(prompts)
        for _ in range(count):
            for logits in self.read_rows(unread, last_only=True):
                likeliest = logits[:, -1].argmax(-1)
            decoded = likeliest.tolist()
            unfinished = {row for row in unfinished if decoded[row] != end_token}
            if not unfinished:
                break
            for row in unfinished:
                answers[row].append(decoded[row])
            unread = likeliest[:, None]
            self.progress = None  # the bar's total excludes answers, whose length is not known beforehand
        return answers

    def fork(self) -> Reader:
        """A copy of the reader with its own KV cache."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        return other


ReaderMaker = Callable[..., Reader]
"""Makes a reader from a model and the keywords ``chunk`` and ``progress``: :class:`Reader` or a kind of it."""


def greedy_answer(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    chunk: int = DEFAULT_CHUNK,
    end_token: int | None = None,
    progress: Progress | None = None,
    reader: ReaderMaker = Reader,
) -> list[int]:
    """Greedy decoding after a prompt: ``count`` tokens or until ``end_token``."""
    return reader(model, chunk=chunk, progress=progress).answer(prompt, count, end_token=end_token)


def greedy_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    chunk: int = DEFAULT_CHUNK,
    end_token: int | None = None,
    progress: Progress | None = None,
    reader: ReaderMaker = Reader,
) -> list[list[int]]:
    """The same for every prompt; prompts of one length are batched, as many as fit in a chunk."""
    answers: dict[int, list[int]] = {}
    by_length: dict[int, list[int]] = {}
    for which, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(which)
    for length, alike in by_length.items():
        together = max(chunk // length, 1)
        for some in (alike[start : start + together] for start in range(0, len(alike), together)):
            together_read = reader(model, chunk=chunk, progress=progress)
            found = together_read.answers(
                [prompts[which] for which in some], max(counts[which] for which in some), end_token=end_token
            )
            answers |= {which: answer[: counts[which]] for which, answer in zip(some, found, strict=True)}
    return [answers[which] for which in range(len(prompts))]
