"""Tasks of lm-evaluation-harness (RULER, LongBench v2, InfiniteBench, ...) on the patched model."""

from __future__ import annotations

import contextlib
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
    """The names that are tasks or task groups of the harness, or existing .yaml task files."""
    with needs(PACKAGE, "harness"):
        from lm_eval.tasks import TaskManager
    files = {task for task in tasks if task.endswith(".yaml") and Path(task).is_file()}
    return files | set(tasks) & set(TaskManager().all_tasks)


def scores(
    model: Any, tokenizer: Any, task: str, lengths: Sequence[int], limit: int, window: int | None = None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (task, length, figures) for the task, or for each task of a group.

    Tasks with prompts of a given length, such as RULER's, yield every length they support; others only the longest.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's.
        task: a task, a group or a .yaml file.
        lengths: of the prompts, in tokens.
        limit: samples per task, for tasks of several lengths per length.
        window: read only so many tokens of a prompt, its last ones, and the BOS token if the harness prepends one.

    Raises:
        DataMissingError: the task's data is not on this machine and cannot be fetched.
    """
    with needs(PACKAGE, "harness"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM

    # The harness cuts prompts from the left, to leave room for the answer.
    reader = HFLM(pretrained=model, tokenizer=tokenizer, max_length=window or max(lengths), batch_size=1)
    # Tasks that generate their prompts load the tokenizer by name, so it needs a folder.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        # One call per length: with several, `limit` would select prompts of the first length only.
        for length in lengths:
            about = {"tokenizer": folder, "max_seq_lengths": [length]}
            try:
                with contextlib.nullcontext() if window is None else keeping_opening(model, tokenizer, reader):
                    found = lm_eval.simple_evaluate(
                        reader, tasks=[task], limit=limit, metadata=about, bootstrap_iters=0
                    )
            except (OSError, LookupError) as error:
                raise DataMissingError(
                    f"{task} of {NAME} needs data that is not on this machine and could not be fetched: "
                    f"{type(error).__name__}: {error}"
                ) from error
            results = {name: values_of(metrics) for name, metrics in found["results"].items()}
            by_length = {name: values for name, values in results.items() if any(map(str.isdecimal, values))}
            for name, values in by_length.items():
                # The harness reports -1 for lengths that were not requested.
                if values.get(str(length), -1) >= 0:
                    yield name, length, {"score": values[str(length)]}
            if not by_length:
                for name, values in results.items():
                    if values:
                        yield name, max(lengths), {"score": next(iter(values.values())), "metrics": values}
                return


@contextlib.contextmanager
def keeping_opening(model: Any, tokenizer: Any, reader: Any) -> Iterator[None]:
    """Begin every text with the BOS token, if the harness prepends it: where it cuts a prompt, it cuts that off too."""
    opening = tokenizer.bos_token_id
    if opening is None or list(reader.tok_encode("a"))[:1] != [opening]:
        yield
        return

    def begin(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = named.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            return positional, named  # The call continues an answer, and has no beginning of a text.
        ids = positional[0] if positional else named["input_ids"]
        ids = ids.clone()
        ids[:, 0] = opening
        return ((ids, *positional[1:]), named) if positional else (positional, named | {"input_ids": ids})

    hook = model.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def values_of(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics of one task, without standard errors and sample counts."""
    # Keys are "metric,filter", such as "4096,none".
    return {
        metric.split(",")[0]: value
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not metric.split(",")[0].endswith(("_stderr", "sample_len"))
    }
