"""Tables per layer and key head: vLLM's models rotate as ``mrrope.patch`` lets those of transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import engine_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import initialize_model

import mrrope
from mrrope.serving.rope_layer import served_layers

LAYERS, KEY_HEADS, NATIVE_LENGTH, BASE = 3, 2, 64, 10_000.0
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
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
TOLERANCE = 1e-4
"""On log-probabilities in float32: sums of 64 products in another order, three layers deep."""


def table(scale: float, power: float) -> mrrope.FrequencyTable:
    settings = {"rotary_dim": 16, "base": BASE, "original_max_position": NATIVE_LENGTH}
    return mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings)


def heads(scale: float, *powers: float) -> mrrope.HeadTables:
    return mrrope.HeadTables(table(scale, power) for power in powers)


def table_set(scale: float) -> mrrope.TableSet:
    """Return a set in which no two layers or heads are alike, one layer with one table for all heads."""
    return mrrope.TableSet([heads(scale, 0.0, 3.0), table(scale, 0.5), heads(scale, 1.0, 0.2)])


TABLES = {
    "set": table_set(4.0),
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
    return float((x - y).abs().max())


# --- numbers ---


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
@pytest.mark.parametrize(
    ("model", "tables"),
    [("llama", "set"), ("llama", "heads"), ("llama", "layers"), ("qwen3", "set"), ("gemma3", "set")],
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


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_requests_of_one_batch_have_their_own_sets(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    reference = reference_of(tmp_path, LLAMA)
    steps = [table(2.0, 1.0), table_set(4.0), heads(8.0, 0.0, 3.0)]
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
