"""Reading a long text in chunks, each with the keys and values of those before it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mrrope.following import expecting, followers_in

DEFAULT_CHUNK = 4096

Progress = Callable[[int], object]
"""Told, after every chunk, how many tokens were read."""


class Reader:
    """One text on its way through a model, which keeps what it has read in the model's own cache."""

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
        """The logits after the tokens, ``[tokens, vocabulary]``, one chunk at a time; or after each chunk's last."""
        # Where the scale follows the text, its length is known from the first chunk on.
        whole = self.position + len(tokens)
        for start in range(0, len(tokens), self.chunk):
            part = torch.tensor([tokens[start : start + self.chunk]], device=self.device)
            positions = torch.arange(self.position, self.position + part.shape[1], device=self.device)
            length_known = expecting(self.model, whole) if followers_in(self.model) else contextlib.nullcontext()
            with torch.inference_mode(), length_known:
                output = self.model(
                    input_ids=part,
                    position_ids=positions[None],
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=int(last_only),
                )
            self._cache = output.past_key_values
            self.position += part.shape[1]
            if self.progress:
                self.progress(part.shape[1])
            yield output.logits[0]

    def answer(self, prompt: Sequence[int], count: int, *, end_token: int | None = None) -> list[int]:
        """Reads on, and gives the likeliest token after that, ``count`` of them or until ``end_token``."""
        answer: list[int] = []
        unread = list(prompt)
        while len(answer) < count:
            for logits in self.read(unread, last_only=True):
                likeliest = int(logits[-1].argmax())
            if likeliest == end_token:
                break
            answer.append(likeliest)
            unread = [likeliest]
            self.progress = None  # how long an answer gets is not known beforehand
        return answer

    def fork(self) -> Reader:
        """Another reader of the same text so far, with a cache of its own."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        return other


def greedy_answer(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    chunk: int = DEFAULT_CHUNK,
    end_token: int | None = None,
    progress: Progress | None = None,
) -> list[int]:
    """The likeliest token after the prompt, and after that, ``count`` of them or until ``end_token``."""
    return Reader(model, chunk=chunk, progress=progress).answer(prompt, count, end_token=end_token)
