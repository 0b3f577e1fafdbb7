"""Tasks of lm-evaluation-harness (RULER, LongBench v2, InfiniteBench and all others), on the model as it is patched."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mrrope.reporting.optional_packages import needs

PACKAGE = "lm_eval"
NAME = "lm-evaluation-harness"


class DataMissingError(Exception):
    """A task's data is not on this machine and cannot be fetched."""


def known(tasks: Sequence[str]) -> set[str]:
    """Those of these names that are tasks, or groups of tasks, of the harness, or files that describe one."""
    with needs(PACKAGE, "harness"):
        from lm_eval.tasks import TaskManager
    files = {task for task in tasks if task.endswith(".yaml") and Path(task).is_file()}
    return files | set(tasks) & set(TaskManager().all_tasks)


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
        # One length after the other: of a task with prompts of several, the limit would take those of the first alone.
        for length in lengths:
            about = {"tokenizer": folder, "max_seq_lengths": [length]}
            try:
                found = lm_eval.simple_evaluate(reader, tasks=[task], limit=limit, metadata=about, bootstrap_iters=0)
            except (OSError, LookupError) as error:
                raise DataMissingError(
                    f"{task} of {NAME} needs data that is not on this machine and could not be fetched: "
                    f"{type(error).__name__}: {error}"
                ) from error
            results = {name: values_of(metrics) for name, metrics in found["results"].items()}
            by_length = {name: values for name, values in results.items() if any(map(str.isdecimal, values))}
            for name, values in by_length.items():
                # The harness gives -1 for lengths that it was not asked for.
                if values.get(str(length), -1) >= 0:
                    yield name, length, {"score": values[str(length)]}
            if not by_length:
                for name, values in results.items():
                    if values:
                        yield name, max(lengths), {"score": next(iter(values.values())), "metrics": values}
                return


def values_of(metrics: dict[str, Any]) -> dict[str, float]:
    """What the harness says of one task, without what it says of the figures themselves."""
    # "4096,none": the metric and the filter of the answers it is for.
    return {
        metric.split(",")[0]: value
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not metric.split(",")[0].endswith(("_stderr", "sample_len"))
    }
