"""Adam on the parameters of tables: frozen weights, early stopping on the validation documents, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mrrope.calibration.journal import Journal
from mrrope.calibration.learnable_tables import LearnableTables
from mrrope.calibration.processes import ALONE, Processes
from mrrope.calibration.search import BudgetSpentError
from mrrope.calibration.table_gradient import TableGradient
from mrrope.calibration.training_texts import TrainingTexts
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.table_set import TableSet

LEARNING_RATE = 0.03
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 10
EVALUATED_AT = (0.4, 0.6, 0.75, 0.9, 1.0)
"""Shares of the budget after which the validation documents are read."""
PATIENCE = 2
"""The search stops after so many evaluations in a row without an improvement."""
SECONDS_BETWEEN_SAVES = 30.0


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up, then cosine decay to 0 over the budget."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return peak * warm * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class Descent:
    """The gradient search: its state is on disk every half minute, and the best tables are announced."""

    def __init__(
        self,
        model: Any,
        learnable: LearnableTables,
        texts: TrainingTexts,
        validation_loss: Callable[[FrequencyTable | TableSet], float],
        journal: Journal,
        state_path: Path,
        seconds: float,
        *,
        processes: Processes = ALONE,
        texts_a_step: int | None = None,
        peak_rate: float = LEARNING_RATE,
        improved: Callable[[FrequencyTable | TableSet, float], object] = lambda *_: None,
        progress: Callable[[float, float], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take up the state of an earlier run with the same journal, or start.

        Args:
            model: an unpatched model.
            learnable: the parameters.
            texts: what each step reads.
            validation_loss: of tables; the same on all processes.
            journal: gets a line per step and evaluation.
            state_path: for parameters and optimizer.
            seconds: budget, evaluations included. A step that began within it ends after it.
            processes: those that share the texts of a step.
            texts_a_step: over all processes; by default one each.
            peak_rate: learning rate of the log scale of slow pairs, after the warm-up.
            improved: called with the best tables so far and their loss, on the first process.
            progress: called after every step with the seconds spent and the loss.
            clock: seconds.
        """
        self.learnable, self.texts = learnable, texts
        self.gradient = TableGradient(model, learnable)
        self.validation_loss, self.journal, self.state_path = validation_loss, journal, state_path
        self.seconds, self.processes = seconds, processes
        self.texts_a_step = texts_a_step or processes.size
        self.peak_rate = peak_rate
        self.improved, self.progress, self.clock = improved, progress, clock
        self.device = learnable.moves.device
        self.optimizer = torch.optim.Adam([learnable.moves], betas=BETAS)
        self.step = 0
        self.spent = 0.0
        self.best = math.inf
        self.best_moves = learnable.moves.detach().clone()
        self.curve: list[dict[str, Any]] = []
        """One entry per step: seconds, length, loss."""
        self.evaluations: list[dict[str, Any]] = []
        """One entry per evaluation: seconds at its beginning and in it, step, loss, budget."""
        self._saved = clock()
        self._load()

    def run(self) -> FrequencyTable | TableSet:
        """Search until the budget is spent or nothing improves; return the best tables.

        Raises:
            BudgetSpentError: the budget does not suffice for evaluations.
        """
        if not self.evaluations:
            self._evaluate()
        if self.end <= 0:
            raise BudgetSpentError
        while not self.is_finished:
            with self.gradient.ready():
                while self.spent < self.end and not self._is_evaluation_due:
                    self._step()
            self._evaluate()
        return self.best_tables()

    def best_tables(self) -> FrequencyTable | TableSet:
        """The tables with the lowest loss on the validation documents."""
        with torch.no_grad():
            current = self.learnable.moves.clone()
            self.learnable.moves.copy_(self.best_moves)
            found = self.learnable.tables()
            self.learnable.moves.copy_(current)
        return found

    @property
    def end(self) -> float:
        """Seconds after which no step begins: the last evaluation takes as long as the first did."""
        return self.seconds - float(self.evaluations[0]["took"])

    @property
    def is_finished(self) -> bool:
        """Whether the last evaluation was the last."""
        losses = [one["loss"] for one in self.evaluations]
        since_best = len(losses) - 1 - losses.index(min(losses))
        # A larger budget goes on with what an earlier one stopped.
        is_stuck = since_best >= PATIENCE and self.evaluations[-1]["budget"] == self.seconds
        return is_stuck or self._last_evaluated >= self.end

    @property
    def _last_evaluated(self) -> float:
        """Seconds at the end of the last evaluation: a share of the budget that passed in it takes no other one."""
        last = self.evaluations[-1]
        return float(last["seconds"]) + float(last["took"])

    @property
    def _is_evaluation_due(self) -> bool:
        return any(self._last_evaluated < share * self.end <= self.spent for share in EVALUATED_AT)

    def _step(self) -> None:
        started = self.clock()
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        names = []
        for place in range(self.processes.rank, self.texts_a_step, self.processes.size):
            text = self.texts.text(self.step, place, self.texts_a_step)
            names.append(text.name)
            total += self.gradient.add(text)
        moves = self.learnable.moves
        assert moves.grad is not None
        # One reduction: the gradients, and the loss behind them.
        both = self.processes.mean(torch.cat([moves.grad.flatten(), total[None]]))
        both *= self.processes.size / self.texts_a_step
        moves.grad.copy_(both[:-1].view_as(moves))
        if is_finite := bool(both.isfinite().all()):
            self.optimizer.param_groups[0]["lr"] = learning_rate(self.peak_rate, self.step, self.spent / self.end)
            self.optimizer.step()
        loss = float(both[-1]) if is_finite else None
        length = self.texts.length(self.step)
        entry = {"length": length, "loss": loss, "documents": names}
        self.spent += self._journalled(f"step {self.step}", self.clock() - started, entry)
        self.curve.append({"seconds": self.spent, "length": length, "loss": loss})
        self.step += 1
        self.progress(self.spent, math.nan if loss is None else loss)
        if self.clock() - self._saved > SECONDS_BETWEEN_SAVES:
            self._save()

    def _evaluate(self) -> None:
        started = self.clock()
        tables = self.learnable.tables()
        loss = self.processes.agreed(self.validation_loss(tables))
        beginning = self.spent
        took = self._journalled(f"evaluation {self.step}", self.clock() - started, {"loss": loss})
        self.spent += took
        found = {"seconds": beginning, "took": took, "step": self.step, "loss": loss, "budget": self.seconds}
        self.evaluations.append(found)
        if loss < self.best:
            self.best, self.best_moves = loss, self.learnable.moves.detach().clone()
            if self.processes.is_first:
                self.improved(tables, loss)
        self._save()

    def _journalled(self, key: str, seconds: float, entry: dict[str, Any]) -> float:
        """Seconds that something took, on the first process; of the run that is resumed where it did that already."""
        known = self.journal.get(key)
        if known is None:
            self.journal.put(key, {"seconds": seconds, **entry})
        return self.processes.agreed(seconds if known is None else float(known["seconds"]))

    def _save(self) -> None:
        """Write the state atomically."""
        self._saved = self.clock()
        if not self.processes.is_first:
            return
        new = self.state_path.with_name(f"{self.state_path.name}.new")
        torch.save(
            {
                "step": self.step,
                "spent": self.spent,
                "best": self.best,
                "curve": self.curve,
                "evaluations": self.evaluations,
                "moves": self.learnable.moves.detach(),
                "best_moves": self.best_moves,
                "optimizer": self.optimizer.state_dict(),
            },
            new,
        )
        new.replace(self.state_path)

    def _load(self) -> None:
        if self.processes.is_first and self.journal.get("evaluation 0") is None:
            # The journal of a new run: what state there is, is another's.
            self.state_path.unlink(missing_ok=True)
        if not self.processes.agreed(self.state_path.exists()):
            return
        state = self.processes.agreed(torch.load(self.state_path, "cpu") if self.processes.is_first else {})
        self.step, self.spent, self.best = state["step"], state["spent"], state["best"]
        self.curve, self.evaluations = state["curve"], state["evaluations"]
        self.best_moves = state["best_moves"].to(self.device)
        with torch.no_grad():
            self.learnable.moves.copy_(state["moves"])
        self.optimizer.load_state_dict(state["optimizer"])
