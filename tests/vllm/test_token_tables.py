"""Table of every token in the workers: the buffer, the hooks of both runners, and the check of a loaded model."""

import inspect
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running_version import VERSION
from tiny_engine import AUTO, engine_config
from torch import nn
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch as InputBatchV2
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_input_batch import InputBatch as InputBatchV1
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from mrrope.serving.rope_layer import served_layers
from mrrope.serving.token_tables import TokenTables, attach
from mrrope.vllm import model_runners
from mrrope.vllm.hooks import WRAPPED, where_served
from mrrope.vllm.model_runners import require_served
from mrrope.vllm.request_scale import TABLE_KEY

CPU = torch.device("cpu")
FIXED = {"rope_type": "mrrope_pro", "factor": 4.0}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
}


def build(rope_parameters: dict[str, Any] | None, config: dict[str, Any] | None = None) -> tuple[Any, nn.Module]:
    """Return a configuration and its model, built by vLLM's loader without weights."""
    with tempfile.TemporaryDirectory() as folder:
        vllm_config = engine_config(Path(folder), rope_parameters, config=config or {})
        with set_current_vllm_config(vllm_config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
                initialize_model_parallel(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            try:
                return vllm_config, initialize_model(vllm_config=vllm_config)
            finally:
                torch.set_default_dtype(torch.float32)


def stock_rope(config: Any) -> nn.Module:
    with set_current_vllm_config(config):
        return get_rope(16, 64, dtype=torch.float32)


@pytest.fixture(scope="module")
def auto() -> tuple[Any, nn.Module]:
    return build(AUTO)


class TestTokenTables:
    def test_fills_tables_of_tokens_in_batch_order(self) -> None:
        tables = TokenTables(16, CPU)
        tables.fill([2, 0, 3], np.array([1, 2, 4], dtype=np.int32))
        assert tables.index.tolist() == [2, 0, 0, 3, 3, 3, 3] + 9 * [0]
        assert tables.index.dtype == torch.int32

    def test_every_fill_is_right_after_any_other(self) -> None:
        draw = np.random.default_rng(0)
        tables, address = TokenTables(64, CPU), None
        for _ in range(200):
            requests = int(draw.integers(1, 9))
            counts = draw.integers(1, 9, requests).astype(np.int32)
            # Often uniform, so that fills are skipped and must not be.
            of_requests = draw.integers(0, draw.integers(1, 4), requests).tolist()
            tables.fill(of_requests, counts)
            expected = [table for table, count in zip(of_requests, counts, strict=True) for _ in range(count)]
            assert tables.index[: len(expected)].tolist() == expected
            assert int(tables.index.max()) < 4
            address = address or tables.index.data_ptr()
            assert tables.index.data_ptr() == address

    def test_a_repeated_step_copies_nothing(self) -> None:
        tables = TokenTables(8, CPU)
        tables.fill([1, 2], np.array([1, 1], dtype=np.int32))
        version = tables.index._version
        tables.fill([1, 2], np.array([1, 1], dtype=np.int32))
        tables.fill([1], np.array([1], dtype=np.int32))
        assert tables.index._version == version
        tables.fill([2, 1], np.array([1, 1], dtype=np.int32))
        assert tables.index._version > version
        assert tables.index[:2].tolist() == [2, 1]


class TestAttach:
    def test_all_layers_share_one_buffer(self, auto: tuple[Any, nn.Module]) -> None:
        _, model = auto
        tables = attach(model, 32, CPU)
        layers = list(served_layers(model))
        assert layers
        assert all(layer.table_index is tables.index for layer in layers)
        # Sleep mode saves and restores buffers only.
        assert any(buffer is tables.index for _, buffer in model.named_buffers())
        assert not any("table_index" in name for name in model.state_dict())

    @pytest.mark.parametrize("rope_parameters", [FIXED, None])
    def test_one_table_needs_no_buffer(self, rope_parameters: dict[str, Any] | None) -> None:
        _, model = build(rope_parameters)
        assert attach(model, 32, CPU) is None
        assert all(layer.table_index is None for layer in served_layers(model))

    def test_layers_of_different_lengths_are_refused(self) -> None:
        _, first = build(AUTO)
        _, second = build({**AUTO, "max_factor": 4})
        with pytest.raises(ValueError, match="tables of the same lengths"):
            attach(nn.ModuleList([first, second]), 32, CPU)


class TestRequireServed:
    def test_served_model_passes(self, auto: tuple[Any, nn.Module]) -> None:
        require_served(auto[1])

    def test_model_that_ignores_rope_parameters_is_refused(self) -> None:
        _, model = build(None)
        with pytest.raises(ValueError, match=r"layers.0.self_attn of LlamaForCausalLM rotates by RotaryEmbedding"):
            require_served(model)

    def test_one_layer_that_ignores_them_is_refused(self) -> None:
        config, model = build(AUTO)
        model.model.layers[1].self_attn.rotary_emb = stock_rope(config)
        with pytest.raises(ValueError, match=r"layers.1.self_attn"):
            require_served(model)

    def test_rope_outside_vllm_is_refused(self) -> None:
        _, model = build(None)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = nn.Identity()
        with pytest.raises(ValueError, match="holds no rotary embedding of mrrope"):
            require_served(model)

    def test_stock_rope_of_a_sliding_window_passes(self) -> None:
        _, model = build(AUTO, GEMMA)
        local, seeing_all = (layer.self_attn for layer in model.model.layers)
        assert type(local.rotary_emb).__module__.startswith("vllm.")
        assert list(served_layers(model)) == [seeing_all.rotary_emb]
        require_served(model)

    def test_stock_rope_of_a_vision_tower_passes(self) -> None:
        config, model = build(AUTO)
        model.visual = nn.Module()
        model.visual.rotary_pos_emb = stock_rope(config)
        require_served(model)

    def test_layer_without_rope_passes(self) -> None:
        _, model = build(AUTO)
        model.model.layers[1].self_attn.rotary_emb = None
        require_served(model)

    def test_pipeline_rank_without_attention_passes(self) -> None:
        _, model = build(AUTO)
        model.model.layers[0] = model.model.layers[1] = PPMissingLayer()
        require_served(model)


def loaded_runner(config: Any, model: nn.Module) -> Any:
    """A runner, as far as its hooks see it, after load_model; a whole one needs CUDA."""
    runner = SimpleNamespace(model_config=config.model_config, max_num_tokens=64, max_num_reqs=4, device=CPU)
    runner.get_model = lambda: model
    worker = SimpleNamespace(vllm_config=config, model_runner=runner)
    calls = []
    around = where_served(model_runners._config_of, model_runners.__name__, "attach_to_runner")
    around(lambda *args, **kwargs: calls.append((args, kwargs)), worker, load_dummy_weights=True)
    assert calls == [((worker,), {"load_dummy_weights": True})]
    return runner


def new_request(name: str, table: int | None) -> NewRequestData:
    params = SamplingParams(extra_args=None if table is None else {TABLE_KEY: table})
    return NewRequestData(name, [1, 2], [], params, None, ([0],), 0, None, prefill_token_ids=[1, 2])


class TestLoadHook:
    def test_model_with_stock_rope_has_no_tables(self) -> None:
        assert not hasattr(loaded_runner(*build(None)), "mrrope_tables")

    def test_fixed_factor_has_no_tables(self) -> None:
        assert loaded_runner(*build(FIXED)).mrrope_tables is None

    def test_auto_has_tables(self, auto: tuple[Any, nn.Module]) -> None:
        runner = loaded_runner(*auto)
        assert next(served_layers(auto[1])).table_index is runner.mrrope_tables.index

    def test_ignored_request_is_refused(self, auto: tuple[Any, nn.Module]) -> None:
        with pytest.raises(ValueError, match="cannot be served with mrrope"):
            loaded_runner(auto[0], build(None)[1])


class TestRunnerV2:
    """Slots of requests are given out as RequestState does, which itself needs CUDA."""

    @staticmethod
    def add(runner: Any, *requests: NewRequestData) -> None:
        def original(runner: Any, output: SchedulerOutput) -> None:
            for request in output.scheduled_new_reqs:
                taken = runner.req_states.req_id_to_index
                taken[request.req_id] = min(set(range(runner.max_num_reqs)) - set(taken.values()))

        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = list(requests)
        model_runners._add_requests(original, runner, output)

    @staticmethod
    def step(runner: Any, **num_tokens: int) -> list[int]:
        buffers = InputBuffers(4, 64, CPU)
        batch = InputBatchV2.make_dummy(len(num_tokens), sum(num_tokens.values()), buffers)
        batch.req_ids = sorted(num_tokens, key=num_tokens.get)  # type: ignore[arg-type]
        batch.num_scheduled_tokens = np.array([num_tokens[name] for name in batch.req_ids], dtype=np.int32)
        slots = [runner.req_states.req_id_to_index[name] for name in batch.req_ids]
        batch.idx_mapping_np = np.array(slots, dtype=np.int32)
        assert model_runners._prepare_inputs_v2(lambda *args: batch, runner, "output", "descriptor") is batch
        tables: list[int] = runner.mrrope_tables.index[: batch.num_tokens].tolist()
        return tables

    @pytest.fixture
    def runner(self, auto: tuple[Any, nn.Module]) -> Any:
        runner = loaded_runner(*auto)
        runner.req_states = SimpleNamespace(req_id_to_index={})
        return runner

    def test_tokens_get_the_tables_of_their_requests(self, runner: Any) -> None:
        self.add(runner, new_request("a", 2), new_request("b", 0), new_request("c", 4))
        assert self.step(runner, a=5, b=1, c=3) == [0, 4, 4, 4, 2, 2, 2, 2, 2]
        assert self.step(runner, a=1, b=1, c=1) == [2, 0, 4]
        assert self.step(runner, c=2) == [4, 4]

    def test_a_freed_slot_has_no_memory(self, runner: Any) -> None:
        self.add(runner, new_request("a", 3), new_request("b", 1))
        del runner.req_states.req_id_to_index["a"]
        # Warm-up requests, and requests at the native scale, in the slot of a finished one.
        self.add(runner, new_request("warm_up", None))
        assert self.step(runner, warm_up=2, b=1) == [1, 0, 0]

    def test_a_resumed_request_keeps_its_table_in_another_slot(self, runner: Any) -> None:
        self.add(runner, new_request("a", 3), new_request("b", 1))
        del runner.req_states.req_id_to_index["a"]
        self.add(runner, new_request("c", 2))
        self.add(runner, new_request("a", 3))
        assert runner.req_states.req_id_to_index["a"] == 2
        assert self.step(runner, a=1, b=1, c=1) == [3, 1, 2]

    def test_other_models_are_left_alone(self) -> None:
        # Runners that were loaded without the hook, as another platform's may be.
        runner = SimpleNamespace()
        assert model_runners._prepare_inputs_v2(lambda *args: "batch", runner, "output", "descriptor") == "batch"
        model_runners._add_requests(lambda *args: None, runner, SchedulerOutput.make_empty())
        counts = np.array([1], dtype=np.int32)
        assert model_runners._prepare_inputs_v1(lambda *args: args, runner, "output", counts)[1] == "output"


def unpinned(factory: Any) -> Any:
    return lambda *args, pin_memory=False, **options: factory(*args, **options)


class TestRunnerV1:
    @pytest.fixture
    def runner(self, auto: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch) -> Any:
        if not torch.cuda.is_available():  # and so no memory to pin
            for name in ("zeros", "ones", "empty"):
                monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
        runner = loaded_runner(*auto)
        runner.requests = {}
        last = {"max_num_blocks_per_req": [4]} if VERSION >= (0, 32) else {"kernel_block_sizes": [16]}
        runner.input_batch = InputBatchV1(4, 64, 64, CPU, 128, block_sizes=[16], **last)
        return runner

    @staticmethod
    def add(runner: Any, name: str, table: int) -> None:
        data = new_request(name, table)
        runner.requests[name] = CachedRequestState(
            name, data.prompt_token_ids, [], data.sampling_params, None, data.block_ids, 0, []
        )
        runner.input_batch.add_request(runner.requests[name])

    @staticmethod
    def step(runner: Any, **num_tokens: int) -> list[int]:
        counts = np.array([num_tokens[name] for name in runner.input_batch.req_ids], dtype=np.int32)
        given = SchedulerOutput.make_empty()
        passed = model_runners._prepare_inputs_v1(lambda *args: args, runner, given, counts)
        assert passed == (runner, given, counts)
        tables: list[int] = runner.mrrope_tables.index[: counts.sum()].tolist()
        return tables

    def test_follows_the_order_of_the_batch(self, runner: Any) -> None:
        for name, table in [("a", 2), ("b", 0), ("c", 4)]:
            self.add(runner, name, table)
        assert self.step(runner, a=2, b=1, c=3) == [2, 2, 0, 4, 4, 4]
        runner.input_batch.swap_states(0, 2)
        assert self.step(runner, a=2, b=1, c=3) == [4, 4, 4, 0, 2, 2]

    def test_preempted_request_keeps_its_table(self, runner: Any) -> None:
        for name, table in [("a", 2), ("b", 1), ("c", 4)]:
            self.add(runner, name, table)
        runner.input_batch.remove_request("a")
        runner.input_batch.condense()
        assert self.step(runner, b=1, c=1) == [4, 1]
        runner.input_batch.add_request(runner.requests["a"])
        assert self.step(runner, a=3, b=1, c=1) == [4, 1, 2, 2, 2]


def test_hooks_fit_the_functions_they_wrap() -> None:
    model_runners.install()
    model_runners.install()  # every worker of a process does
    # test_plugin.py has their parameters.
    for owner, name in [
        (RunnerV2, "add_requests"),
        (RunnerV2, "prepare_inputs"),
        (Worker, "load_model"),
        (RunnerV1, "_prepare_inputs"),
    ]:
        assert not hasattr(getattr(getattr(owner, name), WRAPPED), WRAPPED)
    assert hasattr(WorkerBase.__init__, WRAPPED)
    # What the hooks read of the runners.
    assert {"idx_mapping_np", "num_scheduled_tokens"} <= set(inspect.get_annotations(InputBatchV2))
    assert "self.req_states.req_id_to_index[" in inspect.getsource(RunnerV2)
    assert re.search(
        r"input_batch = self\.prepare_inputs\(\s*scheduler_output,", inspect.getsource(RunnerV2.execute_model)
    )
