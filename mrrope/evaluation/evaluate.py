"""Run every task with every method at every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from mrrope.evaluation import lm_eval_harness
from mrrope.evaluation.chunked_reader import Progress, greedy_answers
from mrrope.evaluation.compared_methods import UNPATCHED, Method
from mrrope.evaluation.documents import Document
from mrrope.evaluation.perplexity import DocumentLoss, document_losses, perplexity
from mrrope.evaluation.prompts import Haystack
from mrrope.evaluation.results import EvaluationStoppedError, Results
from mrrope.evaluation.retrieval_tasks import TASKS
from mrrope.reporting.optional_packages import progress_bar
from mrrope.reporting.options import DEFAULT_CHUNK

PERPLEXITY = "perplexity"
KNOWN_TASKS = (PERPLEXITY, *TASKS)
DEFAULT_TRIALS = 12


@dataclass
class Evaluation:
    """A model, documents and lengths to compare methods on."""

    model: Any
    tokenizer: Any
    documents: Sequence[Document]
    lengths: Sequence[int]
    results: Results
    trials: int = DEFAULT_TRIALS
    chunk: int = DEFAULT_CHUNK

    def run(self, methods: Sequence[Method], tasks: Sequence[str]) -> None:
        """Measure all tasks with all methods; every figure is saved as soon as it is known.

        Raises:
            EvaluationStoppedError: out of memory; or, after all other tasks, a task's data is missing.
        """
        missing: dict[str, str] = {}
        for method in methods:
            for task in (task for task in tasks if task not in missing):
                with method.applied(self.model):
                    try:
                        self.measure(task, method)
                    except lm_eval_harness.DataMissingError as error:
                        missing[task] = str(error)
                    except RuntimeError as error:
                        if not is_out_of_memory(error):
                            raise
                        raise self.stopped(self.out_of_memory(task, method)) from error
        if missing:
            raise self.stopped("; ".join(missing.values()))
        self.results.finish()

    def measure(self, task: str, method: Method) -> None:
        """Measure one task with the method that the model is patched with."""
        if task not in KNOWN_TASKS:
            for name, length, figures in lm_eval_harness.scores(
                self.model, self.tokenizer, task, self.lengths, self.trials, method.window(self.model)
            ):
                self.results.put(name, method.name, length, figures)
            return
        total = self.tokens_of(task, method)
        with progress_bar(desc=f"{method.name} {task}", total=total, unit=" tokens", unit_scale=True) as bar:
            if task == PERPLEXITY:
                self.measure_perplexity(method, bar.update)
            else:
                self.measure_answers(task, method, bar.update)

    def tokens_of(self, task: str, method: Method) -> int:
        """The number of tokens that a task reads."""
        if task == PERPLEXITY:
            # The last token is predicted, not read.
            readings = self.lengths if method.follows_length else [max(self.lengths)]
            return len(self.documents) * sum(length - 1 for length in readings)
        return self.trials * sum(self.lengths)

    def measure_perplexity(self, method: Method, progress: Progress) -> None:
        """Measure perplexity, updated after every document."""
        known: dict[int, list[tuple[str, DocumentLoss]]] = {}
        for document in self.documents:
            one_reading = not method.follows_length
            options: dict[str, Any] = {"one_reading": one_reading, "chunk": self.chunk, "progress": progress}
            reader = method.reader(self.model, self.tokenizer)
            for loss in document_losses(self.model, document.tokens, self.lengths, reader=reader, **options):
                losses = known.setdefault(loss.length, [])
                losses.append((document.name, loss))
                self.results.put(PERPLEXITY, method.name, loss.length, perplexity_figures(losses))

    def measure_answers(self, task: str, method: Method, progress: Progress) -> None:
        """Measure a retrieval task, the shortest prompts first, since they need the least memory."""
        haystack = Haystack(self.tokenizer, self.documents)
        for length in sorted(self.lengths):
            figures = self.stock_figures(task, method, length)
            if figures is None:
                figures = self.answers(task, method, haystack, length, progress)
            else:
                progress(self.trials * length)
            self.results.put(task, method.name, length, figures)

    def stock_figures(self, task: str, method: Method, length: int) -> dict[str, Any] | None:
        """The figures of ``unpatched`` where ``truncated`` is the same: up to the native length."""
        # With options the stock model may be patched to plain RoPE.
        if method.options or (method.window(self.model) or 0) < length:
            return None
        known: dict[str, dict[str, Any]] = self.results.data["results"].get(task, {}).get(UNPATCHED, {})
        return known.get(str(length))

    def answers(self, task: str, method: Method, haystack: Haystack, length: int, progress: Progress) -> dict[str, Any]:
        """The model's answers to a task's prompts of one length."""
        prompts = TASKS[task](haystack, length, self.trials)
        answers = greedy_answers(
            self.model,
            [trial.prompt for trial in prompts],
            [trial.answer_tokens for trial in prompts],
            chunk=self.chunk,
            end_token=self.tokenizer.eos_token_id,
            progress=progress,
            reader=method.reader(self.model, self.tokenizer),
        )
        trials = [
            {
                "depth": trial.depth,
                "expected": trial.expected,
                "answer": self.tokenizer.decode(answer),
                "score": trial.score(answer),
            }
            for trial, answer in zip(prompts, answers, strict=True)
        ]
        return {"score": fmean(trial["score"] for trial in trials), "trials": trials}

    def out_of_memory(self, task: str, method: Method) -> str:
        """The reason to report when memory runs out."""
        done = self.results.data["results"].get(task, {}).get(method.name, {})
        return (
            f"out of memory in {task} with {method.name}: of the lengths {list(self.lengths)} {len(done)} were read; "
            f"a smaller --chunk than {self.chunk} or shorter --lengths need less"
        )

    def stopped(self, reason: str) -> EvaluationStoppedError:
        """Record the reason in the results and return the error to raise."""
        self.results.finish(reason)
        return EvaluationStoppedError(f"{reason}. What was measured is in {self.results.path}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device or the host ran out of memory."""
    # The rest of the host allocator's message depends on how torch was built.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def perplexity_figures(
    losses: Sequence[tuple[str, DocumentLoss]], mean: Callable[[Sequence[float]], float] = fmean
) -> dict[str, Any]:
    """Perplexities of both protocols, and the losses of each document."""
    return {
        "perplexity": perplexity([loss.whole for _, loss in losses], mean),
        "second_half_perplexity": perplexity([loss.second_half for _, loss in losses], mean),
        "documents": [
            {"name": name, "loss": loss.whole, "second_half_loss": loss.second_half} for name, loss in losses
        ],
    }
