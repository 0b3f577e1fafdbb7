"""Rotation and cache write in one op: vLLM's own attention layers and compiler, on the CPU."""

from contextlib import nullcontext
from unittest import mock

import compiled_models
import pytest
import torch
from rotary_reference import assert_rotated
from running_version import VERSION
from torch import nn
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backends import flash_attn

import mrrope
from mrrope.serving.layer_tables import with_tables_of_layer
from mrrope.serving.rope_settings import merged
from mrrope.vllm import cache_fusion

LAYER = "layers.0.attn"
LENGTH, HEADS, KV_HEADS, HEAD_SIZE = 128, 4, 2, 64
Q_SIZE, KV_SIZE = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
BLOCKS, BLOCK_SIZE, MAX_TOKENS = 6, 16, 64
UNWRITTEN = 7.0


class Block(nn.Module):
    """The attention of a Llama: projection, rotation, attention."""

    normed = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(32, Q_SIZE + 2 * KV_SIZE, bias=False)
        own = {"rope_type": "default", "rope_theta": 1e4}
        parameters = merged({"rope_type": "mrrope_pro", "factor": "auto"}, own, LENGTH)
        self.rotary_emb = get_rope(HEAD_SIZE, LENGTH, rope_parameters=parameters)
        self.rotary_emb.table_index = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.norm = RMSNorm(HEAD_SIZE)
        self.attn = Attention(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, num_kv_heads=KV_HEADS, prefix=LAYER)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        if self.normed:
            q, k = (self.norm(part.unflatten(-1, (-1, HEAD_SIZE))).view(part.shape) for part in (q, k))
        q, k = self.rotary_emb(positions, q, k)
        return self.attention(q, k, v)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attn(q, k, v)


class NormedBlock(Block):
    normed = True


class BlockWithTablesOfHeads(Block):
    """Each key head has tables of its own, after the model's own, and query heads have factors in one of them."""

    def __init__(self) -> None:
        super().__init__()
        settings = {"rotary_dim": HEAD_SIZE, "base": 1e4, "original_max_position": LENGTH}
        steps = [
            mrrope.HeadTables(
                [mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings) for power in (0.0, 3.0)],
                query_factors,
            )
            for scale, query_factors in ((2.0, None), (4.0, [1.0, 2.0, 0.5, 4.0]))
        ]
        request = {"rope_type": "mrrope", "table": [step.to_dict() for step in steps]}
        parameters = merged(request, {"rope_type": "default", "rope_theta": 1e4}, LENGTH)
        shared = get_rope(HEAD_SIZE, LENGTH, rope_parameters=parameters)
        self.rotary_emb = with_tables_of_layer(shared, 0, KV_HEADS, query_heads=HEADS, rank=0, ranks=1)
        self.rotary_emb.table_index = torch.zeros(MAX_TOKENS, dtype=torch.int32)


class BlockThatUsesItsKeys(Block):
    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attn(q, k, v), k


@pytest.fixture(autouse=True)
def bfloat16():
    """The dtype that vLLM chooses FlashAttention for."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def new_cache(heads_first: bool) -> torch.Tensor:
    """Return a cache in the shape that vLLM gives FlashAttention, heads or slots of a block first in memory."""
    if VERSION >= (0, 26):
        shape, slots, heads = (BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), 2, 1
    else:
        shape, slots, heads = (BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), 2, 3
    cache = torch.full(shape, UNWRITTEN)
    if heads_first != (heads < slots):
        cache = cache.transpose(slots, heads).contiguous().transpose(slots, heads)
    return cache


def key_and_value_cache(layer, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches, ``[blocks, block_size, heads, head_size]``, as FlashAttention's own write takes them."""
    with mock.patch.object(flash_attn, "reshape_and_cache_flash") as write:
        layer.impl.do_kv_cache_update(layer, None, None, kv_cache, None)
    return write.call_args.args[2:4]


@pytest.fixture(scope="module", autouse=True)
def attention_on_the_cpu():
    """Attention returns its query, so that outputs show what reached it; the cache write is vLLM's arithmetic."""

    def attend(query, key, value, output, layer_name, *_, **__):
        output.copy_(query)

    def write(key, value, layer_name):
        layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
        slots = get_forward_context().slot_mapping[_resolve_layer_name(layer_name)].long()
        for cache, heads in zip(key_and_value_cache(layer, layer.kv_cache), (key, value), strict=True):
            written = cache.flatten(0, 1).index_copy(0, slots[slots >= 0], heads[: len(slots)][slots >= 0])
            cache.copy_(written.unflatten(0, (BLOCKS, BLOCK_SIZE)))
        return key.new_empty(0)

    library = torch.library.Library("vllm", "IMPL")
    library.impl("unified_attention_with_output", attend, "CPU")
    library.impl("unified_kv_cache_update", write, "CPU")
    library.impl(cache_fusion.OP, cache_fusion.rotary_and_cache, "CPU")
    yield
    library._destroy()


def run(make, monkeypatch, cache=None, heads_first=False):
    """Compile a block by vLLM, run it on batches of two sizes, and return what it wrote, its pieces and the model.

    Compiled graphs are kept in the folder ``cache``, where there is one.
    """
    torch._dynamo.reset()
    config = compiled_models.vllm_config(cudagraph_mode="PIECEWISE")
    config.compilation_config.cudagraph_mode = type(config.compilation_config.cudagraph_mode).NONE
    pieces = []
    results = []
    with nullcontext() if cache else compiled_models.recorded(monkeypatch), monkeypatch.context() as patch:
        import vllm.compilation.backends as backends

        if cache:
            patch.setenv("VLLM_CACHE_ROOT", str(cache))
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))  # vLLM sets it too; here it is unset afterwards

        split = backends.split_graph

        def recorded_split(*arguments):
            gm, items = split(*arguments)
            pieces.extend(items)
            return gm, items

        patch.setattr(backends, "split_graph", recorded_split)
        torch.manual_seed(3)
        model = compiled_models.model_of(make, config)
        block = model.body
        for tokens, slots in ((5, 5), (9, 7)):
            # The last of nine tokens are padding, which has no slots in piecewise graphs, and -1 in whole ones.
            x = torch.randn(tokens, 32)
            positions = torch.randint(0, 1000, (tokens,))
            block.rotary_emb.table_index[:tokens] = torch.arange(tokens) % len(block.rotary_emb.ladder.tables)
            block.attn.kv_cache = new_cache(heads_first)
            mapping = torch.randperm(BLOCKS * BLOCK_SIZE)[:slots]
            mapping[1] = -1
            with torch.inference_mode(), set_forward_context({LAYER: None}, config, slot_mapping={LAYER: mapping}):
                output = model(positions, x)
            output = output[0] if isinstance(output, tuple) else output
            results.append((block, x, positions, mapping, output, block.attn.kv_cache.clone()))
    return results, pieces, model


def ops_of(pieces) -> list[str]:
    return [str(node.target) for piece in pieces for node in piece.graph.graph.nodes if node.op == "call_function"]


def assert_heads_rotated(actual, x, position, table) -> None:
    """Assert that the heads of one token are rotated, each by its table."""
    of_key_heads = list(table) if isinstance(table, mrrope.HeadTables) else [table]
    parts = zip(actual.chunk(len(of_key_heads)), x.chunk(len(of_key_heads)), of_key_heads, strict=True)
    for got, before, own in parts:
        assert_rotated(got.view(1, -1, HEAD_SIZE), before.view(1, -1, HEAD_SIZE), position, own, "thd")


def assert_right(results) -> None:
    for block, x, positions, slots, output, cache in results:
        q, k, v = block.qkv_proj(x).detach().split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        tables = block.rotary_emb.ladder.tables
        by_slot = [part.flatten(0, 1) for part in key_and_value_cache(block.attn, cache)]
        for token, slot in enumerate(slots.tolist()):
            table, position = tables[token % len(tables)], positions[token : token + 1]
            # Powers of two, so that a product is rounded as before.
            factors = torch.tensor(table.query_factors or [1.0] * HEADS).repeat_interleave(HEAD_SIZE)
            assert_heads_rotated(output[token], q[token] * factors, position, table)
            if slot < 0:
                continue
            assert_heads_rotated(by_slot[0][slot].flatten(), k[token], position, table)
            torch.testing.assert_close(by_slot[1][slot].flatten(), v[token], rtol=0, atol=0)
        written = slots[slots >= 0]
        others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        others[written] = False
        assert (by_slot[0][others] == UNWRITTEN).all()
        assert (by_slot[1][others] == UNWRITTEN).all()


@pytest.mark.parametrize("make", [Block, BlockWithTablesOfHeads])
@pytest.mark.parametrize("heads_first", [False, True])
def test_one_op_rotates_and_writes(make, monkeypatch, heads_first):
    results, pieces, _ = run(make, monkeypatch, heads_first=heads_first)
    ops = ops_of(pieces)
    assert sum(cache_fusion.OP in op for op in ops) == 1
    assert not any("unified_kv_cache_update" in op or "mrrope.rotary" in op for op in ops)
    # Cache write and attention are one piece, as they are in stock vLLM.
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    assert_right(results)


@pytest.mark.parametrize("make", [NormedBlock, BlockThatUsesItsKeys])
def test_left_apart(make, monkeypatch):
    results, pieces, _ = run(make, monkeypatch)
    ops = ops_of(pieces)
    assert not any(cache_fusion.OP in op for op in ops)
    assert sum("unified_kv_cache_update" in op for op in ops) == 1
    if make is not NormedBlock:  # whose fused norms test_norm_fusion.py checks
        assert_right(results)


@pytest.mark.parametrize("artifacts", ["graph", "pieces"])
def test_a_second_start_takes_the_fused_graph_from_the_cache(artifacts, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "1" if artifacts == "pieces" else "0")
    run(Block, monkeypatch, cache=tmp_path)
    results, pieces, model = run(Block, monkeypatch, cache=tmp_path)
    assert model.was_aot_compile_fn_loaded_from_disk
    # Only the cached graph is split again.
    assert [piece.is_splitting_graph for piece in pieces] == ([False, True, False] if artifacts == "graph" else [])
    assert_right(results)
