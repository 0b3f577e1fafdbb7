"""In the schedulers: what a model runner does when it loads a served model, and before each of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrrope.serving.rope_settings import served_rope
from mrrope.serving.scale_choice import TABLE_KEY
from mrrope.serving.token_tables import TokenTables, attach
from mrrope.sglang.layer_tables import give_tables_of_layers
from mrrope.sglang.rotary_embedding import LOADED_MODEL, require_served


def load_model(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Load a model, and let a served one fill the tables of a step before each forward."""
    if served_rope(runner.model_config.hf_text_config) is None:
        original(runner, *args, **kwargs)
        return
    token = LOADED_MODEL.set(runner.model_config)
    try:
        original(runner, *args, **kwargs)
    finally:
        LOADED_MODEL.reset(token)
        require_own_implementation(runner.model_config)  # transformers fails, too, but names no reason
    require_served(runner.model)
    with torch.device(runner.device):
        give_tables_of_layers(runner.model)
    runner.mrrope_tables = attach(runner.model, _max_step_tokens(runner), torch.device(runner.device))
    if runner.mrrope_tables is not None:
        _fill_before_forward(runner.model, runner.mrrope_tables)


def require_own_implementation(model_config: Any) -> None:
    """Raise ValueError for a model that SGLang has no implementation of, and loads by that of transformers."""
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    if (found := get_resolved_model_impl(model_config)) != ModelImpl.SGLANG:
        raise ValueError(
            "rope_parameters of mrrope must be served by an implementation of SGLang, got "
            f"{', '.join(model_config.hf_config.architectures or ())} with model_impl {found.value!r}: that backend "
            "rotates by the model's own code"
        )


def _max_step_tokens(runner: Any) -> int:
    """Return an upper bound of the tokens of a step: a budget of prompts, of which the last may exceed it."""
    from sglang.srt.arg_groups.overrides import resolving_view

    options = resolving_view(runner.server_args)
    prompts: int = options.max_prefill_tokens + runner.model_config.context_len
    return max(prompts, options.chunked_prefill_size or 0)


def _fill_before_forward(model: Any, tables: TokenTables) -> None:
    """Fill the tables where SGLang lets a model prepare a step, on the stream and before the graph that runs it."""
    own = getattr(model, "prepare_for_forward", None)

    def prepare_for_forward(forward_batch: Any) -> None:
        if own is not None:
            own(forward_batch)
        # Batches that only capture a graph have none: any table will do.
        if (of_step := getattr(forward_batch, "mrrope_tables", None)) is not None:
            tables.fill(*of_step)

    model.prepare_for_forward = prepare_for_forward


def note_tables(forward_batch: Any, cls: type, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Note the tables of a step. Called after ``ForwardBatch.init_new``; the step may run after that of another."""
    if getattr(runner, "mrrope_tables", None) is None:
        return
    is_decode = batch.forward_mode.is_decode_or_idle()
    tokens = np.array([1] * len(batch.reqs) if is_decode else batch.extend_lens, dtype=np.int32)
    forward_batch.mrrope_tables = [_table_of(request) for request in batch.reqs], tokens


def _table_of(request: Any) -> int:
    # Warm-up steps of the scheduler have requests that no front end admitted; any table will do.
    custom = request.sampling_params.custom_params or {}
    table: int = custom.get(TABLE_KEY, 0)
    return table
