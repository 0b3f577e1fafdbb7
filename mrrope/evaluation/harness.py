"""Tasks of lm-evaluation-harness (RULER, LongBench v2, InfiniteBench and all others), on the model as it is patched."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from mrrope.evaluation.extra import needs

PACKAGE = "lm_eval"
NAME = "lm-evaluation-harness"


class DataMissingError(Exception):
    """A task's data is not on this machine and cannot be fetched."""


def known(tasks: Sequence[str]) -> set[str]:
    """Those of these names that are tasks, or groups of tasks, of the harness."""
    with needs(PACKAGE, "harness"):
        from lm_eval.tasks import TaskManager
    return set(tasks) & set(TaskManager().all_tasks)


def scores(
    model: Any, tokenizer: Any, task: str, lengths: Sequence[int], limit: int
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every task that the name stands for, with a length and its figures.

    Tasks that are made for a length, as RULER's are, have figures for each that they know; others the longest alone.

    Raises:
        DataMissingError: where the task's data is not on this machine and cannot be fetched.
    """
    with needs(PACKAGE, "harness"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM

    reader = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max(lengths), batch_size=1)
    # The tasks that make their own prompts load a tokenizer by its name.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        about = {"tokenizer": folder, "max_seq_lengths": list(lengths)}
        try:
            found = lm_eval.simple_evaluate(reader, tasks=[task], limit=limit, metadata=about, bootstrap_iters=0)
        except (OSError, LookupError) as error:
            raise DataMissingError(
                f"{task} of {NAME} needs data that is not on this machine and could not be fetched: "
                f"{type(error).__name__}: {error}"
            ) from error
    for name, metrics in found["results"].items():
        yield from figures(name, metrics, lengths)


def figures(name: str, metrics: dict[str, Any], lengths: Sequence[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What the harness says of one task, by length."""
    # "4096,none": the metric and the filter of the answers it is for.
    values = {
        metric.split(",")[0]: value
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not metric.split(",")[0].endswith(("_stderr", "sample_len"))
    }
    by_length = {int(metric): value for metric, value in values.items() if metric.isdecimal()}
    if by_length:
        # The harness gives -1 for lengths that it was not asked for.
        yield from (
            (name, length, {"score": by_length[length]}) for length in lengths if by_length.get(length, -1) >= 0
        )
    elif values:
        yield name, max(lengths), {"score": next(iter(values.values())), "metrics": values}
