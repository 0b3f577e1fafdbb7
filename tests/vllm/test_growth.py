"""Requests that outgrow their scale, in vLLM's scheduler: what workers are told, what is kept, and what is cached."""

import pickle
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from test_compatibility import transfer
from test_request_scale import BLOCK, STEPS, TestScheduler, bare_core, engine_request
from tiny_engine import AUTO, engine_config
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from mrrope.serving.scale_choice import SCALE_KEY, TABLE_KEY, salted
from mrrope.vllm.compatibility import can_grow
from mrrope.vllm.grown_requests import make_engine
from mrrope.vllm.growth import update_resumed
from mrrope.vllm.request_scale import Admission

LENGTH = STEPS.reaches[-1]
STOP = 1
"""The token that ends a request."""


def sampled_token(at: int, table: int) -> int:
    """Return what the model says at a position: each table says something else."""
    return 2 + (7 * at + 31 * table) % 97


def make_scheduler(config: Any, blocks: int) -> Scheduler:
    """Return the scheduler of vLLM's that a configuration selects."""
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    scheduler = config.scheduler_config.get_scheduler_cls()
    return scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


class Engine:
    """vLLM's scheduler with admitted requests, and a runner that knows what the scheduler tells it.

    Steps are executed when they are scheduled, and return when ``steps_in_flight`` are under way. The runner keeps the
    tokens and tables whose keys are in each slot of its blocks, and samples from them.
    """

    def __init__(self, config: Any, blocks: int, *, use_v2: bool = False, steps_in_flight: int | None = None) -> None:
        self.core, self.scheduler = bare_core(config), make_scheduler(config, blocks)
        self.scheduler.use_v2_model_runner = use_v2
        self.steps_in_flight = steps_in_flight or (2 if config.scheduler_config.async_scheduling else 1)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.runner = SimpleNamespace(requests={})
        self.keys: dict[tuple[int, int], tuple[int, int]] = {}
        """Token and table by block and slot."""
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, int] = {}
        """Where requests say the token that ends them."""
        self.tables: dict[str, list[int]] = {}
        """The table of every step that sampled a token of an answer."""
        self.grown: dict[str, list[tuple[int, int]]] = {}
        """Tokens and table of a request, whenever its table changed."""

    def add(self, name: str, tokens: int, *, first: int | None = None, **options: Any) -> Request:
        """Add a request whose blocks no other has, unless ``first`` is the first token of both."""
        given = engine_request(tokens, name, **options)
        given.prompt_token_ids[0] = ord(name) if first is None else first
        request, _ = self.core.preprocess_add_request(given)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self) -> None:
        """Schedule until as many steps are under way as can be, and take the output of the first."""
        while self.scheduler.has_requests() and len(self.in_flight) < self.steps_in_flight:
            output = self.scheduler.schedule()
            self.in_flight.append((output, self.execute(output)))
        if self.in_flight:
            self.scheduler.update_from_output(*self.in_flight.popleft())

    def run(self) -> None:
        """Run until all requests have ended."""
        for _ in range(10 * LENGTH):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Do what a runner does with a step: one in another process, to which the output is pickled."""
        told: SchedulerOutput = pickle.loads(pickle.dumps(output))
        cached = told.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in told.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            assert tokens == list(self.requests[new.req_id].all_token_ids)
            self.runner.requests[new.req_id] = SimpleNamespace(
                sampling_params=new.sampling_params, tokens=tokens, blocks=list(new.block_ids[0])
            )
            computed[new.req_id] = new.num_computed_tokens
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self.runner.requests[name]
            if name in cached.resumed_req_ids:
                state.tokens, state.blocks = list(cached.all_token_ids[name]), []
                assert state.tokens == list(self.requests[name].all_token_ids)
            state.blocks += blocks[0] if blocks else []
        update_resumed(self.runner, told)
        names = list(told.num_scheduled_tokens)
        sampled = [self.compute(name, computed[name], told.num_scheduled_tokens[name]) for name in names]
        return ModelRunnerOutput(names, {name: number for number, name in enumerate(names)}, sampled)

    def compute(self, name: str, start: int, count: int) -> list[int]:
        """Compute tokens of a request; return the one that is sampled after the last of them."""
        state, request, end = self.runner.requests[name], self.requests[name], start + count
        table = state.sampling_params.extra_args[TABLE_KEY]
        assert table == request.sampling_params.extra_args[TABLE_KEY]
        assert end <= min(len(state.tokens), STEPS.reaches[table])
        self.note_growth(request, table)
        for at in range(start, end):
            self.keys[state.blocks[at // BLOCK], at % BLOCK] = state.tokens[at], table
        if count > 1 or end % BLOCK == 0 or end in STEPS.reaches:
            read = [self.keys[state.blocks[at // BLOCK], at % BLOCK] for at in range(end)]
            assert read == [(token, table) for token in state.tokens[:end]]
        if end < len(state.tokens):
            return []
        self.tables.setdefault(name, []).append(table)
        state.tokens.append(STOP if self.ends.get(name) == end else sampled_token(end, table))
        return state.tokens[-1:]

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


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    return engine_config(tmp_path_factory.mktemp("auto"), AUTO, async_scheduling=request.param, **options)


def expected_tables(prompt: int, end: int = LENGTH) -> list[int]:
    """Return the smallest table that reaches each new token, from the room that a prompt reserves on."""
    first = next(table for table, reach in enumerate(STEPS.reaches) if reach >= prompt + STEPS.reserve)
    smallest = [next(table for table, reach in enumerate(STEPS.reaches) if reach > at) for at in range(prompt, end)]
    return [max(first, table) for table in smallest]


def expected_tokens(prompt: int, end: int = LENGTH) -> list[int]:
    """Return what the table of each new token says."""
    tables = expected_tables(prompt, end)
    return [sampled_token(at, table) for at, table in zip(range(prompt, end), tables, strict=True)]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("use_v2", [False, True])
def test_a_request_grows_through_all_tables(config: Any, use_v2: bool, steps_in_flight: int) -> None:
    engine = Engine(config, 100, use_v2=use_v2, steps_in_flight=steps_in_flight)
    assert isinstance(engine.scheduler, AsyncScheduler) == config.scheduler_config.async_scheduling
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20}, cache_salt="user")
    other = engine.add("b", 20, params={"max_tokens": 30})
    engine.run()
    assert engine.tables["a"] == expected_tables(20)
    assert engine.grown["a"] == [(20, 0), (64, 1), (128, 2), (256, 3), (512, 4)]
    assert list(request.output_token_ids) == expected_tokens(20)
    assert list(other.output_token_ids) == expected_tokens(20, 50)
    assert (request.num_preemptions, other.num_preemptions) == (4, 0)
    assert str(request.get_finished_reason()) == "length"


@pytest.mark.parametrize("use_v2", [False, True])
def test_requests_grow_while_others_are_preempted(config: Any, use_v2: bool) -> None:
    prompts = {"a": 20, "b": 100, "c": 400}
    engine = Engine(config, LENGTH // BLOCK + 6, use_v2=use_v2)
    requests = [engine.add(name, prompt, params={"max_tokens": LENGTH - prompt}) for name, prompt in prompts.items()]
    engine.run()
    assert [list(request.output_token_ids) for request in requests] == [expected_tokens(n) for n in prompts.values()]
    assert sum(request.num_preemptions for request in requests) > 4 + 2 + 1  # those of growth


@pytest.mark.parametrize("use_v2", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_come_and_go_at_random(
    config: Any, monkeypatch: pytest.MonkeyPatch, policy: str, use_v2: bool
) -> None:
    """Requests stop, are aborted and are preempted for memory; all that the others say is what their tables say."""
    draw = random.Random(f"{policy} {use_v2}")
    monkeypatch.setattr(config.scheduler_config, "policy", policy)
    engine = Engine(config, LENGTH // BLOCK + draw.choice([4, 20, 60]), use_v2=use_v2)
    scheduler = engine.scheduler
    for number in range(20):
        for _ in range(draw.randrange(60)):
            engine.step()
        if scheduler.requests and draw.random() < 0.3:
            scheduler.finish_requests(draw.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if draw.random() < 0.2:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            for _ in range(draw.randrange(4)):
                engine.step()
            scheduler.set_pause_state(PauseState.UNPAUSED)
        prompt = draw.choice([10, 31, 32, 33, 60, 96, 97, 200, 450])
        max_tokens = draw.choice([LENGTH - prompt, LENGTH - prompt, LENGTH - prompt, 32])
        params = {"max_tokens": max_tokens, "stop_token_ids": [STOP]}
        name = str(number)
        engine.add(name, prompt, first=draw.randrange(2), priority=draw.randrange(2), params=params)
        if draw.random() < 0.4:
            engine.ends[name] = draw.choice([reach + more for reach in STEPS.reaches[:3] for more in (-2, -1, 0, 1)])
    engine.run()
    reasons = set()
    for name, request in engine.requests.items():
        known = expected_tokens(request.num_prompt_tokens, request.num_tokens)
        if engine.ends.get(name) == request.num_tokens - 1:
            assert request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED)
            known[-1] = STOP
        elif request.status != RequestStatus.FINISHED_ABORTED:
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            assert request.num_tokens == min(LENGTH, request.num_prompt_tokens + request.max_tokens)
        assert list(request.output_token_ids) == known
        reasons.add(request.status)
    assert len(reasons) == 3


def test_requests_that_share_their_parameters_grow_alone(config: Any) -> None:
    engine = Engine(config, 200)
    shared = SamplingParams(max_tokens=LENGTH - 20)
    first, second = (engine.add(name, 20, sampling_params=shared) for name in "ab")
    assert first.sampling_params is second.sampling_params
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert first.sampling_params.extra_args == {TABLE_KEY: 4}
    assert second.sampling_params.extra_args == {TABLE_KEY: 0}


@pytest.mark.parametrize("steps", range(6))
def test_a_request_that_is_aborted_while_it_grows_leaves_no_block(config: Any, steps: int) -> None:
    engine = Engine(config, 100)
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20})
    engine.add("b", 20, params={"max_tokens": 40})
    while request.num_tokens < STEPS.reaches[0] - 2:
        engine.step()
    for _ in range(steps):
        engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()


class TestPause:
    """``pause(mode="keep")`` is PAUSED_ALL, and ``mode="wait"`` is PAUSED_NEW until no request runs."""

    @staticmethod
    def engine_at_the_end_of_a_table(config: Any, less: int) -> tuple[Engine, Request]:
        engine = Engine(config, 100)
        request = engine.add("a", 20, params={"max_tokens": LENGTH - 20})
        while request.num_tokens < STEPS.reaches[0] - less:
            engine.step()
        return engine, request

    @pytest.mark.parametrize("less", range(4))
    def test_no_request_grows_while_nothing_is_scheduled(self, config: Any, less: int) -> None:
        engine, request = self.engine_at_the_end_of_a_table(config, less)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while engine.in_flight:
            engine.scheduler.update_from_output(*engine.in_flight.popleft())
        assert not engine.scheduler.schedule().num_scheduled_tokens
        assert (request.status, request.num_preemptions) == (RequestStatus.RUNNING, 0)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert list(request.output_token_ids) == expected_tokens(20)

    @pytest.mark.parametrize("less", range(4))
    def test_requests_end_while_a_pause_waits_for_them(self, config: Any, less: int) -> None:
        engine, request = self.engine_at_the_end_of_a_table(config, less)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        waiting = engine.add("b", 20, params={"max_tokens": LENGTH - 20})
        for _ in range(6):
            engine.step()
        assert not engine.scheduler.has_unfinished_requests()
        assert str(request.get_finished_reason()) == "length"
        # One more where no step is in flight that says the last one.
        assert request.num_tokens in (STEPS.reaches[0], STEPS.reaches[0] + 1)
        assert set(engine.tables["a"]) == {0}
        assert waiting.num_tokens == 20
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert list(waiting.output_token_ids) == expected_tokens(20)


@pytest.mark.parametrize("less", range(4))
@pytest.mark.parametrize("use_v2", [False, True])
def test_a_reset_of_the_prefix_cache_loses_no_token(config: Any, use_v2: bool, less: int) -> None:
    """Tokens in flight are dropped by it, and sampled again."""
    engine = Engine(config, 100, use_v2=use_v2)
    request = engine.add("a", 20, params={"max_tokens": LENGTH - 20})
    for reach in STEPS.reaches[:-1]:
        while request.num_tokens < reach - less:
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.keys.clear()
    engine.run()
    tokens = list(request.output_token_ids)
    assert len(tokens) == LENGTH - 20
    # A token that is sampled again may be of the larger scale already.
    for at, (token, table) in enumerate(zip(tokens, expected_tables(20), strict=True), 20):
        assert token == sampled_token(at, table) or (
            token == sampled_token(at, table + 1) and at + 1 + less >= STEPS.reaches[table]
        )


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


def test_requests_that_grew_are_counted(config: Any) -> None:
    def original(engine: Any, _: Any) -> None:
        engine.output_processor = OutputProcessor(None, log_stats=False)

    engine = SimpleNamespace()
    make_engine(original, engine, config)
    processor, admission = engine.output_processor, Admission.of(config)
    untold = OutputProcessor(None, log_stats=False)  # of another engine in the same process

    def grown(name: str, tokens: int, *, aborted: bool = False, **params: Any) -> dict[float, float]:
        """Return by how much each scale is counted more, after a request of 20 tokens that ends with so many."""
        labels = {"model_name": str(config.model_config.served_model_name)}

        def counts() -> list[float]:
            of_scale = [labels | {"scale": f"{scale:g}"} for scale in STEPS.scales]
            return [REGISTRY.get_sample_value("mrrope:grown_requests_total", each) or 0.0 for each in of_scale]

        before = counts()
        request = engine_request(20, name, external_req_id=name, params={"max_tokens": LENGTH - 20} | params)
        admission.admit(request)
        for each in (processor, untold):
            each.add_request(request, None)
            reason = None if aborted else FinishReason.LENGTH
            each.process_outputs([EngineCoreOutput(name, [5] * (tokens - 20), finish_reason=reason)])
            if aborted:
                assert each.abort_requests([name], internal=True) == [name]
        return {scale: new - old for scale, old, new in zip(STEPS.scales, before, counts(), strict=True) if new > old}

    assert grown("a", STEPS.reaches[0]) == {}
    assert grown("b", STEPS.reaches[0] + 1) == {2: 1}
    assert grown("c", LENGTH) == {16: 1}
    assert grown("d", STEPS.reaches[2], aborted=True) == {4: 1}
    assert grown("e", 100, max_tokens=80) == {}
    assert grown("f", STEPS.reaches[1], extra_args={SCALE_KEY: 2}) == {}
    assert processor.mrrope_open_requests.states == {}


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": NGRAM},
        {"kv_transfer_config": transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)},
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_where_requests_do_not_grow_their_answers_are_capped(tmp_path: Path, options: dict[str, Any]) -> None:
    config = engine_config(tmp_path, AUTO, **options)
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
        TestScheduler.step(scheduler)
    assert (request.num_tokens, request.num_preemptions) == (64, 0)
