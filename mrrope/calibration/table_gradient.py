"""The gradient of a text's weighted loss with respect to the parameters of tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mrrope.calibration.learnable_tables import LearnableTables
from mrrope.calibration.recomputation import Recomputation
from mrrope.calibration.training_texts import TrainingText
from mrrope.calibration.weighted_loss import frozen_weights, weighted_loss
from mrrope.evaluation.chunked_reader import fast_attention
from mrrope.evaluation.evaluate import is_out_of_memory
from mrrope.hf.patch import patched
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.table_set import TableSet


class TableGradient:
    """Differentiates texts, in a model that is patched meanwhile."""

    def __init__(self, model: Any, learnable: LearnableTables) -> None:
        self.model = model
        self.learnable = learnable
        self.recomputation = Recomputation(model)
        self._rotaries: list[TableRotaryEmbedding] = []

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Patch the model, and take its weights out of differentiation, within a ``with`` block."""
        learnable = self.learnable
        current = learnable.tables()
        # By layer, whatever is shared; the floating tables take their place in every pass.
        tables = current if isinstance(current, TableSet) else TableSet([current] * learnable.layers)
        options = {"base": tables.base, "original_max_position": tables.original_max_position}
        with frozen_weights(self.model), patched(self.model, tables, fuse_norms=True, **options):
            self._rotaries = [module for module in self.model.modules() if isinstance(module, TableRotaryEmbedding)]
            yield

    def add(self, text: TrainingText) -> torch.Tensor:
        """Add the gradient of a text's loss to that of the parameters; return the mean loss by weight, float64."""
        try:
            return self._backward(text)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self.recomputation.recompute_all():
                raise
        # Outside the handler, whose traceback keeps the activations alive.
        torch.cuda.empty_cache()
        return self._backward(text)

    def _backward(self, text: TrainingText) -> torch.Tensor:
        device = self.learnable.moves.device
        tokens, weights = text.tokens.to(device), text.weights.to(device)
        with self._learned(), fast_attention(tokens[None], 0), self.recomputation.around(len(text)):
            loss = weighted_loss(self.model, tokens, weights)
            self.recomputation.kept(len(text))
            # The parameters get their gradient at its end: nothing is added where memory runs out in it.
            loss.backward()  # type: ignore[no-untyped-call]
        # Per weight, so that readings of all lengths compare.
        return loss.detach().double() / weights[1:].sum()

    @contextlib.contextmanager
    def _learned(self) -> Iterator[None]:
        """Rotate by the parameters within a ``with`` block."""
        frequencies, query_factors = self.learnable.frequencies(), self.learnable.query_factors()
        for rotary in self._rotaries:
            # Layers with a window and a RoPE of their own have one table, and keep it.
            rotary.learned = {
                layer_type: frequencies
                for layer_type, (table,) in rotary.tables.items()
                if not isinstance(table, FrequencyTable)
            }
            rotary.learned_query_factors = query_factors
        try:
            yield
        finally:
            for rotary in self._rotaries:
                rotary.learned = rotary.learned_query_factors = None
