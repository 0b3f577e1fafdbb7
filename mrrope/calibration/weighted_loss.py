"""The weighted loss of a long text, with gradients for the table alone and without the logits of all tokens at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGIT_ROWS = 2048
"""Tokens whose logits exist at a time: 400 MB in float32 for a vocabulary of 49152."""


def weighted_loss(model: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of weight times negative log-likelihood over the tokens of a text, a scalar of float32 or wider.

    Args:
        model: a causal language model of transformers.
        tokens: ``[tokens]``, on the model's device.
        weights: ``[tokens]``; that of the first token, which nothing predicts, has no effect.
    """
    positions = torch.arange(len(tokens) - 1, device=tokens.device)
    # No mask, so that attention takes the causal fast path of SDPA.
    read = base_of(model)(input_ids=tokens[None, :-1], position_ids=positions[None], use_cache=False)
    rows = zip(
        torch.split(read.last_hidden_state, LOGIT_ROWS, dim=1),
        torch.split(tokens[1:], LOGIT_ROWS),
        torch.split(weights[1:].to(tokens.device), LOGIT_ROWS),
        strict=True,
    )

    def part(hidden: torch.Tensor, following: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = head_logits(model, type(read)(last_hidden_state=hidden))[0]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(wide, following, reduction="none") @ weight.to(wide.dtype)

    parts = [checkpoint(part, *some, use_reentrant=False, preserve_rng_state=False) for some in rows]
    return torch.stack(parts).sum()


def base_of(model: Any) -> Any:
    """The part of a causal language model that gives hidden states."""
    base = model.base_model
    return model.model if base is model else base  # the prefix of Llama4ForCausalLM names none of its parts


def head_logits(model: Any, output: Any) -> torch.Tensor:
    """The logits that the model's own code makes of an output of its base model: scaled or capped as it does."""
    with overridden_forward(base_of(model), lambda *_, **__: output):
        logits: torch.Tensor = model(inputs_embeds=output.last_hidden_state, use_cache=False).logits
    return logits


@contextlib.contextmanager
def overridden_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replace the forward of one module within a ``with`` block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextlib.contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Take the weights out of differentiation within a ``with`` block: no gradients of theirs, no inputs saved."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trainable:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)
