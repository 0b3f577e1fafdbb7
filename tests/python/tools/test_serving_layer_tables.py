"""The rope layers that engines hand to attention modules: tables per layer and head, and factors of query heads."""

from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from transformers import HunYuanDenseV1Config, HunYuanVLTextConfig, Llama4TextConfig, LlamaConfig

from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.serving.layer_checks import require_fitting
from mrrope.serving.layer_tables import require_tables, with_tables_of_layer
from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.serving.rope_settings import merged

SIZE, BASE, NATIVE_LENGTH = 16, 10_000.0, 64
KEY_HEADS, QUERY_HEADS = 4, 8
FACTORS = [0.5, 1.0, 2.0, 3.0, 1.5, 0.75, 1.25, 0.3]
ALL_TOKENS = torch.arange(6) * 999


def table(scale: float, power: float) -> mrrope.FrequencyTable:
    settings = {"rotary_dim": SIZE, "base": BASE, "original_max_position": NATIVE_LENGTH}
    return mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings)


def heads(scale: float, factors: list[float] | None = FACTORS) -> mrrope.HeadTables:
    return mrrope.HeadTables((table(scale, 0.5 * head) for head in range(KEY_HEADS)), factors)


def one_for_all(scale: float) -> mrrope.HeadTables:
    return mrrope.HeadTables([table(scale, 1.5)], FACTORS[::-1])


def table_set(scale: float) -> mrrope.TableSet:
    return mrrope.TableSet([heads(scale), table(scale, 1.0), one_for_all(scale), heads(scale, None)])


def shared_layer(*tables: Any, **options: Any) -> ServedRotaryEmbedding:
    settings = {"head_size": SIZE, "max_position": 512, "is_neox_style": True, "dtype": torch.float32}
    return ServedRotaryEmbedding(Ladder(tables, tuple(64.0 * table.scale for table in tables)), **settings, **options)


def of_rank(shared: ServedRotaryEmbedding, layer: int, rank: int, ranks: int) -> ServedRotaryEmbedding:
    key_heads = max(1, KEY_HEADS // ranks)
    return with_tables_of_layer(shared, layer, key_heads, query_heads=QUERY_HEADS // ranks, rank=rank, ranks=ranks)


def rotated(x: torch.Tensor, positions: torch.Tensor, of_layer: Any, is_query: bool) -> torch.Tensor:
    """Return all heads of the model rotated by ``rotary``, head by head, and scaled apart."""
    parts = []
    for head in range(x.shape[1]):
        own = of_layer
        if isinstance(own, mrrope.HeadTables):
            own = own[0] if len(own) == 1 else own[head * KEY_HEADS // x.shape[1]]
        factor = of_layer.query_factors[head] if is_query and of_layer.query_factors is not None else 1.0
        parts.append(factor * mrrope.rotary(x[:, [head]], None, positions, own, layout="thd")[0])
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layer", range(4))
def test_ranks_have_the_factors_of_their_query_heads(layer: int, ranks: int, is_compiled: bool) -> None:
    shared = shared_layer(table_set(4.0))
    assert shared.tables is None
    of_layer = table_set(4.0)[layer]
    q, k = torch.randn(6, QUERY_HEADS, SIZE), torch.randn(6, KEY_HEADS, SIZE)
    want_q, want_k = rotated(q, ALL_TOKENS, of_layer, True), rotated(k, ALL_TOKENS, of_layer, False)
    shapes = set()
    for rank in range(ranks):
        rope = of_rank(shared, layer, rank, ranks)
        shapes |= {of_rank(shared, other, rank, ranks).tables.shape for other in range(4)}
        own_q = slice(rank * QUERY_HEADS // ranks, (rank + 1) * QUERY_HEADS // ranks)
        first = rank * KEY_HEADS // ranks
        own_k = slice(first, first + max(1, KEY_HEADS // ranks))
        call = torch.compile(rope, backend="eager", fullgraph=True) if is_compiled and rank == 0 else rope
        got_q, got_k = call(ALL_TOKENS, q[:, own_q].flatten(1).clone(), k[:, own_k].flatten(1).clone())
        torch.testing.assert_close(got_q.view(6, -1, SIZE), want_q[:, own_q])
        torch.testing.assert_close(got_k.view(6, -1, SIZE), want_k[:, own_k])
    assert len(shapes) == 1, "one graph serves all layers"
    torch._dynamo.reset()


def test_every_token_has_the_factors_of_its_table() -> None:
    steps = (table(1.0, 0.0), one_for_all(2.0), heads(4.0), heads(8.0, None))
    rope = of_rank(shared_layer(*steps), 5, 0, 1)
    rope.table_index = torch.tensor([2, 0, 1, 3, 1, 2], dtype=torch.int32)
    q, k = torch.randn(6, QUERY_HEADS, SIZE), torch.randn(6, KEY_HEADS, SIZE)
    got_q, got_k = rope(ALL_TOKENS, q.clone(), k.clone())
    for token, number in enumerate(rope.table_index.tolist()):
        at = slice(token, token + 1)
        torch.testing.assert_close(got_q[at], rotated(q[at], ALL_TOKENS[at], steps[number], True))
        torch.testing.assert_close(got_k[at], rotated(k[at], ALL_TOKENS[at], steps[number], False))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rows_of_positions_come_before_factors(is_interleaved: bool) -> None:
    steps, options = (table(1.0, 0.0), heads(2.0)), {"mrope_section": [4, 2, 2], "mrope_interleaved": is_interleaved}
    with_factors = of_rank(shared_layer(*steps, **options), 0, 0, 1)
    without = of_rank(shared_layer(steps[0], heads(2.0, None), **options), 0, 0, 1)
    assert with_factors.tables.shape == (2, 3, KEY_HEADS, 9)
    q, k, positions = torch.randn(6, QUERY_HEADS, SIZE), torch.randn(6, KEY_HEADS, SIZE), torch.randint(999, (3, 6))
    for rope in (with_factors, without):
        rope.table_index = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32)
    got_q, got_k = with_factors(positions, q.clone(), k.clone())
    want_q, want_k = without(positions, q.clone(), k.clone())
    of_tokens = torch.tensor([[1.0] * QUERY_HEADS, FACTORS])[with_factors.table_index.long()][..., None]
    torch.testing.assert_close(got_q, want_q * of_tokens)
    assert torch.equal(got_k, want_k)


def test_a_query_with_other_heads_is_refused() -> None:
    rope = of_rank(shared_layer(heads(4.0)), 0, 0, 1)
    with pytest.raises(ValueError, match="query must have 8 heads, one for each of the table's query_factors, got 4"):
        rope(ALL_TOKENS, torch.randn(6, KEY_HEADS, SIZE), torch.randn(6, KEY_HEADS, SIZE))


def test_factors_for_another_number_of_query_heads_are_refused() -> None:
    for tables in (heads(4.0), one_for_all(4.0), table_set(4.0)):
        with pytest.raises(ValueError, match="of layer 0, of which rank 1 of 2 has 8, got factors for 8 in"):
            with_tables_of_layer(shared_layer(tables), 0, KEY_HEADS // 2, query_heads=8, rank=1, ranks=2)


def test_factors_need_the_attention_of_one_layer() -> None:
    rope = shared_layer(one_for_all(4.0))
    with pytest.raises(ValueError, match=r"table must be one for all layers and heads of Sequential.*query_factors"):
        require_tables(torch.nn.Sequential(rope))
    for layer in (rope, of_rank(rope, 0, 0, 1)):
        with pytest.raises(NotImplementedError, match=r"cos_sin_cache holds one table, and this layer has HeadTables"):
            layer.cos_sin_cache  # noqa: B018


def request(tables: Any, native: dict[str, Any]) -> dict[str, Any]:
    return merged({"rope_type": "mrrope", "table": tables.to_dict()}, native, NATIVE_LENGTH)


def test_a_configuration_that_factors_do_not_fit() -> None:
    native = {"rope_type": "default", "rope_theta": BASE}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": QUERY_HEADS, "num_key_value_heads": KEY_HEADS}
    require_fitting(request(table_set(4.0), native), LlamaConfig(**sizes))
    for tables in (table_set(4.0), one_for_all(4.0)):
        with pytest.raises(ValueError, match="query_factors for the 16 query heads of llama in layer 0, got 8"):
            require_fitting(request(tables, native), LlamaConfig(**sizes | {"num_attention_heads": 16}))
    for hunyuan in (HunYuanDenseV1Config(**sizes), HunYuanVLTextConfig(**sizes)):
        with pytest.raises(ValueError, match=f"no query_factors for {hunyuan.model_type}, which norms rotated queries"):
            require_fitting(request(one_for_all(4.0), native), hunyuan)
        require_fitting(request(heads(4.0, None), native), hunyuan)
    require_fitting(request(one_for_all(4.0), native), Llama4TextConfig(**sizes, use_qk_norm=False))
    with pytest.raises(ValueError, match="no query_factors for llama4_text"):
        require_fitting(request(one_for_all(4.0), native), Llama4TextConfig(**sizes))
