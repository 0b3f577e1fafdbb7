"""Requests that outgrow their table: preempted, and computed again at a larger scale with the answer so far.

vLLM's scheduler preempts running requests for memory; this is the same, with another table and other block hashes. Of a
request that has filled its table, no step may be in flight then: it is left out of steps until all have returned.
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
    hooks.wrap(Scheduler, "_preempt_request", preempt)


def schedule(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedule a step, before which requests grow that have filled their table."""
    steps: ScaleSteps | None = getattr(scheduler, STEPS, None)
    if steps is None:
        return original(scheduler, *args, **kwargs)
    for request in [request for request in scheduler.running if _fills_table(request, steps)]:
        _grow(scheduler, request)
    output: SchedulerOutput = original(scheduler, *args, **kwargs)
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    setattr(output, RESUMED, {name: _table_of(scheduler.requests[name]) for name in resumed})
    return output


def _table_of(request: Request) -> int:
    table: int = request.sampling_params.extra_args[TABLE_KEY]
    return table


def _tokens_of(request: Request) -> int:
    """Return the number of tokens that a request has when its steps in flight have returned."""
    tokens: int = request.num_tokens + request.num_output_placeholders
    return tokens


def _fills_table(request: Request, steps: ScaleSteps) -> bool:
    """Whether the tokens of a request, with those in flight, are all that its table reaches, and more are to come."""
    table = _table_of(request)
    reach = steps.reaches[table]
    is_last = table == len(steps.reaches) - 1
    return not is_last and reach <= _tokens_of(request) and reach < request.num_prompt_tokens + request.max_tokens


def _grow(scheduler: Any, request: Request) -> None:
    """Preempt a request that has filled its table, or leave it out of the next step while one is in flight."""
    from vllm.v1.core.sched.interface import PauseState

    if scheduler.pause_state == PauseState.PAUSED_ALL:
        return
    if scheduler.pause_state == PauseState.PAUSED_NEW:
        # The pause waits for running requests, and a preempted one would only resume after it: the request ends.
        request.max_tokens = request.num_output_tokens + max(1, request.num_output_placeholders)
    elif request.num_computed_tokens >= request.num_tokens:
        # vLLM's field for requests that skip steps between the stages of a pipeline; schedule() counts its step first.
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + 2)
    else:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # The request may resume in this very step; workers must not take it for one that went on.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def preempt(original: Any, scheduler: Any, request: Request, *args: Any, **kwargs: Any) -> None:
    """Preempt a request, to grow or for memory. One that has filled its table resumes with the next that it needs."""
    steps: ScaleSteps | None = getattr(scheduler, STEPS, None)
    fills_table = steps is not None and _fills_table(request, steps)
    tokens = _tokens_of(request)
    original(scheduler, request, *args, **kwargs)
    if steps is None or not fills_table:
        return
    last = len(steps.reaches) - 1
    table = next((table for table, reach in enumerate(steps.reaches) if reach > tokens), last)
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
