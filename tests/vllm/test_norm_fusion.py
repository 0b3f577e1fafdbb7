"""The fusion of norms and rotation in graphs that vLLM compiles, on the attention of real models and on variations."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import compiled_models
import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, Olmo2Config, Qwen3NextConfig
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import parallel_state
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.gemma3 import Gemma3Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention

import mrrope
from mrrope.serving.layer_tables import with_tables_of_layer
from mrrope.serving.rope_layer import served_layers
from mrrope.serving.rope_settings import merged
from mrrope.vllm import norm_fusion

LENGTH, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN_SIZE = 128, 4, 2, 16, 64
Q_SIZE, KV_SIZE = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
ROTARY, FUSED = "mrrope.rotary.default", "mrrope.qk_norm_rotary.default"


def parameters(factor="auto", **native) -> dict:
    request = {"rope_type": "mrrope_pro", "factor": factor}
    if factor is None:
        request = {"rope_type": "mrrope", "table": [heads_at(scale).to_dict() for scale in (2.0, 4.0, 8.0, 16.0)]}
    return merged(request, {"rope_type": "default", "rope_theta": 1e4, **native}, LENGTH)


def heads_at(scale: float) -> mrrope.HeadTables:
    settings = {"rotary_dim": HEAD_SIZE, "base": 1e4, "original_max_position": LENGTH, "scale": scale}
    tables = [mrrope.frequency_table("mrrope_pow", power=power, **settings) for power in (0.0, 3.0)]
    return mrrope.HeadTables(tables, [0.5, 0.25, 1.0, 0.75] if scale == 4.0 else None)


class Attention(nn.Module):
    """Projection, norms of q and k, and rotation; subclasses vary the norms."""

    rope: ClassVar[dict] = {}

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN_SIZE, Q_SIZE + 2 * KV_SIZE, bias=False)
        self.make_norms()
        self.rotary_emb = get_rope(HEAD_SIZE, LENGTH, rope_parameters=parameters(**self.rope))
        for weight in (x for name, x in self.named_parameters() if "norm" in name):
            nn.init.normal_(weight, 0.5, 0.2)

    def make_norms(self) -> None:
        self.q_norm, self.k_norm = RMSNorm(HEAD_SIZE), RMSNorm(HEAD_SIZE)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.qkv_proj(x).split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        q, k = self.normed(q, k)
        return (*self.rotary_emb(positions, q, k), v)

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.q_norm(q.view(*q.shape[:-1], HEADS, HEAD_SIZE)).view(q.shape)
        return q, self.k_norm(k.view(*k.shape[:-1], KV_HEADS, HEAD_SIZE)).view(k.shape)


class RowsOfPositions(Attention):
    rope: ClassVar[dict] = {"mrope_section": [4, 2, 2]}


class OneTable(Attention):
    rope: ClassVar[dict] = {"factor": 4.0}


class Gemma(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = GemmaRMSNorm(HEAD_SIZE), GemmaRMSNorm(HEAD_SIZE)


class Flattened(Attention):
    """Heads of all tokens as rows, which is a copy of a view."""

    def normed(self, q, k):
        return [norm(x.reshape(-1, HEAD_SIZE)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k))]


class OverAllHeads(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = RMSNorm(Q_SIZE), RMSNorm(KV_SIZE)

    def normed(self, q, k):
        return self.q_norm(q), self.k_norm(k)


class OverAllHeadsByRows(OverAllHeads):
    rope: ClassVar[dict] = {"mrope_section": [4, 2, 2]}


class TablesOfHeads(Attention):
    """A ladder of tables per key head, after the model's own; one of them with a factor per query head."""

    rope: ClassVar[dict] = {"factor": None}

    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = with_tables_of_layer(self.rotary_emb, 0, KV_HEADS, query_heads=HEADS, rank=0, ranks=1)


class TablesOfHeadsByRows(TablesOfHeads):
    rope: ClassVar[dict] = {"factor": None, "mrope_section": [4, 2, 2]}


class Gated(Attention):
    """Every head beside its gate, as in Qwen3-Next: q is not dense, and the model copies it."""

    def make_norms(self) -> None:
        self.q_norm, self.k_norm = GemmaRMSNorm(HEAD_SIZE), GemmaRMSNorm(HEAD_SIZE)
        self.qkv_proj = nn.Linear(HIDDEN_SIZE, 2 * Q_SIZE + 2 * KV_SIZE, bias=False)

    def forward(self, positions, x):
        q_gate, k, v = self.qkv_proj(x).split([2 * Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        q, gate = q_gate.view(*q_gate.shape[:-1], HEADS, -1).chunk(2, dim=-1)
        q, gate = (part.reshape(*x.shape[:-1], -1) for part in (q, gate))
        q = self.q_norm(q.view(-1, HEADS, HEAD_SIZE)).view(-1, Q_SIZE)
        k = self.k_norm(k.view(-1, KV_HEADS, HEAD_SIZE)).view(-1, KV_SIZE)
        return (*self.rotary_emb(positions, q, k), v, gate)


class NormUsedElsewhere(Attention):
    def forward(self, positions, x):
        q, k, v = self.qkv_proj(x).split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        q, k = self.normed(q, k)
        more = q + 1.0
        return (*self.rotary_emb(positions, q, k), v, more)


class NormOfQOnly(Attention):
    def normed(self, q, k):
        return super().normed(q, k)[0], k


class SeveralEps(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = RMSNorm(HEAD_SIZE, eps=1e-6), RMSNorm(HEAD_SIZE, eps=1e-1)


class WeightsOfAnotherType(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = (RMSNorm(HEAD_SIZE, dtype=torch.float32) for _ in range(2))


class WeightsPerHead(Attention):
    def make_norms(self) -> None:
        super().make_norms()
        self.q_norm.weight = nn.Parameter(torch.empty(HEADS, HEAD_SIZE))


class AnotherOrder(Attention):
    """Heads that change places between norm and rotation."""

    def normed(self, q, k):
        q, k = super().normed(q, k)
        return q.view(-1, HEADS, HEAD_SIZE).roll(1, dims=1).view(q.shape), k


class NoWeights(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = (RMSNorm(HEAD_SIZE, has_weight=False) for _ in range(2))


class PartialVariance(Attention):
    def make_norms(self) -> None:
        self.q_norm, self.k_norm = (RMSNorm(HEAD_SIZE, var_hidden_size=HEAD_SIZE // 2) for _ in range(2))


def compare(monkeypatch, make: Callable[[], nn.Module], dtype: torch.dtype):
    """Run a model compiled and in eager mode, and return both results with what the compiler made."""
    torch.manual_seed(0)
    config, pairs = compiled_models.vllm_config(), []
    index = torch.zeros(64, dtype=torch.int32)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with compiled_models.recorded(monkeypatch) as compiled:
            model = compiled_models.model_of(make, config)
            for layer in served_layers(model):
                layer.table_index = index
            for tokens in (9, 5, 33):
                index.random_(5)
                hidden_states = torch.randn(tokens, HIDDEN_SIZE)
                rows = (3,) if next(served_layers(model)).mrope_section else ()
                positions = torch.randint(2000, (*rows, tokens))
                got = compiled_models.run(model, config, positions, hidden_states)
                with torch.no_grad():
                    expected = model.body(positions, hidden_states)
                pairs += [(got, expected)] if isinstance(got, torch.Tensor) else zip(got, expected, strict=True)
    finally:
        torch.set_default_dtype(default)
    return pairs, compiled


KINDS = [Attention, RowsOfPositions, OneTable, Gemma, Flattened, OverAllHeads, OverAllHeadsByRows, Gated]
KINDS += [TablesOfHeads, TablesOfHeadsByRows]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in KINDS), (Attention, torch.float32), (Gemma, torch.float32)],
)
def test_norms_and_rotation_are_one_op(monkeypatch, kind, dtype):
    pairs, compiled = compare(monkeypatch, kind, dtype)
    assert compiled.calls[FUSED] == 1
    assert compiled.calls[ROTARY] == 0
    assert not any("rsqrt" in name or "rms_norm" in name for name in compiled.calls)
    # Only the gate is copied, for the result; the heads are read where the projection wrote them.
    assert compiled.calls["aten.clone.default"] == (kind is Gated)
    assert ("cpp_fused" in compiled.code) == (kind is Gated)
    for got, expected in pairs:
        # Unfused, 16-bit heads are rounded after the norm, after the weights and after the rotation.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(
    "kind",
    [
        NormUsedElsewhere,
        NormOfQOnly,
        SeveralEps,
        WeightsPerHead,
        WeightsOfAnotherType,
        AnotherOrder,
        NoWeights,
        PartialVariance,
    ],
)
def test_what_the_fused_op_cannot_do_stays(monkeypatch, kind):
    pairs, compiled = compare(monkeypatch, kind, torch.bfloat16)
    assert compiled.calls[FUSED] == 0
    assert compiled.calls[ROTARY] == 1
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05)


# --- attention of vLLM's models ---

SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": LENGTH,
}
NAME = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """One process as all of vLLM's parallel groups."""
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with set_current_vllm_config(compiled_models.vllm_config()):
        store = tmp_path_factory.mktemp("store") / "store"
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class ProductOfHeads(nn.Module):
    """In place of attention: a result that depends on every component of q and k."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * torch.cat([k, k], dim=-1) + torch.cat([v, v], dim=-1)


def ready(attention: nn.Module) -> nn.Module:
    """Return an attention module with weights, and without a cache of keys."""
    attention.attn = ProductOfHeads()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, 0.1, 0.2)
    return attention


def qwen3() -> nn.Module:
    return ready(Qwen3Attention(HIDDEN_SIZE, HEADS, KV_HEADS, parameters(), LENGTH, HEAD_SIZE, prefix=NAME))


def gemma3() -> nn.Module:
    config = Gemma3TextConfig(**SIZES, head_dim=HEAD_SIZE, layer_types=["full_attention"])
    config.rope_parameters = {"full_attention": parameters()}
    return ready(Gemma3Attention(config, HIDDEN_SIZE, HEADS, KV_HEADS, HEAD_SIZE, LENGTH, prefix=NAME))


def olmo2() -> nn.Module:
    models = pytest.importorskip("vllm.model_executor.models.olmo2", reason="transformers' backend since vLLM 0.26")
    config = Olmo2Config(**SIZES)
    config.rope_parameters = parameters()
    settings = SimpleNamespace(model_config=SimpleNamespace(hf_config=config), cache_config=None, quant_config=None)
    return ready(models.Olmo2Attention(vllm_config=settings, prefix=NAME))


class Qwen3Next(nn.Module):
    """Its attention writes into a given tensor."""

    def __init__(self, *, vllm_config=None, prefix: str = "") -> None:
        super().__init__()
        from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

        config = Qwen3NextConfig(**SIZES, head_dim=2 * HEAD_SIZE, layer_types=["full_attention"])
        config.rope_parameters = parameters(partial_rotary_factor=0.5)
        self.attention = ready(Qwen3NextAttention(config, prefix=NAME))
        self.takes_output = "output" in inspect.signature(Qwen3NextAttention.forward).parameters  # before vLLM 0.33

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.takes_output:
            return self.attention(positions, x)
        result = torch.empty_like(x)
        self.attention(positions, result, x)
        return result


def qwen3_next() -> nn.Module:
    """Built as vLLM builds a model, so that its own kernel for norm and rope is switched off."""
    pytest.importorskip("compressed_tensors", reason="qwen3_next imports it")
    return initialize_model(compiled_models.vllm_config(CompilationMode.NONE), model_class=Qwen3Next)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [qwen3, gemma3, olmo2, qwen3_next])
def test_attention_of_models(monkeypatch, make):
    pairs, compiled = compare(monkeypatch, make, torch.float32)
    assert compiled.calls[FUSED] == 1
    assert compiled.calls[ROTARY] == 0
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


# --- the pass ---


def pass_uuids() -> list[str]:
    manager = PostGradPassManager()
    manager.configure(compiled_models.vllm_config())
    with pass_context(Range(1, 2048)):
        return [manager.uuid(), *(each.uuid() for each in manager.passes)]


def test_the_pass_counts_for_keys_of_compiled_graphs(monkeypatch):
    before = pass_uuids()
    assert pass_uuids() == before
    source = norm_fusion.inspect.getsource
    monkeypatch.setattr(norm_fusion.inspect, "getsource", lambda module: source(module) + "# changed")
    after = pass_uuids()
    assert (before[0] != after[0], before[1:-1] == after[1:-1], before[-1] != after[-1]) == (True, True, True)


def test_graphs_without_our_op_stay_as_they_are():
    def attention(x, weight):
        return torch.ops.vllm_ir.rms_norm.default(x, weight, 1e-6)

    graph = torch.fx.symbolic_trace(attention).graph
    before = str(graph)
    norm_fusion.fuse_norms(graph)
    assert str(graph) == before
