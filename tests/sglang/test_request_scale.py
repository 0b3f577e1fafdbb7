"""Admission, where no request over HTTP can show it, and what the scheduler does with a request afterwards."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import LlamaConfig, Qwen2_5_VLConfig, Qwen2VLConfig

from mrrope.serving.rope_settings import merged
from mrrope.serving.scale_choice import TABLE_KEY, ScaleSteps
from mrrope.sglang.request_scale import Admission

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
AUTO = {"rope_type": "mrrope_uni", "factor": "auto", "max_factor": 4}
STEPS = ScaleSteps((64, 128), (1.0, 2.0), reserve=8)


def admission(**more):
    return Admission(STEPS, 128, "tiny", is_auto=True, **more)


def tokenized(length=3, **params):
    params = SamplingParams(**{"max_new_tokens": 8} | params)
    return SimpleNamespace(
        sampling_params=params, input_ids=[1] * length, input_embeds=None, extra_key=None, rid="request"
    )


def test_beams_that_no_request_names_are_refused():
    """``--preferred-sampling-params`` of the server are in the tokenized request only."""
    with pytest.raises(ValueError, match="beam_width must be 1 with rope_parameters' factor 'auto', got 2"):
        admission().admit(tokenized(beam_width=2), GenerateReqInput(input_ids=[1, 2, 3], sampling_params={}))


def test_video_needs_a_scale_where_positions_advance_by_time():
    source = GenerateReqInput(input_ids=[1, 2, 3], sampling_params={}, video_data=["video"])
    admission().admit(tokenized(), source)
    admission(has_scaled_time=True).admit(tokenized(custom_params={"mrrope_scale": 2}), source)
    with pytest.raises(ValueError, match="mrrope_scale must be given for a request with video, got None"):
        admission(has_scaled_time=True).admit(tokenized(), source)


@pytest.mark.parametrize(("config", "expected"), [(Qwen2_5_VLConfig, True), (Qwen2VLConfig, False)])
def test_the_model_tells_how_positions_advance(config, expected):
    hf_config = config()
    text = hf_config.get_text_config()
    text.rope_parameters = merged(AUTO, PLAIN, 64)
    model_config = SimpleNamespace(hf_config=hf_config, hf_text_config=text)
    manager = SimpleNamespace(model_config=model_config, context_len=256, served_model_name="tiny")
    assert Admission.of(manager).has_scaled_time is expected


def test_storage_keeps_keys_of_different_tables_apart():
    """HiCache's storage finds keys of other engines, and of former runs, by these hashes."""
    requests = [tokenized(20, custom_params={"mrrope_scale": scale}) for scale in (1, 2)]
    for request in requests:
        admission().admit(request, GenerateReqInput(input_ids=request.input_ids, sampling_params={}))
    keys = [RadixKey(array("q", request.input_ids), extra_key=request.extra_key) for request in requests]
    pages = [get_storage_hash_str(key, page_size=4) for key in keys]
    assert not set(pages[0]) & set(pages[1])
    stock = RadixKey(array("q", [1] * 20))
    assert pages[0] == get_storage_hash_str(stock, page_size=4)


# The scheduler


def scheduler(given):
    """Return what SGLang's function reads of a scheduler."""
    text = LlamaConfig()
    text.rope_parameters = merged(given, PLAIN, 64)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, context_len=256),
        max_new_tokens_limit=None,
        max_req_len=255,
        max_total_num_tokens=1024,
        kv_shard_widening=1,
        page_size=1,
        sliding_window_size=None,
        chunked_prefill_size=64,
        token_to_kv_pool_allocator=SimpleNamespace(max_new_tokens_for_memory=lambda _, tokens, **__: tokens),
    )


class Request(SimpleNamespace):
    """A request of the scheduler, of which media have been expanded."""

    aborted = None

    def set_finish_with_abort(self, message):
        self.aborted = message
        self.origin_input_ids = array("q", [0])


def started(length, table, given=AUTO, **params):
    """Return a request as it enters the queue; tables reach 64, 128 and 256 tokens."""
    custom = {} if table is None else {TABLE_KEY: table}
    params = SamplingParams(**{"max_new_tokens": 40, "custom_params": custom} | params)
    request = Request(origin_input_ids=array("q", [1] * length), sampling_params=params)
    Scheduler.init_req_max_new_tokens(scheduler(given), request)
    return request


@pytest.mark.parametrize(
    ("length", "table", "new_tokens"),
    [(24, 0, 40), (25, 0, 39), (64, 0, 0), (100, 1, 28), (100, 2, 40), (250, 2, 4), (10, None, 40), (50, None, 14)],
)
def test_new_tokens_end_where_the_table_of_an_expanded_prompt_does(length, table, new_tokens):
    request = started(length, table, min_new_tokens=30)
    assert request.sampling_params.max_new_tokens == new_tokens
    assert request.sampling_params.min_new_tokens == min(30, new_tokens)
    assert request.aborted is None


@pytest.mark.parametrize(("length", "table"), [(65, 0), (129, 1)])
def test_a_prompt_that_outgrows_its_table_is_aborted(length, table):
    request = started(length, table)
    assert f"mrrope_scale must be given for a prompt that the scheduler expands to {length} tokens" in request.aborted
    assert request.sampling_params.max_new_tokens == 0


def test_a_fixed_factor_serves_up_to_the_context_length():
    request = started(200, None, {"rope_type": "pi", "factor": 4})
    assert request.sampling_params.max_new_tokens == 40
    assert request.aborted is None
