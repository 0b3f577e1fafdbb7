"""The hooks in the processes of a served model: its requests, its rope layers and its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrrope.sglang import model_runner, request_scale, rotary_embedding


def _targets() -> dict[str, tuple[Callable[..., Any], str]]:
    """Return the functions of SGLang that are hooked, with the hook and its type."""
    return {
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": (
            request_scale.admit_created,
            "after",
        ),
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__": (request_scale.announce, "after"),
        "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": (request_scale.keep_within_table, "after"),
        "sglang.srt.layers.rotary_embedding.factory.get_rope": (rotary_embedding.get_rope, "around"),
        "sglang.srt.models.utils.enable_fused_set_kv_buffer": (rotary_embedding.write_cache_apart, "replace"),
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (model_runner.load_model, "around"),
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (model_runner.note_tables, "after"),
    }


def install() -> None:
    """Install the hooks in this process, once.

    Raises:
        RuntimeError: SGLang could not apply a hook. It logs why, and would go on without.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    targets = _targets()
    if targets.keys() <= HookRegistry._patched:
        return
    for target, (hook, kind) in targets.items():
        HookRegistry.register(target, hook, HookType(kind), source=HookSource("mrrope", "mrrope"))
    HookRegistry.apply_hooks()
    if missing := sorted(targets.keys() - HookRegistry._patched):
        raise RuntimeError(f"mrrope's hooks must be applied to serve this model, got none on {', '.join(missing)}")
