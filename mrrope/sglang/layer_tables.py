"""Tables per layer and head in SGLang's models: every attention module gets a rope layer of its own."""

from __future__ import annotations

from torch import nn

from mrrope.serving.layer_tables import require_tables, with_tables_of_layer
from mrrope.serving.rope_layer import ServedRotaryEmbedding


def give_tables_of_layers(model: nn.Module) -> None:
    """Replace the rope layer of all layers by those of each, in a loaded model.

    Raises:
        ValueError: A rope layer belongs to no attention of one layer, or there are no tables for its layer.
    """
    for module in model.modules():
        for name, rope in list(module._modules.items()):
            if isinstance(rope, ServedRotaryEmbedding) and rope.tables is None:
                _replace(module, name, rope)
    require_tables(model)


def _replace(module: nn.Module, name: str, rope: ServedRotaryEmbedding) -> None:
    """Give a module with one attention the tables of its layer."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_parallel

    attention = [child for child in module.children() if isinstance(child, RadixAttention)]
    if len(attention) != 1:
        return
    # Counted in the whole model; layers without keys of their own have the number of those whose keys they attend to.
    layer, key_heads, query_heads = attention[0].layer_id, attention[0].tp_k_head_num, attention[0].tp_q_head_num
    rank, ranks = get_parallel().attn_tp_rank, get_parallel().attn_tp_size
    own = with_tables_of_layer(rope, layer, key_heads, query_heads=query_heads, rank=rank, ranks=ranks)
    setattr(module, name, own)
