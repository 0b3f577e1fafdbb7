"""Requests that outgrow their table: preempted, and computed again at a larger scale with the answer so far.

vLLM's scheduler preempts running requests for memory; this is the same, with another table and other block hashes.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from mrrope.serving.scale_choice import TABLE_KEY, ScaleSteps, salted, unsalted
from mrrope.vllm import hooks
from mrrope.vllm.request_scale import Admission

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

STEPS = "mrrope_steps"
"""Attribute of a scheduler whose requests grow."""
RESUMED = "mrrope_resumed"
"""Attribute of a step's ``SchedulerOutput``: the tables of resumed requests, whose sampling parameters stay behind."""


def make_scheduler(original: Any, scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Make the scheduler of a served model."""
    original(scheduler, vllm_config, *args, **kwargs)
    admission = Admission.of(vllm_config)
    if admission is None or not admission.grows:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    setattr(scheduler, STEPS, admission.steps)
    hooks.wrap(Scheduler, "schedule", schedule)


def schedule(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedule a step, before which requests grow that would leave what their table reaches."""
    steps: ScaleSteps | None = getattr(scheduler, STEPS, None)
    if steps is None:
        return original(scheduler, *args, **kwargs)
    for request in [request for request in scheduler.running if _outgrows(request, steps)]:
        _grow(scheduler, request, steps)
    output: SchedulerOutput = original(scheduler, *args, **kwargs)
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    setattr(output, RESUMED, {name: _table_of(scheduler.requests[name]) for name in resumed})
    return output


def _table_of(request: Request) -> int:
    table: int = request.sampling_params.extra_args[TABLE_KEY]
    return table


def _outgrows(request: Request, steps: ScaleSteps) -> bool:
    """Whether the next token of a request would be past its table. One that is in flight is looked at again."""
    table = _table_of(request)
    is_last = table == len(steps.reaches) - 1
    return not is_last and steps.reaches[table] <= request.num_tokens > request.num_computed_tokens


def _grow(scheduler: Any, request: Request, steps: ScaleSteps) -> None:
    """Preempt a request, which resumes with the smallest table that reaches past its tokens."""
    last = len(steps.reaches) - 1
    table = next((table for table, reach in enumerate(steps.reaches) if reach > request.num_tokens), last)
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    # The request may resume in this very step; workers must not take it for one that went on.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    request.sampling_params = with_table(request.sampling_params, table)
    request.cache_salt = salted(unsalted(request.cache_salt), table)
    request.block_hashes = []
    request.update_block_hashes()


def with_table(params: SamplingParams, table: int) -> SamplingParams:
    """Return a copy with another table: the samples of one ``n`` may share theirs."""
    params = copy.copy(params)
    params.extra_args = {**(params.extra_args or {}), TABLE_KEY: table}
    return params


def update_resumed(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Note the tables of resumed requests in a V1 runner. The V2 runner gets their sampling parameters anew."""
    for name, table in getattr(scheduler_output, RESUMED, {}).items():
        state = runner.requests[name]
        state.sampling_params = with_table(state.sampling_params, table)
