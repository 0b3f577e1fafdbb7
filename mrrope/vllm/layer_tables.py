"""Tables per layer and head in vLLM's models: every attention module gets a rope layer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mrrope.serving.layer_tables import require_tables, with_tables_of_layer
from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.vllm import hooks


def with_tables_of_layers(initialize_model: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Build a model, and replace the rope layer of all layers before any graph is compiled."""
    model = initialize_model(*args, **kwargs)
    for module in model.modules():
        for name, rope in list(module._modules.items()):
            if isinstance(rope, ServedRotaryEmbedding) and rope.tables is None:
                _replace(module, name, rope)
    require_tables(model)
    return model


def _replace(module: nn.Module, name: str, rope: ServedRotaryEmbedding) -> None:
    """Give a module with one attention the tables of its layer."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    attention = [child for child in module.children() if isinstance(child, Attention)]
    if len(attention) != 1:
        return
    # Queries rotate as the keys that they meet: layers without keys of their own take the tables of the keys' layer.
    layer = extract_layer_index(attention[0].kv_sharing_target_layer_name or attention[0].layer_name)
    key_heads, query_heads = attention[0].num_kv_heads, attention[0].num_heads
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    own = with_tables_of_layer(rope, layer, key_heads, query_heads=query_heads, rank=rank, ranks=ranks)
    setattr(module, name, own)


def install() -> None:
    """Hook vLLM's loader of models."""
    import vllm.model_executor.model_loader.utils as loading

    hooks.wrap_everywhere(loading, "initialize_model", with_tables_of_layers)
