"""Tables per layer and head: vLLM's models rotate as ``mrrope.patch`` lets those of transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_reference import assert_rotated
from test_rotary_embedding import assert_rows_rotated
from tiny_engine import engine_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype

import mrrope
from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.hf.layer_tables import LayerTables
from mrrope.serving.layer_tables import heads_of_rank, with_tables_of_layer
from mrrope.serving.rope_layer import ServedRotaryEmbedding, served_layers

LAYERS, KEY_HEADS, QUERY_HEADS, NATIVE_LENGTH, BASE = 3, 2, 4, 64, 10_000.0
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": 16,
    "max_position_embeddings": NATIVE_LENGTH,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": BASE, **SIZES}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": BASE, **SIZES}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    **SIZES,
    "sliding_window": 1024,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "rope_theta": BASE,
    "rope_local_base_freq": 500.0,
}
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA}
TOLERANCE = 3e-4
"""On log-probabilities in float32: twice the 1.4e-4 by which transformers' own are off from those in float64."""


def table(scale: float, power: float) -> mrrope.FrequencyTable:
    settings = {"rotary_dim": 16, "base": BASE, "original_max_position": NATIVE_LENGTH}
    return mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings)


def heads(scale: float, *powers: float) -> mrrope.HeadTables:
    return mrrope.HeadTables(table(scale, power) for power in powers)


def table_set(scale: float) -> mrrope.TableSet:
    """Return a set in which no two layers or heads are alike, one layer with one table for all heads."""
    return mrrope.TableSet([heads(scale, 0.0, 3.0), table(scale, 0.5), heads(scale, 1.0, 0.2)])


def set_with_factors(scale: float) -> mrrope.TableSet:
    """Return a set in which query heads have factors, but for those of one layer."""
    first = mrrope.HeadTables(heads(scale, 0.0, 3.0), [2.0, 0.5, 1.0, 3.0])
    return mrrope.TableSet([first, table(scale, 0.5), mrrope.HeadTables([table(scale, 1.0)], [0.4, 1.5, 2.5, 1.0])])


TABLES = {
    "set": table_set(4.0),
    "factors": set_with_factors(4.0),
    "heads": heads(4.0, 0.0, 3.0),
    "layers": mrrope.TableSet(table(4.0, power) for power in (0.0, 1.0, 3.0)),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """One process as all of vLLM's parallel groups."""
    with set_current_vllm_config(engine_config(tmp_path_factory.mktemp("model"))):
        if not parallel_state.model_parallel_is_initialized():
            store = tmp_path_factory.mktemp("store") / "store"
            init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
            initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class CausalAttention(nn.Module):
    """In place of vLLM's attention, which needs a GPU: each text of a batch attends to itself."""

    def __init__(self, head_size: int, scale: float, text_of_token: torch.Tensor) -> None:
        super().__init__()
        self.head_size, self.scale = head_size, scale
        self.register_buffer("text_of_token", text_of_token)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(x.shape[0], -1, self.head_size).transpose(0, 1) for x in (q, k, v))
        texts = self.text_of_token[: q.shape[1]]
        mask = (texts[:, None] == texts).tril()
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


class Served:
    """A model as vLLM builds it, with the weights of a model of transformers, on the CPU."""

    def __init__(
        self,
        folder: Path,
        reference: PreTrainedModel,
        config: dict[str, Any],
        rope_parameters: dict[str, Any] | None,
        mode: CompilationMode = CompilationMode.NONE,
    ) -> None:
        compilation = CompilationConfig(mode=mode, cudagraph_mode="NONE", custom_ops=["none"])
        options = {"dtype": "float32", "compilation_config": compilation, "config": config}
        self.config = engine_config(folder, rope_parameters, **options)
        with set_current_vllm_config(self.config):
            self.model = initialize_model(self.config)
        self.model.load_weights((name, weight.clone()) for name, weight in reference.state_dict().items())
        self.text_of_token = torch.zeros(512, dtype=torch.int32)
        self.table_index = torch.zeros(512, dtype=torch.int32)
        for layer in self.model.model.layers:
            own = layer.self_attn.attn
            layer.self_attn.attn = CausalAttention(own.head_size, own.impl.scale, self.text_of_token)
        for rope in served_layers(self.model):
            rope.table_index = None if rope.ladder.is_fixed else self.table_index

    def log_probs(self, *texts: torch.Tensor, tables: tuple[int, ...] = (0,)) -> list[torch.Tensor]:
        """Return the log-probabilities of all next tokens of texts in one batch, each by one table of the ladder."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = int(lengths.sum())
        self.text_of_token[:tokens] = torch.arange(len(texts)).repeat_interleave(lengths)
        self.table_index[:tokens] = torch.tensor(tables).repeat_interleave(lengths) if len(tables) > 1 else tables[0]
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        with torch.inference_mode(), set_forward_context({}, self.config):
            hidden = self.model(torch.cat(texts), positions)
        logits = hidden @ self.model.lm_head.weight.T
        return list(logits.log_softmax(-1).split(lengths.tolist()))


def reference_of(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    """Return a model of transformers with random weights, whose attention depends on positions."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(weight, std=0.3)
    return model.eval()


def expected(reference: PreTrainedModel, tables: Any, text: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of transformers with these tables; of None, those of the stock model."""
    model = copy.deepcopy(reference)
    if tables is not None:
        mrrope.patch(model, tables)
    with torch.no_grad():
        hidden = model.model(text[None]).last_hidden_state
    return (hidden[0] @ model.lm_head.weight.T).log_softmax(-1)


def text_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(128, (tokens,), generator=torch.Generator().manual_seed(seed))


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape
    return float((x.detach() - y.detach()).abs().max())


# --- numbers ---


EAGER, COMPILED = CompilationMode.NONE, CompilationMode.VLLM_COMPILE


@pytest.mark.parametrize(
    ("model", "tables", "mode"),
    [
        *((model, tables, EAGER) for model in MODELS for tables in TABLES),
        *((model, tables, COMPILED) for model in MODELS for tables in ("set", "factors")),
    ],
)
def test_models_rotate_as_patched_ones(monkeypatch, tmp_path, model, tables, mode):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    reference, given = reference_of(tmp_path, MODELS[model]), TABLES[tables]
    request = {"rope_type": "mrrope", "table": given.to_dict()}
    served = Served(tmp_path, reference, MODELS[model], request, mode)
    for tokens in (200, 37):
        text = text_of(tokens)
        (got,) = served.log_probs(text)
        assert difference(got, expected(reference, given, text)) < TOLERANCE
    # Any other table would be seen.
    assert difference(got, expected(reference, table(4.0, 0.5), text)) > 100 * TOLERANCE


@pytest.mark.parametrize("mode", [EAGER, COMPILED])
def test_requests_of_one_batch_have_their_own_sets(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    reference = reference_of(tmp_path, LLAMA)
    steps = [table(2.0, 1.0), table_set(4.0), mrrope.HeadTables(heads(8.0, 0.0, 3.0), [2.0, 0.5, 1.0, 3.0])]
    request = {"rope_type": "mrrope", "table": [step.to_dict() for step in steps], "factor": "auto"}
    served = Served(tmp_path, reference, LLAMA, request, mode)
    ladder = [None, *steps]
    for tables in [(3, 0, 2, 1, 2), (0, 1), (2, 2)]:
        texts = [text_of(20 + 7 * i, seed=i) for i in range(len(tables))]
        got = served.log_probs(*texts, tables=tables)
        for one, number, text in zip(got, tables, texts, strict=True):
            assert difference(one, expected(reference, ladder[number], text)) < TOLERANCE
            for other in {0, 1, 2, 3} - {number}:
                assert difference(one, expected(reference, ladder[other], text)) > 100 * TOLERANCE


# --- parallel ranks ---

Q_HEADS = 8


def of_rank(monkeypatch: pytest.MonkeyPatch, group: Any, rank: int, ranks: int) -> None:
    """Let vLLM build its models for one rank of a parallel group. Nothing is sent between ranks here."""
    monkeypatch.setattr(group, "rank_in_group", rank)
    monkeypatch.setattr(group, "world_size", ranks)


def built(folder: Path, tables: Any, config: dict[str, Any], dtype: str = "float32") -> nn.Module:
    """Return a model as vLLM's loader builds it, without weights."""
    request = {"rope_type": "mrrope", "table": tables.to_dict()}
    vllm_config = engine_config(folder, request, dtype=dtype, config=config)
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(getattr(torch, dtype)):
        return initialize_model(vllm_config)


def assert_rotates_by(
    rope: nn.Module,
    tables: list[mrrope.FrequencyTable],
    q_heads: list[int],
    group: int,
    factors: list[float] | None = None,
) -> None:
    """Assert that a rank's query heads rotate by the tables of their key heads, and those key heads, too.

    Args:
        rope: The rope layer.
        tables: The tables of all key heads of the model.
        q_heads: The rank's query heads, numbered in the whole model.
        group: Number of query heads of a key head.
        factors: The factors of all query heads of the model.
    """
    k_heads = sorted({head // group for head in q_heads})
    generator = torch.Generator().manual_seed(len(q_heads))
    q, k = (torch.randn(7, 16 * len(heads), generator=generator) for heads in (q_heads, k_heads))
    positions = torch.randint(2**20, (7,), generator=generator)
    got_q, got_k = (x.view(7, -1, 16) for x in rope(positions, q.clone(), k.clone()))
    for local, head in enumerate(q_heads):
        scaled = q.view(7, -1, 16)[:, [local]] * (1.0 if factors is None else factors[head])
        assert_rotated(got_q[:, [local]], scaled, positions, tables[head // group], "thd")
    for local, head in enumerate(k_heads):
        assert_rotated(got_k[:, [local]], k.view(7, -1, 16)[:, [local]], positions, tables[head], "thd")


@pytest.mark.parametrize(("key_heads", "ranks"), [(4, 2), (4, 4), (2, 4), (2, 8), (1, 2)])
def test_tensor_parallel_ranks_have_the_tables_of_their_heads(monkeypatch, tmp_path, key_heads, ranks):
    config = LLAMA | {"num_attention_heads": Q_HEADS, "num_key_value_heads": key_heads, "hidden_size": 16 * Q_HEADS}
    factors = [2.0**i for i in range(Q_HEADS)]  # exact, so that a product is rounded as before
    rows = [heads(4.0, *(0.3 * i + layer for i in range(key_heads))) for layer in range(LAYERS)]
    tables = mrrope.TableSet([mrrope.HeadTables(rows[0], factors), *rows[1:]])
    per_rank = Q_HEADS // ranks
    for rank in range(ranks):
        of_rank(monkeypatch, parallel_state.get_tp_group(), rank, ranks)
        model = built(tmp_path, tables, config)
        for number, layer in enumerate(model.model.layers):
            own = layer.self_attn
            assert (own.attn.num_heads, own.attn.num_kv_heads) == (per_rank, max(1, key_heads // ranks))
            q_heads = list(range(rank * per_rank, (rank + 1) * per_rank))
            own_factors = factors if number == 0 else None
            assert_rotates_by(own.rotary_emb, list(tables[number]), q_heads, Q_HEADS // key_heads, own_factors)


def test_one_table_beside_head_tables_is_that_of_every_rank(monkeypatch, tmp_path):
    of_rank(monkeypatch, parallel_state.get_tp_group(), 1, 2)
    model = built(tmp_path, table_set(4.0), LLAMA)
    first, second, third = (layer.self_attn.rotary_emb for layer in model.model.layers)
    assert_rotates_by(second, [table(4.0, 0.5)] * 2, [2, 3], group=2)
    assert_rotates_by(third, list(table_set(4.0)[2]), [2, 3], group=2)
    # All layers have tables of one shape, so that their graphs are compiled once.
    assert first.tables.shape == second.tables.shape == third.tables.shape


@pytest.mark.parametrize("rank", range(LAYERS))
def test_pipeline_ranks_number_the_layers_of_the_whole_model(monkeypatch, tmp_path, rank):
    of_rank(monkeypatch, parallel_state.get_pp_group(), rank, LAYERS)
    model = built(tmp_path, TABLES["layers"], LLAMA)
    kinds = [isinstance(layer, PPMissingLayer) for layer in model.model.layers]
    assert kinds == [layer != rank for layer in range(LAYERS)]
    (rope,) = served_layers(model)
    assert rope.ladder.tables == (TABLES["layers"][rank],)


# --- numbering ---


def test_layers_without_keys_take_the_tables_of_the_keys(tmp_path):
    """As ``mrrope.patch`` hands them out, in Gemma 3n: the last layers attend to the keys of earlier ones."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = SIZES | {"num_hidden_layers": len(kinds), "intermediate_size": [64] * len(kinds)}
    config = {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        **sizes,
        "layer_types": kinds,
        "num_kv_shared_layers": 2,
        "sliding_window": 1024,
        "activation_sparsity_pattern": [0.0] * len(kinds),
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "rope_theta": BASE,
        "rope_local_base_freq": 500.0,
    }
    tables = mrrope.TableSet(heads(4.0, 0.1 * layer, 3.0) for layer in range(len(kinds)))
    reference = mrrope.patch(reference_of(tmp_path, config), tables)
    numbers = [
        LayerTables().state_of(module).layer
        for module in reference.modules()
        if type(module).__name__ == "Gemma3nTextAttention"
    ]
    assert numbers == [0, 1, 2, 1, 2]
    model = built(tmp_path, tables, config, dtype="bfloat16")  # only FlashAttention shares keys
    served = [module for module in model.modules() if type(module).__name__ == "Gemma3nAttention"]
    served = sorted(served, key=lambda module: extract_layer_index(module.attn.layer_name))
    for number, kind, module in zip(numbers, kinds, served, strict=True):
        if kind == "full_attention":
            assert module.rotary_emb.ladder.tables == (tables[number],)


def test_hybrids_count_layers_without_attention(tmp_path):
    """As ``mrrope.patch`` does, in LFM2, where every other layer is a convolution."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **SIZES,
        "conv_dim": SIZES["hidden_size"],
        "block_dim": SIZES["hidden_size"],
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "rope_theta": BASE,
    }
    tables = mrrope.TableSet(heads(4.0, 0.1 * layer, 3.0) for layer in range(len(kinds)))
    reference = mrrope.patch(reference_of(tmp_path, config), tables)
    modules = [module for module in reference.modules() if type(module).__name__ == "Lfm2Attention"]
    assert [LayerTables().state_of(module).layer for module in modules] == [1, 3]
    model = built(tmp_path, tables, config)
    served = [module for module in model.modules() if type(module).__name__ == "Lfm2Attention"]
    assert [module.rotary_emb.ladder.tables for module in served] == [(tables[1],), (tables[3],)]


# --- the layer ---


def shared_layer(ladder: Ladder, **options: Any) -> ServedRotaryEmbedding:
    settings = {"head_size": 16, "max_position": 512, "is_neox_style": True, "dtype": torch.float32}
    return ServedRotaryEmbedding(ladder, **settings, **options)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rows_of_positions_with_tables_of_heads(is_interleaved):
    steps, sections = (table(1.0, 0.0), heads(2.0, 0.0, 3.0), heads(4.0, 1.0, 0.2)), [4, 2, 2]
    shared = shared_layer(Ladder(steps, (64, 128, 256)), mrope_section=sections, mrope_interleaved=is_interleaved)
    rope = with_tables_of_layer(shared, 5, KEY_HEADS, query_heads=QUERY_HEADS, rank=0, ranks=1)
    assert rope.tables.shape == (3, 2, KEY_HEADS, 9)
    rope.table_index = torch.tensor([2, 0, 1, 1, 0, 2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(6, 4, 16, generator=generator), torch.randn(6, 2, 16, generator=generator)
    positions = torch.randint(2**20, (3, 6), generator=generator)
    got = rope(positions, q.clone(), k.clone())
    row_of_pair = [0, 1, 2, 0, 1, 2, 0, 0] if is_interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    for after, before in zip(got, (q, k), strict=True):
        for token, number in enumerate(rope.table_index.tolist()):
            for head in range(before.shape[1]):
                own = steps[number]
                own = own[head * 2 // before.shape[1]] if isinstance(own, mrrope.HeadTables) else own
                at = (slice(token, token + 1), slice(head, head + 1))
                assert_rows_rotated(after[at], before[at], positions[:, at[0]], row_of_pair, own)


def test_a_copy_leaves_the_shared_layer_as_it_is():
    shared = shared_layer(Ladder.of_one(TABLES["layers"]))
    of_rank = {"query_heads": QUERY_HEADS, "rank": 0, "ranks": 1}
    first, second = (with_tables_of_layer(shared, layer, KEY_HEADS, **of_rank) for layer in (0, 1))
    first.table_index = torch.zeros(3, dtype=torch.int32)
    assert shared.tables is second.table_index is shared.table_index is None
    assert shared.ladder.tables == (TABLES["layers"],)
    # A layer with one table for all heads has the fastest form, and a cos/sin cache for kernels that read it.
    assert first.tables.shape == second.tables.shape == (9,)
    angles = torch.arange(512)[:, None] * TABLES["layers"][1].inv_freq
    factor = TABLES["layers"][1].attention_factor
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1).float() * factor
    torch.testing.assert_close(second.cos_sin_cache, expected, rtol=0, atol=1e-6)


def test_kernels_that_read_a_cos_sin_cache_are_refused():
    shared = shared_layer(Ladder.of_one(TABLES["set"]))
    for rope in (shared, with_tables_of_layer(shared, 0, KEY_HEADS, query_heads=QUERY_HEADS, rank=0, ranks=1)):
        with pytest.raises(NotImplementedError, match=r"cos_sin_cache holds .*, and this layer has .*: the model"):
            rope.cos_sin_cache  # noqa: B018


@pytest.mark.parametrize(
    ("steps", "layer", "key_heads", "ranks", "message"),
    [
        (["set"], 3, 2, 1, r"table must hold tables for layer 3, got TableSet\(3 layers"),
        (["set"], 0, 4, 1, "key heads of layer 0, of which rank 0 of 1 has 4, got tables for 2 in all"),
        (["heads"], 0, 2, 2, "of which rank 0 of 2 has 2, got tables for 2 in all"),
    ],
)
def test_tables_that_do_not_fit_a_layer_are_refused(steps, layer, key_heads, ranks, message):
    ladder = Ladder(tuple(TABLES[step] for step in steps), (64,) * len(steps))
    with pytest.raises(ValueError, match=message):
        with_tables_of_layer(shared_layer(ladder), layer, key_heads, query_heads=QUERY_HEADS, rank=0, ranks=ranks)


def test_steps_of_different_key_heads_are_refused():
    ladder = Ladder((heads(2.0, 0.0, 1.0), heads(4.0, 0.0, 1.0, 2.0)), (64, 128))
    with pytest.raises(ValueError, match="rank 0 of 1 has 3, got tables for 2 and 3 in all"):
        with_tables_of_layer(shared_layer(ladder), 0, 3, query_heads=6, rank=0, ranks=1)


def test_heads_that_ranks_share():
    assert [list(heads_of_rank(2, rank, 4)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(heads_of_rank(8, rank, 4)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class OneRopeForAll(nn.Module):
    """A model whose layers do not hold the rope layer that rotates them."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.rotary_emb = get_rope(16, 64, rope_parameters=vllm_config.model_config.hf_config.rope_parameters)


def test_a_model_with_one_rope_layer_is_refused(tmp_path):
    request = {"rope_type": "mrrope", "table": TABLES["set"].to_dict()}
    config = engine_config(tmp_path, request, dtype="float32", config=LLAMA)
    with pytest.raises(ValueError, match="layers and heads of OneRopeForAll, whose rotary_emb belongs to no attention"):
        initialize_model(config, model_class=OneRopeForAll)
