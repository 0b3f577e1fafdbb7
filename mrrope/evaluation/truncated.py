"""The baseline ``truncated``: the stock model over a sliding window of its native length.

Whoever does not extend a model truncates its input. A table is worth its name where it beats that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mrrope.evaluation.chunked_reader import Progress, Reader
from mrrope.hf import rope_config
from mrrope.reporting.options import DEFAULT_CHUNK

TRUNCATED = "truncated"
SHIFTS_PER_WINDOW = 8
"""The window moves by an eighth of its length, so that every token is scored where it is at least 7/8 full."""


def native_length(model: nn.Module) -> int:
    """The native length of a stock model.

    Raises:
        ValueError: the model's configuration does not state it.
    """
    length = rope_config.global_settings(model).original_max_position
    if length is None:
        raise ValueError(f"{TRUNCATED} must have a native length, and the configuration of the model states none")
    return int(length)


class TruncatedReader(Reader):
    """A :class:`Reader` whose model reads no text past its native length.

    Up to the native length it reads as a :class:`Reader` does. When the window is full, it moves by an eighth of its
    length: the tokens that stay are read anew, from position 0 on and without their logits, and the next ones follow.
    A window depends on the tokens before it only, so one reading serves all lengths of a text.

    An answer follows the last native length of tokens of the prompt, and runs past it by an eighth at most before the
    window moves. A prompt of the native length or less is thus answered as by a :class:`Reader`.

    Only the cache of the current window is held.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        native_length: int,
        opening: int = 0,
        chunk: int = DEFAULT_CHUNK,
        progress: Progress | None = None,
    ) -> None:
        """Start before the first token of a text, or of a batch of texts of one length.

        Args:
            model: the stock model.
            native_length: the length of the window, in tokens.
            opening: tokens at the beginning of a text that every window begins with: 1 where the tokenizer prepends a
                BOS token (``len(opening_tokens(tokenizer))``). Some models read badly without it.
            chunk: tokens per forward pass.
            progress: called with the number of tokens of the text that were read or skipped; tokens that a window
                reads anew are not counted.
        """
        super().__init__(model, chunk=chunk, progress=progress)
        if native_length < SHIFTS_PER_WINDOW:
            raise ValueError(f"native_length must be {SHIFTS_PER_WINDOW} tokens or more, got {native_length}")
        self.shift = native_length // SHIFTS_PER_WINDOW
        if not 0 <= opening < native_length - self.shift:
            raise ValueError(
                f"opening must be a number of tokens below {native_length - self.shift}, which a window that moves "
                f"reads anew, got {opening}"
            )
        self.native_length = native_length
        self.opening = opening
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.device)
        self._first = nothing
        """The opening of the texts."""
        self._recent = nothing
        """The last tokens of the texts that were read, as many as fill a window."""
        self._again: torch.Tensor
        """Tokens that the window begins with, and that were read before."""
        self._offset: int
        """What to add to a position in the window for that in the texts."""
        self._limit = native_length
        """The number of tokens at which the window moves."""
        self._move(nothing)

    def read_rows(self, rows: torch.Tensor, *, last_only: bool = False, skip: int = 0) -> Iterator[torch.Tensor]:
        """Yield the logits of a batch ``[texts, tokens]``, chunk by chunk, as :meth:`Reader.read_rows` does."""
        rows = rows.to(self.device)
        self._begin(rows)
        while rows.shape[1]:
            if self._window.position >= self._limit:
                kept = self.native_length - self.shift - self.opening
                self._move(torch.cat([self._first, self._recent[:, -kept:]], dim=1))
            again, self._again = self._again, self._again[:, :0]
            room = self._limit - self._window.position - again.shape[1]
            new, rows = rows[:, :room], rows[:, room:]
            skipped = min(skip, new.shape[1])
            skip -= skipped
            for logits in self._window.read_rows(
                torch.cat([again, new], dim=1), last_only=last_only, skip=again.shape[1] + skipped
            ):
                new = self._advance(new)
                yield logits
            self._advance(new)  # what was skipped at the end

    def answers(self, prompts: Sequence[Sequence[int]], count: int, *, end_token: int | None = None) -> list[list[int]]:
        """Decode greedily after the last native length of tokens of each prompt."""
        rows = torch.tensor(prompts, device=self.device)
        self._begin(rows)
        start = max(self.position + rows.shape[1] - self.native_length, 0)
        if start != self._offset:
            rows = self._restart(rows, self.native_length - self.opening)
        self._limit = self.native_length + self.shift
        try:
            return super().answers(rows.tolist(), count, end_token=end_token)
        finally:
            self._limit = self.native_length

    def fork(self) -> TruncatedReader:
        """A copy of the reader with its own KV cache."""
        other = super().fork()
        assert isinstance(other, TruncatedReader)
        other._window = self._window.fork()
        return other

    def _begin(self, rows: torch.Tensor) -> None:
        """Note the opening of texts of which nothing was read."""
        if self.position == 0:
            self._first = rows[:, : self.opening]
            self._recent = self._again = rows[:, :0]

    def _restart(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Begin a window with the last ``count`` tokens of the texts and ``rows``; return what of ``rows`` to read."""
        if rows.shape[1] < count:
            self._move(torch.cat([self._first, self._recent[:, rows.shape[1] - count :]], dim=1))
            return rows
        skipped, rows = rows[:, : rows.shape[1] - count], rows[:, rows.shape[1] - count :]
        self._recent = torch.cat([self._recent, skipped], dim=1)[:, -self.native_length :]
        self.position += skipped.shape[1]
        if self.progress and skipped.numel():
            self.progress(skipped.numel())
        self._move(self._first)
        return rows

    def _move(self, again: torch.Tensor) -> None:
        """Begin a window with tokens that are read before the next ones of the texts, without their logits."""
        self._window = Reader(self.model, chunk=self.chunk)  # frees the cache of the window before
        self._again = again
        self._offset = self.position - again.shape[1]

    def _advance(self, new: torch.Tensor) -> torch.Tensor:
        """Note how many tokens of ``new`` the window has read, and return the others."""
        read = self._offset + self._window.position - self.position
        self._recent = torch.cat([self._recent, new[:, :read]], dim=1)[:, -self.native_length :]
        self.position += read
        if self.progress and read:
            self.progress(read * len(new))
        return new[:, read:]
