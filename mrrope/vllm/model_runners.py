"""In the workers: what a model runner does when it loads a served model, and before each of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mrrope.serving.rope_layer import served_layers
from mrrope.serving.rope_settings import served_rope
from mrrope.serving.scale_choice import TABLE_KEY
from mrrope.serving.token_tables import TokenTables, attach
from mrrope.vllm.compatibility import shares_checkpoint
from mrrope.vllm.growth import update_resumed
from mrrope.vllm.hooks import when_imported, where_served, wrap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput


def require_served(model: torch.nn.Module) -> None:
    """Raise ValueError where an attention layer of the text model does not rotate by one of mrrope's layers.

    Vision towers have attention layers of another class, and layers with a sliding window keep the model's own RoPE.
    """
    from vllm.model_executor.layers import rotary_embedding as stock
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    sees_all = False
    for name, module in model.named_modules():
        children = list(module.children())
        attention = [child for child in children if isinstance(child, (Attention, MLAAttention))]
        if not any(getattr(layer, "sliding_window", None) is None for layer in attention):
            continue
        sees_all = True
        for rope in children:
            if type(rope).__module__.startswith(stock.__name__):
                raise ValueError(
                    f"rope_parameters must be honoured by the model's implementation in vLLM, but {name} of "
                    f"{type(model).__name__} rotates by {type(rope).__name__}: it cannot be served with mrrope"
                )
    # A pipeline rank may hold no layer that sees the whole text.
    if sees_all and next(iter(served_layers(model)), None) is None:
        raise ValueError(
            f"rope_parameters must be honoured by the model's implementation in vLLM, but {type(model).__name__} holds "
            "no rotary embedding of mrrope: it cannot be served with mrrope"
        )


def _table_of(sampling_params: SamplingParams | None) -> int:
    # Warm-up steps of the V2 runner schedule requests that no engine admitted; any table will do.
    extra_args = (sampling_params.extra_args if sampling_params else None) or {}
    table: int = extra_args.get(TABLE_KEY, 0)
    return table


def attach_to_runner(original: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Load a model. Hooked in the worker: runners of vLLM's other platforms have a load_model of their own."""
    original(worker, *args, **kwargs)
    runner = worker.model_runner
    if served_rope(runner.model_config.hf_config) is None:
        return
    model = runner.get_model()
    require_served(model)
    drafter = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    if shares_checkpoint(worker.vllm_config) and isinstance(drafter, torch.nn.Module):
        require_served(drafter)
    runner.mrrope_tables = attach(model, runner.max_num_tokens, runner.device)
    # V2 runner: the table of each slot of its request states. Slots are reused, so there is nothing to free.
    runner.mrrope_slots = np.zeros(runner.max_num_reqs, dtype=np.int32)


def _add_requests(original: Any, runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Note the tables of new requests. The V2 runner adds preempted requests anew when they resume."""
    original(runner, scheduler_output)
    if _tables_of_runner(runner) is not None:
        for request in scheduler_output.scheduled_new_reqs:
            slot = runner.req_states.req_id_to_index[request.req_id]
            runner.mrrope_slots[slot] = _table_of(request.sampling_params)


def _prepare_inputs_v2(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(runner, *args, **kwargs)
    if (tables := _tables_of_runner(runner)) is not None:
        tables.fill(runner.mrrope_slots[batch.idx_mapping_np], batch.num_scheduled_tokens)
    return batch


def _prepare_inputs_v1(
    original: Any,
    runner: Any,
    scheduler_output: SchedulerOutput,
    num_scheduled_tokens: npt.NDArray[np.int32],
    *args: Any,
    **kwargs: Any,
) -> Any:
    prepared = original(runner, scheduler_output, num_scheduled_tokens, *args, **kwargs)
    if (tables := _tables_of_runner(runner)) is not None:
        update_resumed(runner, scheduler_output)
        # runner.requests outlives preemption.
        of_requests = [_table_of(runner.requests[request].sampling_params) for request in runner.input_batch.req_ids]
        tables.fill(of_requests, num_scheduled_tokens)
    return prepared


def _tables_of_runner(runner: Any) -> TokenTables | None:
    """Return the tables of a step; None for runners of other models, which never pass the hook in ``load_model``."""
    tables: TokenTables | None = getattr(runner, "mrrope_tables", None)
    return tables


def _config_of(worker: Any, *args: Any, **kwargs: Any) -> Any:
    return worker.vllm_config


def _hook_worker(module: Any) -> None:
    wrap(module.Worker, "load_model", where_served(_config_of, __name__, "attach_to_runner"))


def _hook_runner_v1(module: Any) -> None:
    wrap(module.GPUModelRunner, "_prepare_inputs", _prepare_inputs_v1)


def _hook_runner_v2(module: Any) -> None:
    wrap(module.GPUModelRunner, "add_requests", _add_requests)
    wrap(module.GPUModelRunner, "prepare_inputs", _prepare_inputs_v2)


def install() -> None:
    """Hook the workers and both model runners, when this process imports them: not every platform has both."""
    when_imported("vllm.v1.worker.gpu_worker", _hook_worker)
    when_imported("vllm.v1.worker.gpu_model_runner", _hook_runner_v1)
    when_imported("vllm.v1.worker.gpu.model_runner", _hook_runner_v2)
