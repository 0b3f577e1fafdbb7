"""Admission: the table of a request, its max_tokens, its salt; through vLLM's own front end, core and scheduler."""

import inspect
import itertools
import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from running_version import VERSION
from tiny_engine import AUTO, engine_config
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from mrrope.serving.scale_choice import (
    Choice,
    ScaleSteps,
    choose,
    parsed_scale,
    request_counter,
    salted,
    scales_time,
    unsalted,
)
from mrrope.vllm.hooks import WRAPPED
from mrrope.vllm.request_scale import SCALE_KEY, TABLE_KEY, Admission

if VERSION >= (0, 28):
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
else:
    from vllm.entrypoints.serve.utils.error_response import create_error_response
if VERSION >= (0, 31):
    from vllm.multimodal.cache import LruKeyReplicatedReceiverCache as ReceiverCache
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache as SenderCache
else:
    from vllm.multimodal.cache import MultiModalProcessorSenderCache as SenderCache
    from vllm.multimodal.cache import MultiModalReceiverCache as ReceiverCache

STEPS = ScaleSteps((64, 128, 256, 512, 1024), (1.0, 2.0, 4.0, 8.0, 16.0), reserve=32)
BLOCK = 16


@pytest.fixture(scope="module")
def auto_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(tmp_path_factory.mktemp("auto"), AUTO, served_model_name="tiny")


@pytest.fixture(scope="module")
def capping_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A configuration by which requests do not grow: they get no more new tokens than their table reaches."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    return engine_config(tmp_path_factory.mktemp("capping"), AUTO, served_model_name="tiny", speculative_config=drafts)


@pytest.fixture(scope="module")
def front_end(auto_config: Any) -> InputProcessor:
    return InputProcessor(auto_config)


def process(front_end: InputProcessor, prompt_tokens: int, params: SamplingParams, **options: Any) -> EngineCoreRequest:
    prompt = {"type": "token", "prompt_token_ids": [i % 100 for i in range(prompt_tokens)]}
    return front_end.process_inputs("request", prompt, params, ("generate",), **options)


def bare_core(config: Any) -> Any:
    """An engine core as far as admission needs one: a whole one would load the model."""
    init_none_hash(sha256)
    core = EngineCore.__new__(EngineCore)
    core.vllm_config = config
    core.mm_receiver_cache = None
    core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
    return core


def engine_request(prompt_tokens: int, request_id: str = "request", **options: Any) -> EngineCoreRequest:
    params = SamplingParams(**{"max_tokens": 8, **options.pop("params", {})})
    fields = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    fields |= {"sampling_params": params, "arrival_time": 0.0}
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=[i % 100 for i in range(prompt_tokens)], **(fields | options)
    )


class TestChoose:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "table"),
        [(10, 54, 0), (10, 55, 1), (64, 64, 1), (64, 65, 2), (1000, 20, 4), (1, 1, 0)],
    )
    def test_smallest_table_reaches_prompt_and_new_tokens(self, prompt: int, max_tokens: int, table: int) -> None:
        chosen = choose(STEPS, prompt_tokens=prompt, max_tokens=max_tokens, max_model_len=1024)
        assert chosen == Choice(table, max_tokens)

    @pytest.mark.parametrize(
        ("prompt", "table", "capped"),
        [(10, 0, 54), (32, 0, 32), (33, 1, 95), (96, 1, 32), (97, 2, 159), (900, 4, 124), (1020, 4, 4)],
    )
    def test_left_out_max_tokens_reserve_and_are_capped(self, prompt: int, table: int, capped: int) -> None:
        for max_tokens in (1024 - prompt, 5000):
            chosen = choose(STEPS, prompt_tokens=prompt, max_tokens=max_tokens, max_model_len=1024)
            assert chosen.table == table
            assert min(chosen.max_tokens, 1024 - prompt) == capped

    def test_min_tokens_count_where_max_tokens_are_left_out(self) -> None:
        chosen = choose(STEPS, prompt_tokens=10, max_tokens=1014, max_model_len=1024, min_tokens=100)
        assert chosen == Choice(1, 118)

    def test_reasoning_is_reserved_besides_the_answer(self) -> None:
        for max_tokens, scale, chosen in [
            (1014, None, Choice(2, 246)),
            (100, None, Choice(1, 100)),
            (1014, 2, Choice(1, 118)),
        ]:
            arguments = {"prompt_tokens": 10, "max_model_len": 1024, "thinking_tokens": 100, "scale": scale}
            assert choose(STEPS, max_tokens=max_tokens, **arguments) == chosen
            assert choose(STEPS, max_tokens=chosen.max_tokens, **arguments) == chosen

    def test_without_a_reserve_there_is_room_for_one_token(self) -> None:
        steps = replace(STEPS, reserve=0)
        for prompt, chosen in [(63, Choice(0, 1)), (64, Choice(1, 64)), (512, Choice(4, 512)), (1023, Choice(4, 1))]:
            assert choose(steps, prompt_tokens=prompt, max_tokens=1024 - prompt, max_model_len=1024) == chosen
        chosen = choose(steps, prompt_tokens=64, max_tokens=960, max_model_len=1024, grows=True)
        assert chosen == Choice(1, 960)

    def test_short_max_model_len_needs_no_long_table(self) -> None:
        assert choose(STEPS, prompt_tokens=50, max_tokens=50, max_model_len=100) == Choice(1, 50)
        assert choose(STEPS, prompt_tokens=60, max_tokens=4, max_model_len=64) == Choice(0, 4)

    def test_last_table_serves_a_longer_max_model_len(self) -> None:
        assert choose(STEPS, prompt_tokens=2000, max_tokens=100, max_model_len=4096) == Choice(4, 100)
        assert choose(STEPS, prompt_tokens=2000, max_tokens=2096, max_model_len=4096) == Choice(4, 2096)

    def test_agrees_with_a_search_and_is_idempotent(self) -> None:
        draw = random.Random(0)
        seen = set()
        for _ in range(5000):
            max_model_len = draw.choice([50, 64, 100, 700, 1024, 3000])
            prompt = draw.randrange(1, max_model_len)
            max_tokens = draw.choice([draw.randrange(1, max_model_len), max_model_len - prompt])
            scale = draw.choice([None, None, 1, 2, 4, 8, 16])
            arguments = {"prompt_tokens": prompt, "max_model_len": max_model_len, "scale": scale}
            arguments |= {"min_tokens": draw.choice([0, min(40, max_tokens)])}
            try:
                chosen = choose(STEPS, max_tokens=max_tokens, **arguments)
            except ValueError:
                needed = max_tokens if max_tokens < max_model_len - prompt else max(1, arguments["min_tokens"])
                assert scale is not None
                assert STEPS.reaches[STEPS.scales.index(scale)] < prompt + needed
                seen.add("refused")
                continue
            assert chosen == choose(STEPS, max_tokens=chosen.max_tokens, **arguments)
            end = min(prompt + chosen.max_tokens, max_model_len)
            assert chosen.table == 4 or end <= STEPS.reaches[chosen.table]
            assert chosen.max_tokens >= arguments["min_tokens"]
            if max_tokens < max_model_len - prompt:
                assert chosen.max_tokens == max_tokens
                if scale is None:
                    assert chosen.table == 0 or STEPS.reaches[chosen.table - 1] < prompt + max_tokens
            if scale is not None:
                assert STEPS.scales[chosen.table] == scale
            seen.add(chosen.table)
        assert seen == {0, 1, 2, 3, 4, "refused"}

    @pytest.mark.parametrize("scale", [4, 4.0, "4", " 4.0 "])
    def test_named_scale_is_used(self, scale: object) -> None:
        assert choose(STEPS, prompt_tokens=10, max_tokens=10, max_model_len=1024, scale=scale) == Choice(2, 10)

    @pytest.mark.parametrize("given", [7 / 3, "2.33333", 2.33333, str(7 / 3)])
    def test_a_scale_is_named_as_it_is_printed(self, given: object) -> None:
        steps = ScaleSteps((64, 149, 1000), (1.0, 7 / 3, 1e6 / 7), reserve=32)
        with pytest.raises(ValueError, match=r"must be one of 1, 2\.33333, 142857, got 2\.3333"):
            parsed_scale(steps, 2.3333)
        assert parsed_scale(steps, given) == 7 / 3
        assert parsed_scale(steps, "142857") == 1e6 / 7
        assert choose(steps, prompt_tokens=10, max_tokens=10, max_model_len=1000, scale=given) == Choice(1, 10)

    def test_named_scale_caps_left_out_max_tokens(self) -> None:
        assert choose(STEPS, prompt_tokens=60, max_tokens=964, max_model_len=1024, scale=1) == Choice(0, 4)

    @pytest.mark.parametrize("scale", [3, 0, -1, True, "x", "", [4], {}, float("nan"), float("inf"), 10**400])
    def test_unknown_scale_is_refused(self, scale: object) -> None:
        with pytest.raises(ValueError, match=r"mrrope_scale must be one of 1, 2, 4, 8, 16, got"):
            choose(STEPS, prompt_tokens=10, max_tokens=10, max_model_len=1024, scale=scale)

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(60, 70), (128, 896), (200, 1)])
    def test_scale_that_does_not_reach_is_refused(self, prompt: int, max_tokens: int) -> None:
        with pytest.raises(ValueError, match=r"must be one of 4, 8, 16 for a prompt of .*, got '2'; .* 128 tokens at"):
            choose(STEPS, prompt_tokens=prompt, max_tokens=max_tokens, max_model_len=1024, scale="2")


def test_salts_are_distinct_and_spare_the_native_table() -> None:
    salts = [None, "a", "mrrope:", "mrrope:1:", "mrrope:1:a", "mrrope:0:mrrope:", "1:a", "mrrope:2:mrrope:1:"]
    made = [salted(salt, table) for salt, table in itertools.product(salts, range(3))]
    assert len(set(made)) == len(made)
    assert [unsalted(salt) for salt in made] == [salt for salt in salts for _ in range(3)]
    assert salted(None, 0) is None
    assert salted("a", 0) == "a"


class TestFrontEnd:
    @pytest.mark.parametrize("grows", [True, False])
    def test_requests_get_tables(self, front_end: InputProcessor, capping_config: Any, grows: bool) -> None:
        front_end = front_end if grows else InputProcessor(capping_config)
        for prompt, params, table, max_tokens in [
            (20, SamplingParams(max_tokens=10), 0, 10),
            (60, SamplingParams(max_tokens=10), 1, 10),
            (60, SamplingParams(max_tokens=None), 1, 964 if grows else 68),
            (300, SamplingParams(max_tokens=None), 3, 724 if grows else 212),
            (60, SamplingParams(max_tokens=None, extra_args={SCALE_KEY: "2"}), 1, 68),
            (20, SamplingParams(max_tokens=10, extra_args={SCALE_KEY: "8"}), 3, 10),
        ]:
            request = process(front_end, prompt, params)
            assert request.sampling_params.extra_args[TABLE_KEY] == table
            assert request.sampling_params.max_tokens == max_tokens

    def test_a_budget_for_reasoning_chooses_alike_in_both_processes(self, capping_config: Any) -> None:
        admission = Admission.of(capping_config)
        for budget, chosen in [(None, Choice(0, 54)), (0, Choice(0, 54)), (60, Choice(1, 118))]:
            request = engine_request(10, params={"max_tokens": 1014, "thinking_token_budget": budget})
            assert admission.admit(request) == admission.admit(request) == chosen

    def test_a_client_cannot_choose_the_index(self, front_end: InputProcessor, auto_config: Any) -> None:
        for index in (0, 4, 99, -1, "x"):
            request = process(front_end, 100, SamplingParams(max_tokens=10, extra_args={TABLE_KEY: index}))
            assert request.sampling_params.extra_args == {TABLE_KEY: 1}
            request = engine_request(100, params={"extra_args": {TABLE_KEY: index}})
            admitted, _ = bare_core(auto_config).preprocess_add_request(request)
            assert admitted.sampling_params.extra_args == {TABLE_KEY: 1}

    @pytest.mark.parametrize("skip_clone", [False, True])
    def test_params_of_the_caller_are_not_changed(self, front_end: InputProcessor, skip_clone: bool) -> None:
        params = SamplingParams(max_tokens=None, extra_args={"other": 1}, skip_clone=skip_clone)
        request = process(front_end, 100, params)
        assert request.sampling_params.extra_args == {"other": 1, TABLE_KEY: 2}
        assert params.extra_args == {"other": 1}
        assert params.max_tokens is None

    def test_children_of_n_keep_the_table(self, front_end: InputProcessor) -> None:
        request = process(front_end, 100, SamplingParams(max_tokens=10, n=3, seed=1))
        front_end.assign_request_id(request)
        parent = ParentRequest(request)
        children = [parent.get_child_info(index)[1] for index in range(3)]
        assert [child.extra_args for child in children] == 3 * [{TABLE_KEY: 1}]

    def test_bad_scale_becomes_http_400(self, front_end: InputProcessor) -> None:
        with pytest.raises(VLLMValidationError, match="mrrope_scale must be one of 1, 2, 4, 8, 16, got 3") as error:
            process(front_end, 20, SamplingParams(max_tokens=10, extra_args={SCALE_KEY: 3}))
        answer = create_error_response(error.value).error
        assert answer.code == 400
        assert "mrrope_scale" in answer.message

    def test_streaming_input_is_refused(self, front_end: InputProcessor) -> None:
        with pytest.raises(VLLMValidationError, match="streaming input"):
            process(front_end, 20, SamplingParams(max_tokens=10), resumable=True)

    def test_counter_counts_scales(self, front_end: InputProcessor) -> None:
        def counted(scale: str) -> float:
            labels = {"model_name": "tiny", "scale": scale}
            return REGISTRY.get_sample_value("mrrope:requests_total", labels) or 0.0

        before = counted("1"), counted("4")
        for prompt in (10, 200, 210):
            process(front_end, prompt, SamplingParams(max_tokens=10))
        # vLLM does this whenever it creates an engine.
        unregister_vllm_metrics()
        process(front_end, 220, SamplingParams(max_tokens=10))
        assert (counted("1") - before[0], counted("4") - before[1]) == (1, 3)

    def test_a_second_engine_shares_the_counter(self, auto_config: Any) -> None:
        counter = request_counter()
        InputProcessor(auto_config)
        assert request_counter() is counter
        assert b"mrrope:requests_total" in generate_latest(REGISTRY)

    def test_start_names_the_ladder(self, auto_config: Any, caplog: pytest.LogCaptureFixture) -> None:
        logger = logging.getLogger("vllm.mrrope")
        logger.addHandler(caplog.handler)
        try:
            with caplog.at_level(logging.INFO, "vllm.mrrope"):
                InputProcessor(auto_config)
        finally:
            logger.removeHandler(caplog.handler)
        (message,) = {record.getMessage() for record in caplog.records}
        assert "64 tokens at scale 1, 128 tokens at scale 2" in message
        assert "32 new tokens" in message

    @pytest.mark.parametrize("rope_parameters", [None, {"rope_type": "mrrope_pro", "factor": 4.0}])
    def test_fixed_tables_need_no_admission(self, tmp_path: Path, rope_parameters: dict[str, Any] | None) -> None:
        config = engine_config(tmp_path, rope_parameters)
        request = process(InputProcessor(config), 20, SamplingParams(max_tokens=None, extra_args={TABLE_KEY: 7}))
        assert request.sampling_params.extra_args == {TABLE_KEY: 7}
        assert request.sampling_params.max_tokens == config.model_config.max_model_len - 20
        admitted, _ = bare_core(config).preprocess_add_request(request)
        assert admitted.cache_salt is None


class TestFixedFactor:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Any:
        return engine_config(tmp_path, {"rope_type": "mrrope_pro", "factor": 4.0})

    @pytest.mark.parametrize("scale", [2, "1", True, "x", 4.5])
    def test_another_scale_becomes_http_400(self, config: Any, scale: object) -> None:
        params = SamplingParams(max_tokens=10, extra_args={SCALE_KEY: scale})
        with pytest.raises(
            VLLMValidationError, match=r"mrrope_scale must be 4, the scale of all requests, got"
        ) as error:
            process(InputProcessor(config), 20, params)
        assert create_error_response(error.value).error.code == 400
        with pytest.raises(ValueError, match="mrrope_scale must be 4"):
            bare_core(config).preprocess_add_request(engine_request(20, params={"extra_args": {SCALE_KEY: scale}}))

    @pytest.mark.parametrize("scale", [4, "4.0"])
    def test_its_own_scale_is_served(self, config: Any, scale: object) -> None:
        params = SamplingParams(max_tokens=10, extra_args={SCALE_KEY: scale})
        request = process(InputProcessor(config), 20, params)
        assert request.sampling_params.extra_args == {SCALE_KEY: scale}
        admitted, _ = bare_core(config).preprocess_add_request(request)
        assert admitted.cache_salt is None

    def test_a_stock_model_reads_no_scale(self, tmp_path: Path) -> None:
        params = SamplingParams(max_tokens=10, extra_args={SCALE_KEY: 3})
        assert process(InputProcessor(engine_config(tmp_path)), 20, params).sampling_params.extra_args == {SCALE_KEY: 3}


def test_counter_works_in_multiprocess_mode(tmp_path: Path) -> None:
    code = (
        "from mrrope.vllm.request_scale import request_counter\n"
        "request_counter().labels('m', '4').inc(3)\n"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry\n"
        "from prometheus_client import generate_latest\n"
        "print(generate_latest(get_prometheus_registry()).decode())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    # Not in the checkout, whose package need not be compiled.
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert 'mrrope:requests_total{model_name="m",scale="4"} 3.0' in ran.stdout


class TestCore:
    def test_scales_separate_block_hashes(self, auto_config: Any) -> None:
        core = bare_core(auto_config)

        def hashes(max_tokens: int, salt: str | None = None) -> tuple[Any, ...]:
            request = engine_request(48, params={"max_tokens": max_tokens}, cache_salt=salt)
            admitted, _ = core.preprocess_add_request(request)
            assert len(admitted.block_hashes) == 3
            return tuple(admitted.block_hashes)

        scales = [hashes(max_tokens) for max_tokens in (8, 50, 150, 300, 800)]
        assert len(set(itertools.chain(*scales))) == 15
        assert scales == [hashes(max_tokens) for max_tokens in (16, 80, 200, 464, 900)]
        assert hashes(8, salt="user") not in scales
        assert hashes(50, salt="user") not in (*scales, hashes(8, salt="user"))
        # A salt that imitates another table's does not reach its blocks.
        assert hashes(8, salt=salted(None, 1)) not in scales

    def test_native_table_shares_blocks_with_stock(self, auto_config: Any) -> None:
        core = bare_core(auto_config)
        admitted, _ = core.preprocess_add_request(engine_request(48))
        stock = Request.from_engine_core_request(engine_request(48), core.request_block_hasher)
        assert admitted.block_hashes == stock.block_hashes

    def test_request_of_another_front_end_is_admitted(self, capping_config: Any) -> None:
        admitted, _ = bare_core(capping_config).preprocess_add_request(engine_request(100, params={"max_tokens": 924}))
        assert admitted.sampling_params.extra_args == {TABLE_KEY: 2}
        assert admitted.max_tokens == 156
        assert admitted.cache_salt == salted(None, 2)

    def test_front_end_and_core_agree(self, front_end: InputProcessor, auto_config: Any) -> None:
        core = bare_core(auto_config)
        for prompt, max_tokens in itertools.product((5, 60, 100, 400, 1000), (None, 1, 20, 600)):
            request = process(front_end, prompt, SamplingParams(max_tokens=max_tokens))
            chosen = request.sampling_params.extra_args[TABLE_KEY], request.sampling_params.max_tokens
            admitted, _ = core.preprocess_add_request(request)
            assert (admitted.sampling_params.extra_args[TABLE_KEY], admitted.max_tokens) == chosen

    def test_pooling_request_is_refused(self, auto_config: Any) -> None:
        request = engine_request(10, sampling_params=None, pooling_params=PoolingParams(task="embed"))
        with pytest.raises(ValueError, match="pooling"):
            bare_core(auto_config).preprocess_add_request(request)

    def test_max_model_len_fitted_to_memory_counts(self, capping_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        core = bare_core(capping_config)
        core.preprocess_add_request(engine_request(10))
        monkeypatch.setattr(capping_config.model_config, "max_model_len", 300)
        # What vLLM makes of a left-out max_tokens then.
        admitted, _ = core.preprocess_add_request(engine_request(200, params={"max_tokens": 100}))
        assert admitted.sampling_params.extra_args == {TABLE_KEY: 2}
        assert admitted.max_tokens == 56


class TestVideo:
    @staticmethod
    def request(modality: str, **params: Any) -> EngineCoreRequest:
        feature = MultiModalFeatureSpec(None, modality, "hash", PlaceholderRange(offset=1, length=4))
        return engine_request(20, mm_features=[feature], params=params)

    def test_video_in_seconds_needs_a_named_scale(self, tmp_path: Path) -> None:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        config = {"rope_parameters": rope, "vision_config": {"tokens_per_second": 2}}
        admission = Admission.of(engine_config(tmp_path, AUTO, config=config))
        with pytest.raises(ValueError, match="mrrope_scale must be given for a request with video"):
            admission.admit(self.request("video"))
        assert admission.admit(self.request("image")).table == 0
        assert admission.admit(self.request("video", extra_args={SCALE_KEY: 4})).table == 2

    def test_media_of_a_refused_request_can_be_sent_again(
        self, front_end: InputProcessor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1))
        sent, held = SenderCache(settings), ReceiverCache(settings)
        monkeypatch.setattr(type(front_end.renderer), "mm_processor_cache", sent)
        monkeypatch.setattr(front_end, "mm_encoder_cache_size", 100)

        # The renderer calls this before it looks media up.
        forget_invalid = getattr(front_end.renderer, "_drain_mm_cache_invalidations", lambda: None)

        def process(scale: int, **media: Any) -> EngineCoreRequest:
            forget_invalid()
            prompt = {
                "type": "multimodal",
                "prompt_token_ids": [1] * 20,
                "mm_hashes": {"video": list(media)},
                # What vLLM's renderer does.
                "mm_kwargs": {"video": [sent.get_and_update_item((item, []), key)[0] for key, item in media.items()]},
                "mm_placeholders": {"video": [PlaceholderRange(4 * i + 1, 4) for i in range(len(media))]},
            }
            params = SamplingParams(max_tokens=8, extra_args={SCALE_KEY: scale})
            return front_end.process_inputs("request", prompt, params, ("generate",))

        media = {name: MultiModalKwargsItem.dummy() for name in ("former", "new")}
        held.get_and_update_features(process(4, former=media["former"]).mm_features)
        with pytest.raises(VLLMValidationError, match=SCALE_KEY):
            process(3, **media)
        features = process(4, **media).mm_features
        assert [feature.data for feature in features] == [None, media["new"]]
        assert [feature.data for feature in held.get_and_update_features(features)] == list(media.values())

    def test_models_that_scale_time_are_known(self) -> None:
        from transformers import Qwen2_5_VLConfig, Qwen2_5OmniConfig, Qwen2VLConfig, Qwen3VLConfig

        assert scales_time(Qwen2_5_VLConfig().to_dict())
        assert scales_time(Qwen2_5OmniConfig().to_dict())
        assert not scales_time(Qwen2VLConfig().to_dict())
        assert not scales_time(Qwen3VLConfig().to_dict())


class TestScheduler:
    """vLLM's scheduler, with requests admitted by the core; a step samples token 1 for each finished prompt."""

    @staticmethod
    def scheduler(config: Any, blocks: int) -> Scheduler:
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        return Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)

    @staticmethod
    def step(scheduler: Scheduler) -> SchedulerOutput:
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = [[1] if not scheduler.requests[i].is_prefill_chunk else [] for i in ids]
        scheduler.update_from_output(output, ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, sampled))
        return output

    @pytest.fixture
    def config(self, tmp_path: Path) -> Any:
        return engine_config(tmp_path, AUTO, async_scheduling=False, max_num_batched_tokens=2048, max_num_seqs=16)

    def test_prefix_hits_stay_within_a_scale(self, config: Any) -> None:
        core, scheduler = bare_core(config), self.scheduler(config, 1000)
        hits = []
        for name, max_tokens in [("a", 2), ("b", 60), ("c", 3), ("d", 70), ("e", 150), ("f", 151)]:
            request = engine_request(56, name, params={"max_tokens": max_tokens})
            scheduler.add_request(core.preprocess_add_request(request)[0])
            (new,) = self.step(scheduler).scheduled_new_reqs
            hits.append((new.sampling_params.extra_args[TABLE_KEY], new.num_computed_tokens))
        assert hits == [(0, 0), (1, 0), (0, 48), (1, 48), (2, 0), (2, 48)]

    @pytest.mark.parametrize("use_v2", [False, True])
    def test_preempted_request_keeps_its_table(self, config: Any, use_v2: bool) -> None:
        core, scheduler = bare_core(config), self.scheduler(config, 14)
        scheduler.use_v2_model_runner = use_v2
        tables = {}
        for name, max_tokens in [("a", 20), ("b", 60), ("c", 60)]:
            request = engine_request(40, name, params={"max_tokens": max_tokens, "ignore_eos": True})
            request.prompt_token_ids[0] = ord(name)
            admitted, _ = core.preprocess_add_request(request)
            tables[name] = admitted.sampling_params.extra_args[TABLE_KEY]
            scheduler.add_request(admitted)
        assert tables == {"a": 0, "b": 1, "c": 1}
        preempted: set[str] = set()
        resumed: dict[str, int] = {}
        for _ in range(400):
            if not scheduler.has_unfinished_requests():
                break
            output = self.step(scheduler)
            for new in output.scheduled_new_reqs:
                assert new.sampling_params.extra_args[TABLE_KEY] == tables[new.req_id]
                if new.req_id in preempted:
                    resumed[new.req_id] = tables[new.req_id]
            for name in output.scheduled_cached_reqs.resumed_req_ids:
                resumed[name] = scheduler.requests[name].sampling_params.extra_args[TABLE_KEY]
            preempted |= output.preempted_req_ids or set()
        assert not scheduler.has_unfinished_requests()
        assert preempted
        assert resumed == {name: tables[name] for name in preempted}


def test_hooks_fit_the_functions_they_wrap() -> None:
    assert hasattr(InputProcessor.__init__, WRAPPED)
    assert hasattr(InputProcessor.process_inputs, WRAPPED)
    # The hook passes this one's arguments by position.
    original = getattr(EngineCore.preprocess_add_request, WRAPPED)
    assert list(inspect.signature(original).parameters) == ["self", "request"]
