"""The calibration by gradient: from the best fixed method or given tables to tables per model, layer or key head.

With a table per key head, query heads may get a factor each besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrrope.calibration.calibrate import FIXED_METHODS
from mrrope.calibration.descent import LEARNING_RATE, Descent
from mrrope.calibration.document_sets import DocumentSets
from mrrope.calibration.kinds import first_of_each_kind, mean_over_kinds
from mrrope.calibration.learnable_tables import LearnableTables, Sharing
from mrrope.calibration.objective import Readings, Rung
from mrrope.calibration.processes import ALONE, Processes
from mrrope.calibration.search import successive_halving
from mrrope.calibration.training_texts import TrainingTexts
from mrrope.hf import rope_config
from mrrope.hf.model_layers import ServedLayers
from mrrope.hf.patch import patched
from mrrope.hf.rotary_embedding import UnfactorableError
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables, NativeRope, resolve_table
from mrrope.tables.table_set import TableSet


@dataclass(frozen=True)
class ModelShape:
    """The layers and heads that tables and factors can be given to."""

    layers: int
    heads: int
    """Key heads of each layer."""
    query_heads: int | None
    """Query heads of each layer; None where layers differ in them."""

    @staticmethod
    def of(model: Any) -> ModelShape:
        """The shape of a model.

        Raises:
            ValueError: its layers do not take their tables from one place, or differ in their key heads.
        """
        served = [ServedLayers.of(model, rotary) for rotary in rope_config.rotary_embeddings(model)]
        heads = {one.key_heads(layer) for one in served for layer in range(one.count)}
        if len(served) != 1 or served[0].holders or len(heads) != 1:
            raise ValueError(
                f"--by gradient must be left out for {type(model).__name__}: it needs one rotary embedding for all "
                "layers, and as many key heads in each"
            )
        queries = {served[0].query_heads(layer) for layer in range(served[0].count)}
        return ModelShape(served[0].count, heads.pop(), queries.pop() if len(queries) == 1 else None)


def why_no_query_factors(model: Any, trained: NativeRope, scale: float) -> str | None:
    """Why a model cannot be patched with factors of query heads, in words; None where it can.

    Raises:
        ValueError: it cannot be patched with tables per key head either.
    """
    shape = ModelShape.of(model)
    if shape.query_heads is None:
        return "its layers differ in their number of query heads"
    if shape.query_heads % shape.heads:
        return f"its {shape.query_heads} query heads are no multiple of {shape.heads} key heads"
    heads = [resolve_table(trained, FIXED_METHODS[-1], scale, {})] * shape.heads
    tables = TableSet([HeadTables(heads, [1.0] * shape.query_heads)] * shape.layers)
    try:
        with patched(model, tables, base=tables.base, original_max_position=tables.original_max_position):
            return None
    except ValueError as error:
        # Suppressed in what patch raises, which names an argument of its own.
        if isinstance(error.__context__, UnfactorableError):
            return str(error.__context__)
        raise


@dataclass
class GradientCalibration:
    """A search by gradient, with what it starts from and decides by."""

    readings: Readings
    trained: NativeRope
    scale: float
    documents: DocumentSets
    """Of the search: whole and without keys."""
    seconds: float
    per: Sharing
    tokenizer: Any
    state_path: Path
    start: ModelTables | None = None
    """By default the fixed method with the lowest loss on a validation document of every kind."""
    processes: Processes = ALONE
    peak_rate: float = LEARNING_RATE
    query_factors: bool = False
    """Whether query heads get factors, with a table per key head."""

    def __post_init__(self) -> None:
        self.fixed = {method: resolve_table(self.trained, method, self.scale, {}) for method in FIXED_METHODS}

    def descent(self) -> Descent:
        """The search from its start; ``run`` it."""
        model = self.readings.model
        name, start = ("given", self.start) if self.start is not None else self.best_fixed()
        self.started_from = name
        shape = ModelShape.of(model)
        device = next(model.parameters()).device
        learnable = LearnableTables(
            start,
            self.trained,
            layers=shape.layers,
            heads=shape.heads,
            per=self.per,
            query_heads=shape.query_heads if self.query_factors else None,
            device=device,
        )
        lengths = self.readings.lengths
        texts = TrainingTexts(self.documents.search, self.tokenizer, lengths, self.readings.retrieval)
        return Descent(
            model,
            learnable,
            texts,
            self.validation_loss,
            self.readings.journal,
            self.state_path,
            self.processes.agreed(self.seconds - self.readings.spent),
            processes=self.processes,
            peak_rate=self.peak_rate,
        )

    def best_fixed(self) -> tuple[str, FrequencyTable]:
        """The fixed method with the lowest loss on a validation document of every kind; the first process reads."""
        name = ""
        if self.processes.is_first:
            lengths, some = self.readings.lengths, first_of_each_kind(self.documents.decide)
            rungs = [Rung(some, length) for length in lengths[-2:]]
            name = successive_halving(
                self.fixed, lambda method, rung: self.readings.loss(self.fixed[method], rungs[rung]), range(len(rungs))
            )[0]
        name = self.processes.agreed(name)
        return name, self.fixed[name]

    def validation_loss(self, tables: ModelTables) -> float:
        """The loss on the validation documents, which the processes deal out among themselves."""
        self.readings.restart_clock()
        documents, longest = self.documents.decide, self.readings.lengths[-1]
        device = next(self.readings.model.parameters()).device
        losses = torch.zeros(len(documents), dtype=torch.float64, device=device)
        for place in range(self.processes.rank, len(documents), self.processes.size):
            losses[place] = self.readings.loss(tables, Rung([documents[place]], longest))
        losses = self.processes.mean(losses) * self.processes.size
        return mean_over_kinds(documents, losses.tolist())
