"""What patched transformers models give: the log-probabilities that an engine's must equal."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

import mrrope

TOLERANCE = 1e-4
"""Of log-probabilities. Two float32 models differ by at most 1e-5 here; a wrong table gives more than 0.1."""


def patched(model: Any, method: Any, scale: float | None = None) -> Any:
    """Return a patched copy of a model."""
    arguments = {} if scale is None else {"scale": scale}
    return mrrope.patch(copy.deepcopy(model), method, **arguments)


@torch.no_grad()
def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probability of every token but the first."""
    ids = torch.tensor([list(tokens)])
    return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Return a prompt without the token that ends a text."""
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of log-probabilities."""
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


@torch.no_grad()
def shortfall(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return by how much the log-probability of new tokens is below that of the likeliest: 0 where greedy."""
    ids = torch.tensor([[*prompt, *tokens]])
    scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (scores.max(-1).values - chosen).max().item()
