"""Requests that outgrow their scale, in vLLM's scheduler: what workers are told, what is kept, and what is cached."""

import pickle
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_request_scale
from test_compatibility import transfer
from test_request_scale import BLOCK, STEPS, bare_core, engine_request
from tiny_engine import AUTO, engine_config
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from mrrope.serving.scale_choice import SCALE_KEY, TABLE_KEY, salted
from mrrope.vllm.compatibility import can_grow
from mrrope.vllm.growth import update_resumed

LENGTH = STEPS.reaches[-1]
make_scheduler = test_request_scale.TestScheduler.scheduler


class Engine:
    """vLLM's scheduler with admitted requests, and a runner that knows what the scheduler tells it."""

    def __init__(self, config: Any, blocks: int, *, use_v2: bool = False, steps_in_flight: int = 1) -> None:
        self.core, self.scheduler = bare_core(config), make_scheduler(config, blocks)
        self.scheduler.use_v2_model_runner = use_v2
        self.steps_in_flight = steps_in_flight
        self.runner = SimpleNamespace(requests={})
        self.tables: dict[str, list[int]] = {}
        """The table of the step that sampled each token of an answer."""
        self.grown: dict[str, list[tuple[int, int]]] = {}
        """Tokens and table of a request, whenever its table changed."""

    def add(self, name: str, tokens: int, **options: Any) -> Request:
        given = engine_request(tokens, name, **options)
        given.prompt_token_ids[0] = ord(name)
        request, _ = self.core.preprocess_add_request(given)
        self.scheduler.add_request(request)
        return request

    def run(self) -> None:
        """Run until all requests have ended."""
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        for _ in range(10 * LENGTH):
            while self.scheduler.has_unfinished_requests() and len(in_flight) < self.steps_in_flight:
                output = self.scheduler.schedule()
                in_flight.append((output, self.execute(output)))
            if not in_flight:
                break
            self.scheduler.update_from_output(*in_flight.popleft())
        assert not self.scheduler.has_unfinished_requests()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Do what a runner does with a step: one in another process, to which the output is pickled."""
        told: SchedulerOutput = pickle.loads(pickle.dumps(output))
        cached = told.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in told.scheduled_new_reqs:
            tokens = self.scheduler.requests[new.req_id].all_token_ids
            assert (new.prefill_token_ids or new.prompt_token_ids) == list(tokens)
            self.runner.requests[new.req_id] = SimpleNamespace(sampling_params=new.sampling_params)
            computed[new.req_id] = new.num_computed_tokens
        for name in cached.resumed_req_ids:
            assert cached.all_token_ids[name] == list(self.scheduler.requests[name].all_token_ids)
        update_resumed(self.runner, told)
        names, sampled = list(told.num_scheduled_tokens), []
        for name in names:
            table = self.runner.requests[name].sampling_params.extra_args[TABLE_KEY]
            request = self.scheduler.requests[name]
            end = computed[name] + told.num_scheduled_tokens[name]
            assert table == request.sampling_params.extra_args[TABLE_KEY]
            assert end <= STEPS.reaches[table]
            self.note_growth(request, table)
            if end < request.num_tokens:
                sampled.append([])
                continue
            sampled.append([end % 97])
            self.tables.setdefault(name, []).append(table)
        return ModelRunnerOutput(names, {name: number for number, name in enumerate(names)}, sampled)

    def note_growth(self, request: Request, table: int) -> None:
        """Note a new table. Blocks are then those of a request that continues the text at that table."""
        grown = self.grown.setdefault(request.request_id, [])
        if grown and grown[-1][1] == table:
            return
        grown.append((request.num_tokens, table))
        salt = "user" if (request.cache_salt or "").endswith("user") else None
        fresh = engine_request(request.num_tokens, cache_salt=salted(salt, table))
        fresh.prompt_token_ids[:] = request.all_token_ids
        known = Request.from_engine_core_request(fresh, self.core.request_block_hasher)
        assert list(request.block_hashes) == list(known.block_hashes)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return engine_config(tmp_path, AUTO, async_scheduling=False, max_num_batched_tokens=256, max_num_seqs=8)


def expected_tables(prompt: int, end: int = LENGTH) -> list[int]:
    """Return the smallest table that reaches each new token, from the room that a prompt reserves on."""
    first = next(table for table, reach in enumerate(STEPS.reaches) if reach >= prompt + STEPS.reserve)
    smallest = [next(table for table, reach in enumerate(STEPS.reaches) if reach > at) for at in range(prompt, end)]
    return [max(first, table) for table in smallest]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("use_v2", [False, True])
def test_a_request_grows_through_all_tables(config: Any, use_v2: bool, steps_in_flight: int) -> None:
    engine = Engine(config, 100, use_v2=use_v2, steps_in_flight=steps_in_flight)
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20}, cache_salt="user")
    other = engine.add("b", 20, params={"max_tokens": 30})
    engine.run()
    assert engine.tables == {"a": expected_tables(20), "b": [0] * 30}
    assert engine.grown["a"] == [(20, 0), (64, 1), (128, 2), (256, 3), (512, 4)]
    assert list(request.output_token_ids) == [at % 97 for at in range(20, LENGTH)]
    assert (request.num_preemptions, other.num_preemptions) == (4, 0)
    assert str(request.get_finished_reason()) == "length"


@pytest.mark.parametrize("use_v2", [False, True])
def test_requests_grow_while_others_are_preempted(config: Any, use_v2: bool) -> None:
    prompts = {"a": 20, "b": 100, "c": 400}
    engine = Engine(config, LENGTH // BLOCK + 6, use_v2=use_v2)
    requests = [engine.add(name, prompt, params={"max_tokens": LENGTH - prompt}) for name, prompt in prompts.items()]
    engine.run()
    assert engine.tables == {name: expected_tables(prompt) for name, prompt in prompts.items()}
    assert sum(request.num_preemptions for request in requests) > 4 + 2 + 1  # those of growth


def test_requests_that_share_their_parameters_grow_alone(config: Any) -> None:
    engine = Engine(config, 200)
    shared = SamplingParams(max_tokens=LENGTH - 20)
    first, second = (engine.add(name, 20, sampling_params=shared) for name in "ab")
    assert first.sampling_params is second.sampling_params
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert first.sampling_params.extra_args == {TABLE_KEY: 4}
    assert second.sampling_params.extra_args == {TABLE_KEY: 0}


def test_a_request_that_is_aborted_while_it_grows_leaves_no_block(config: Any) -> None:
    engine = Engine(config, 100)
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20})
    while request.num_tokens < STEPS.reaches[0]:
        output = engine.scheduler.schedule()
        engine.scheduler.update_from_output(output, engine.execute(output))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # so that it stays in the queue
    assert not engine.scheduler.schedule().num_scheduled_tokens
    assert request.status == RequestStatus.PREEMPTED
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()


@pytest.mark.parametrize(
    ("params", "tokens", "table"),
    [({"max_tokens": 44}, 64, 0), ({"max_tokens": 108}, 128, 1), ({"extra_args": {SCALE_KEY: 2}}, 128, 1)],
    ids=["the whole of the first table", "of the second", "a named scale"],
)
def test_requests_that_end_within_their_scale_do_not_grow(
    config: Any, params: dict[str, Any], tokens: int, table: int
) -> None:
    engine = Engine(config, 100)
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20} | params)
    engine.run()
    assert (request.num_tokens, request.num_preemptions) == (tokens, 0)
    assert engine.tables["a"] == [table] * (tokens - 20)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"speculative_config": NGRAM},
        {"kv_transfer_config": transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)},
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_where_requests_do_not_grow_their_answers_are_capped(tmp_path: Path, options: dict[str, Any]) -> None:
    config = engine_config(tmp_path, AUTO, **({"async_scheduling": False} | options))
    assert not can_grow(config)
    admitted, _ = bare_core(config).preprocess_add_request(engine_request(20, params={"max_tokens": LENGTH - 20}))
    assert admitted.max_tokens == STEPS.reaches[0] - 20


def test_schedulers_of_other_models_are_left_alone(config: Any, tmp_path: Path) -> None:
    make_scheduler(config, 100)  # hooks schedule() of all schedulers of the process
    scheduler = make_scheduler(engine_config(tmp_path / "stock", async_scheduling=False), 100)
    hasher = bare_core(config).request_block_hasher
    request = Request.from_engine_core_request(engine_request(20, params={"max_tokens": 44}), hasher)
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        test_request_scale.TestScheduler.step(scheduler)
    assert (request.num_tokens, request.num_preemptions) == (64, 0)
