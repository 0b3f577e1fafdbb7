"""Tables per layer and head of a tensor-parallel rank: SGLang's Llama rotates its heads by those of the model."""

import pytest
import torch
from rotary_reference import assert_rotated
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.runtime_context import get_parallel
from torch import nn
from transformers import LlamaConfig

import mrrope
from mrrope.serving.rope_settings import merged
from mrrope.sglang.layer_tables import give_tables_of_layers

HEADS, LAYERS, SIZE, BASE, NATIVE_LENGTH = 8, 2, 16, 10_000.0, 64


def table(power):
    return mrrope.frequency_table(
        "mrrope_pow", rotary_dim=SIZE, base=BASE, original_max_position=NATIVE_LENGTH, scale=4.0, power=power
    )


def attention_layers(tables, key_heads):
    """Return the attention layers that SGLang's Llama has on this rank."""
    config = LlamaConfig(
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_key_value_heads=key_heads, head_dim=SIZE
    )
    rope = merged(
        {"rope_type": "mrrope", "table": tables.to_dict()}, {"rope_type": "default", "rope_theta": BASE}, NATIVE_LENGTH
    )
    return nn.ModuleList(
        LlamaAttention(config, HEADS * SIZE, HEADS, key_heads, layer, rope_theta=BASE, rope_scaling=rope)
        for layer in range(LAYERS)
    )


@pytest.mark.parametrize(("key_heads", "ranks"), [(4, 2), (2, 4), (1, 2)])
def test_a_rank_has_the_tables_of_its_heads(key_heads, ranks):
    rows = [[table(0.3 * head + layer) for head in range(key_heads)] for layer in range(LAYERS)]
    factors = [2.0**head for head in range(HEADS)]  # exact, so that a product is rounded as before
    tables = mrrope.TableSet([mrrope.HeadTables(rows[0], factors), mrrope.HeadTables(rows[1])])
    for rank in range(ranks):
        with get_parallel().override(tp_size=ranks, tp_rank=rank, attn_tp_size=ranks, attn_tp_rank=rank):
            model = attention_layers(tables, key_heads)
            give_tables_of_layers(model)
        heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        for layer, own in enumerate(model):
            of_layer = factors if layer == 0 else [1.0] * HEADS
            assert_rotates_by(own.rotary_emb, rows[layer], of_layer, heads, HEADS // key_heads)


def assert_rotates_by(rope, tables, factors, heads, group):
    """Assert that the query heads of a rank, and their key heads, rotate by the tables of these key heads.

    Query heads are also multiplied by their factors.
    """
    key_heads = sorted({head // group for head in heads})
    generator = torch.Generator().manual_seed(len(heads))
    q, k = (torch.randn(7, len(kind), SIZE, generator=generator) for kind in (heads, key_heads))
    positions = torch.randint(2**20, (7,), generator=generator)
    found_q, found_k = rope(positions, q.clone(), k.clone())
    for i, head in enumerate(heads):
        assert_rotated(found_q[:, [i]], q[:, [i]] * factors[head], positions, tables[head // group], "thd")
    for i, head in enumerate(key_heads):
        assert_rotated(found_k[:, [i]], k[:, [i]], positions, tables[head], "thd")


def test_another_number_of_key_heads_than_the_model_has_is_refused():
    tables = mrrope.TableSet([mrrope.HeadTables([table(0.5), table(1.5)])] * LAYERS)
    with get_parallel().override(tp_size=2, tp_rank=1, attn_tp_size=2, attn_tp_rank=1):
        model = attention_layers(tables, key_heads=4)
        with pytest.raises(ValueError, match="of which rank 1 of 2 has 2, got tables for 2 in all"):
            give_tables_of_layers(model)
