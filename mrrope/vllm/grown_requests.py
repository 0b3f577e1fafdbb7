"""Counts, in the front end, the requests that grew: metrics of the engine core's process are not exported."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mrrope.serving.scale_choice import TABLE_KEY
from mrrope.vllm import hooks
from mrrope.vllm.request_scale import Admission

if TYPE_CHECKING:
    from prometheus_client import Counter


@functools.cache
def grown_counter() -> Counter:
    """Return the Prometheus counter of requests that grew: one per process, labels ``model_name`` and ``scale``."""
    from prometheus_client import Counter

    return Counter(
        "mrrope:grown_requests", "Requests that outgrew their first scale, by their last.", ["model_name", "scale"]
    )


@dataclass
class OpenRequests:
    """The requests of a front end that have not ended: vLLM's state of each, and its first table."""

    admission: Admission
    states: dict[str, tuple[Any, int]] = field(default_factory=dict)

    def count(self, names: Iterable[str]) -> None:
        """Count those requests, which have ended, that outgrew their first table."""
        steps = self.admission.steps
        for name in names:
            if name not in self.states:
                continue
            state, first = self.states.pop(name)
            length = state.prompt_len + state.detokenizer.num_output_tokens()
            last = len(steps.reaches) - 1
            table = next((table for table, reach in enumerate(steps.reaches) if reach >= length), last)
            if table > first:
                grown_counter().labels(self.admission.model_config.served_model_name, f"{steps.scales[table]:g}").inc()


OPEN = "mrrope_open_requests"
"""Attribute of an output processor whose requests grow."""


def make_engine(original: Any, engine: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Make the engine of a server, as its front end sees it, for a served model."""
    original(engine, vllm_config, *args, **kwargs)
    admission = Admission.of(vllm_config)
    if admission is None or not admission.grows:
        return
    grown_counter()
    processor = engine.output_processor
    setattr(processor, OPEN, OpenRequests(admission))
    for name, around in (("add_request", _add), ("_finish_request", _finish), ("abort_requests", _abort)):
        hooks.wrap(type(processor), name, around)


def _add(original: Any, processor: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    original(processor, request, *args, **kwargs)
    if (of_engine := getattr(processor, OPEN, None)) is not None:
        first = request.sampling_params.extra_args[TABLE_KEY]
        of_engine.states[request.request_id] = processor.request_states[request.request_id], first


def _finish(original: Any, processor: Any, state: Any, *args: Any, **kwargs: Any) -> None:
    original(processor, state, *args, **kwargs)
    if (of_engine := getattr(processor, OPEN, None)) is not None:
        of_engine.count([state.request_id])


def _abort(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    aborted = original(processor, *args, **kwargs)
    if (of_engine := getattr(processor, OPEN, None)) is not None:
        of_engine.count(aborted)
    return aborted
