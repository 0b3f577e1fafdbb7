"""Gradient checkpointing of as many layers as memory requires: recomputing all of them costs a quarter of the time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mrrope.calibration.weighted_loss import overridden_forward

ROOM = 0.8
"""Share of the free memory that activations may take; the rest is for logits, gradients and fragmentation."""
KEPT_OF_A_LAYER = 0.15
"""What a recomputed layer still keeps of its activations: its input."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself can checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def recomputed(layers: list[nn.Module]) -> Iterator[None]:
    """Recompute these layers in the backward pass, within a ``with`` block around both passes.

    Works in eval mode, without dropout, unlike ``gradient_checkpointing_enable``.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(overridden_forward(layer, partial(checkpoint, layer.forward, **options)))
        yield


def layers_to_recompute(needed: float, room: float, layers: int) -> int:
    """How many of the layers to recompute so that activations of ``needed`` bytes without it take ``room`` bytes."""
    excess = max(needed - room, 0.0) / max(needed, 1.0)
    return min(layers, math.ceil(layers * excess / (1 - KEPT_OF_A_LAYER)))


class Recomputation:
    """Chooses how many layers to recompute for every length, from the memory that the texts before it took."""

    def __init__(self, model: Any) -> None:
        self.layers = decoder_layers(model)
        self.device = next(model.parameters()).device
        self.count = 0
        """Layers that the current text recomputes."""
        self._least = 0
        self._bytes_a_token: float | None = None
        self._before = 0

    @contextlib.contextmanager
    def around(self, tokens: int) -> Iterator[None]:
        """Recompute what a text of so many tokens requires, within a ``with`` block around both passes."""
        self._before = self._allocated()
        self.count = max(self._least, self._required(tokens))
        with recomputed(self.layers[: self.count]):
            yield

    def kept(self, tokens: int) -> None:
        """Note what the forward pass over a text keeps, called right after it."""
        if self.count == 0:
            self._bytes_a_token = (self._allocated() - self._before) / tokens

    def recompute_all(self) -> bool:
        """Recompute all layers from now on; False where that was so already."""
        was_all, self._least = self._least == len(self.layers), len(self.layers)
        return not was_all

    def _required(self, tokens: int) -> int:
        if self._bytes_a_token is None or self.device.type != "cuda":
            return 0  # the first text is a short one; where memory runs out all the same, all are recomputed
        unused = torch.cuda.memory_reserved(self.device) - self._before
        free = torch.cuda.mem_get_info(self.device)[0] + unused
        return layers_to_recompute(self._bytes_a_token * tokens, ROOM * free, len(self.layers))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
