"""Models whose next token follows a rule, with the interface of transformers' causal LMs."""

from types import SimpleNamespace

import torch
from byte_llama import VOCABULARY
from torch import nn


class ScriptedModel(nn.Module):
    """Computes logits by ``next_logits`` from all tokens that it has read; its cache holds those tokens."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.anchor = nn.Parameter(torch.zeros(()))  # gives the model a device
        self.lengths_of_calls: list[int] = []

    def next_logits(self, read: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def always(self, token: int) -> torch.Tensor:
        """Return logits whose argmax is ``token``."""
        return nn.functional.one_hot(torch.tensor(token), self.vocabulary).float()

    def forward(self, input_ids, position_ids, past_key_values, use_cache, logits_to_keep):
        assert use_cache
        before = past_key_values or [[]] * len(input_ids)
        read = [old + new for old, new in zip(before, input_ids.tolist(), strict=True)]
        assert position_ids[0].tolist() == list(range(len(before[0]), len(read[0])))
        self.lengths_of_calls.append(input_ids.shape[1])
        ends = range(len(before[0]) + 1, len(read[0]) + 1)[-logits_to_keep:]
        logits = torch.stack([torch.stack([self.next_logits(row[:end]) for end in ends]) for row in read])
        return SimpleNamespace(logits=logits, past_key_values=read)


class RepeatsLastToken(ScriptedModel):
    """Gives the last token probability 1/2 and spreads the rest evenly over the others."""

    def next_logits(self, read: list[int]) -> torch.Tensor:
        probabilities = torch.full((self.vocabulary,), 0.5 / (self.vocabulary - 1))
        probabilities[read[-1]] = 0.5
        return probabilities.log()


class CopiesFromContext(ScriptedModel):
    """Continues the longest earlier match of the last tokens, within a window; without a match, says token 1."""

    def __init__(self, window: int = 10**9) -> None:
        super().__init__()
        self.window = window

    def next_logits(self, read: list[int]) -> torch.Tensor:
        read = read[-self.window :]
        candidates = list(range(len(read) - 1))
        best, length = None, 0
        while candidates:
            best, length = candidates[-1], length + 1
            candidates = [end for end in candidates if end >= length - 1 and read[end - length + 1] == read[-length]]
        return self.always(read[best + 1] if length > 1 else 1)


class OutOfMemory(RepeatsLastToken):
    """Raises torch.OutOfMemoryError at position ``room`` and beyond."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.dtype = torch.float32

    def forward(self, input_ids, position_ids, **options):
        if int(position_ids.max()) >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(input_ids, position_ids, **options)
