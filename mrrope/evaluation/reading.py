"""Reading a long text, or several of one length, in chunks, each with the keys and values of those before it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mrrope.hf.auto_scale.follower import expecting, followers_in

DEFAULT_CHUNK = 4096

LONG_TEXT = 8192
"""From how many tokens on an attention kernel that plans anew for every shape repays that."""
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Progress = Callable[[int], object]
"""Told, after every chunk, how many tokens were read."""


def fast_attention(rows: torch.Tensor, first_position: int) -> contextlib.AbstractContextManager[object]:
    """Within it, long texts that are read whole go to cuDNN's attention where that is the fastest: from Hopper on."""
    is_whole = first_position == 0 and rows.shape[1] >= LONG_TEXT
    if not is_whole or not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] < 9:
        return contextlib.nullcontext()
    return sdpa_kernel(PREFERRED, set_priority=True)


class Reader:
    """One text on its way through a model, which keeps what it has read in the model's own cache; or several side by
    side, all of one length."""

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
        return (logits[0] for logits in self.read_rows(torch.tensor([tokens]), last_only=last_only))

    def read_rows(self, rows: torch.Tensor, *, last_only: bool = False) -> Iterator[torch.Tensor]:
        """The same of several texts, ``[texts, tokens]``; a chunk has so many tokens of all of them together."""
        # Where the scale follows the text, its length is known from the first chunk on.
        whole = self.position + rows.shape[1]
        for part in torch.split(rows.to(self.device), max(self.chunk // len(rows), 1), dim=1):
            positions = torch.arange(self.position, self.position + part.shape[1], device=self.device)
            length_known = expecting(self.model, whole) if followers_in(self.model) else contextlib.nullcontext()
            with torch.inference_mode(), length_known, fast_attention(part, self.position):
                # No mask: without one a whole text in one chunk goes to the fast kernels for causal attention.
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
                self.progress(part.numel())
            yield output.logits

    def answer(self, prompt: Sequence[int], count: int, *, end_token: int | None = None) -> list[int]:
        """Reads on, and gives the likeliest token after that, ``count`` of them or until ``end_token``."""
        return self.answers([prompt], count, end_token=end_token)[0]

    def answers(self, prompts: Sequence[Sequence[int]], count: int, *, end_token: int | None = None) -> list[list[int]]:
        """The same for several texts."""
        answers: list[list[int]] = [[] for _ in prompts]
        unfinished = set(range(len(answers)))
        unread = torch.tensor(prompts)
        for _ in range(count):
            for logits in self.read_rows(unread, last_only=True):
                likeliest = logits[:, -1].argmax(-1)
            said = likeliest.tolist()
            unfinished = {row for row in unfinished if said[row] != end_token}
            if not unfinished:
                break
            for row in unfinished:
                answers[row].append(said[row])
            unread = likeliest[:, None]
            self.progress = None  # how long an answer gets is not known beforehand
        return answers

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


def greedy_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    chunk: int = DEFAULT_CHUNK,
    end_token: int | None = None,
    progress: Progress | None = None,
) -> list[list[int]]:
    """The same for every prompt. Those of one length are read side by side, as many as are within a chunk."""
    answers: dict[int, list[int]] = {}
    by_length: dict[int, list[int]] = {}
    for which, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(which)
    for length, alike in by_length.items():
        together = max(chunk // length, 1)
        for some in (alike[start : start + together] for start in range(0, len(alike), together)):
            reader = Reader(model, chunk=chunk, progress=progress)
            found = reader.answers(
                [prompts[which] for which in some], max(counts[which] for which in some), end_token=end_token
            )
            answers |= {which: answer[: counts[which]] for which, answer in zip(some, found, strict=True)}
    return [answers[which] for which in range(len(prompts))]
