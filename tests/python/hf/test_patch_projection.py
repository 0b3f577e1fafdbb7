"""Models patched with fuse_projection: one op projects and rotates, and everything else stays as it was.

The reference is the same model, patched without.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.fusion import qkv_projection
from mrrope.hf.fusion.qkv_projection import SIDE_BY_SIDE, projections_fused_in

pytest.importorskip("transformers")

from model_tolerance import relative
from patched_models import (
    Snapshot,
    assert_same,
    assert_same_gradients,
    assert_same_text,
    generated,
    gradients,
    logits,
)
from test_patch_norms import Calls, Quantized
from tiny_models import tiny_model, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

FAMILIES = {
    "llama": "three projections",
    "mistral": "three projections, a window",
    "qwen2": "three projections with biases",
    "phi3": "one projection, packed",
    "cohere": "interleaved pairs",
    "glm4": "interleaved pairs, part of the head",
    "stablelm": "part of the head",
    "olmo": "q, k and v may be clipped",
}
PATCH = {"scale": 4.0, "original_max_position": 64}

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def fused(family: str = "llama", **options: Any) -> PreTrainedModel:
    return mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | {"fuse_projection": True} | options)


def reference(family: str = "llama", **options: Any) -> PreTrainedModel:
    return fused(family, fuse_projection=False, **options)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if projections_fused_in(module) is not None]


def calls(model: nn.Module, **inputs: Any) -> dict[str, int]:
    with Calls() as mode:
        logits(model, **inputs)
    return dict(mode.counts)


def assert_fused(model: nn.Module) -> None:
    assert calls(model) == {"qkv_rotary": len(attentions(model))}


# --- what it does ---


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = fused(family)
    assert attentions(model)
    assert_fused(model)
    assert_same(logits(model), logits(reference(family)))


def test_few_rows_are_not_fused_where_python_would_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    monkeypatch.setattr(qkv_projection, "_takes_longer_fused", lambda x: x.shape[1] < 3)
    assert calls(model, input_ids=torch.tensor([[1, 2, 3]])) == {"qkv_rotary": len(attentions(model))}
    few = torch.tensor([[1, 2], [5, 6]])
    assert calls(model, input_ids=few) == {"rotary": len(attentions(model))}
    assert_same(logits(model, input_ids=few), logits(reference(), input_ids=few))


@pytest.mark.parametrize(
    ("shape", "is_cuda", "longer"), [((2, 128), True, True), ((1, 257), True, False), ((1, 1), False, False)]
)
def test_few_rows_are_those_of_a_decoding_step_on_a_gpu(shape: tuple[int, int], is_cuda: bool, longer: bool) -> None:
    hidden_states: Any = SimpleNamespace(shape=torch.Size([*shape, 64]), is_cuda=is_cuda)
    assert qkv_projection._takes_longer_fused(hidden_states) == longer


def test_layers_that_do_not_rotate_project_as_they_did() -> None:
    model = fused("smollm3")
    rotating = len(attentions(model))
    assert 0 < rotating < len(model.model.layers)
    assert calls(model) == {"qkv_rotary": rotating}
    assert_same(logits(model), logits(reference("smollm3")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_other_dtypes(family: str, dtype: torch.dtype) -> None:
    models = [mrrope.patch(tiny_model(family).to(dtype), "yarn", scale=4.0, fuse_projection=f) for f in (True, False)]
    assert_fused(models[0])
    assert_same(*map(logits, models))


def test_large_weights_in_float16() -> None:
    models = []
    for fuse_projection in (True, False):
        model = tiny_model("llama").half()
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(2000.0)
        models.append(mrrope.patch(model, "yarn", scale=4.0, fuse_projection=fuse_projection))
    assert_fused(models[0])
    assert_same(*map(logits, models))


@pytest.mark.parametrize("strategy", ["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_generate(family: str, strategy: str) -> None:
    options = {"do_sample": False, "num_beams": 3 if strategy == "beams" else 1}
    got, want = (generated(model, tokens(2, 9), **options) for model in (fused(family), reference(family)))
    assert_same_text(got, want)


def test_the_cache_can_be_read_on_without() -> None:
    """Cached keys are those that a model without fuse_projection would have."""
    model = fused()
    first = model(tokens(1, 12), use_cache=True)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    more = tokens(1, 20)[:, 12:]
    whole = reference()(torch.cat([tokens(1, 12), more], dim=1)).logits[:, 12:]
    assert_same(model(more, past_key_values=first.past_key_values).logits, whole)


def test_the_scale_follows_the_text() -> None:
    options = {"scale": "auto", "max_scale": 4.0}
    text = tokens(2, 150)
    assert_same(logits(fused(**options), input_ids=text), logits(reference(**options), input_ids=text))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_compiled_in_one_graph(family: str, dynamo: Any) -> None:
    model = fused(family)
    want = logits(model)
    assert_same(logits(torch.compile(model, fullgraph=True, backend="aot_eager")), want)


# --- weights ---


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family: str) -> None:
    model = tiny_model(family)
    before = Snapshot(model)
    want = logits(model)
    mrrope.patch(model, "yarn", scale=4.0, fuse_projection=True)
    logits(model)
    mrrope.unpatch(model)
    before.assert_untouched()
    assert torch.equal(logits(model), want)
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    assert all(
        storage.nbytes() == parameter.nbytes for storage, parameter in zip(storages, model.parameters(), strict=True)
    ), "every parameter has memory of its own again"


def test_weights_take_no_more_memory() -> None:
    model = tiny_model("llama")

    def memory() -> int:
        tensors = [*model.parameters(), *model.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    before = memory()
    mrrope.patch(model, "rope", fuse_projection=True)
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("packed_table"))
    assert memory() == before + tables


@pytest.mark.parametrize("safe", [True, False], ids=["save_pretrained", "torch.save"])
def test_weights_are_saved_as_if_unpatched(safe: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = logits(model)
    mrrope.patch(model, "mrrope_pro", **PATCH, fuse_projection=True)
    assert model.state_dict().keys() == want.keys()
    if safe:
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(loaded), plain)
        found = loaded.state_dict()
    else:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        found = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("assign", [False, True])
def test_weights_load_into_a_patched_model(assign: bool) -> None:
    model, other = fused("qwen2"), reference("qwen2")
    for parameter in other.parameters():
        parameter.mul_(1.5)
    assert relative(logits(model), logits(other)) > 1e-3
    model.load_state_dict(other.state_dict(), assign=assign)
    assert_same(logits(model), logits(other))
    assert_fused(model)


def test_weights_changed_in_place_are_used() -> None:
    model, other = fused(), reference()
    for changed in (model, other):
        changed.model.layers[0].self_attn.k_proj.weight.mul_(-2.0)
    assert_same(logits(model), logits(other))
    assert_fused(model)


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_put_in_later_is_used(bias: bool) -> None:
    model, other = fused(), reference()
    for changed in (model, other):
        torch.manual_seed(0)
        attention = changed.model.layers[0].self_attn
        attention.k_proj = nn.Linear(attention.k_proj.in_features, attention.k_proj.out_features, bias)
    assert_same(logits(model), logits(other))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_biases_taken_away_are_not_added(how: str, dynamo: Any) -> None:
    model, other = fused("qwen2"), reference("qwen2")
    for changed in (model, other):
        torch.manual_seed(0)
        for layer in changed.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                nn.init.normal_(getattr(layer.self_attn, name).bias)
    assert_same(logits(model), logits(other))
    for changed in (model, other):
        for layer in changed.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias = None
    assert_same(logits(torch.compile(model, backend="aot_eager") if how == "compiled" else model), logits(other))
    assert_fused(model)


class OwnTensor(torch.Tensor):
    """As quantised and sharded weights are."""


def with_weight(module: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize("replaced", ["no bias", "another dtype", "another class", "another tensor", "other inputs"])
def test_moving_a_model_with_a_projection_put_in_later(replaced: str) -> None:
    model = fused("qwen2")
    attention = model.model.layers[0].self_attn
    old = attention.k_proj
    new = {
        "no bias": lambda: nn.Linear(old.in_features, old.out_features, bias=False),
        "another dtype": lambda: nn.Linear(old.in_features, old.out_features, dtype=torch.float64),
        "another class": lambda: nn.Sequential(old),
        "another tensor": lambda: with_weight(old, old.weight.detach().clone().as_subclass(OwnTensor)),
        "other inputs": lambda: nn.Linear(old.in_features + 1, old.out_features),
    }
    attention.k_proj = new[replaced]()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.to("cpu")
    assert not attention._buffers, "nothing lies side by side"
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("step", ["patch", "unpatch", "call after a copy", "load and call"])
def test_inference_mode_leaves_parameters_trainable(step: str) -> None:
    model = tiny_model("llama") if step == "patch" else fused()
    if step == "call after a copy":
        model = copy.deepcopy(model)
    if step == "load and call":
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    with torch.inference_mode():
        if step == "patch":
            mrrope.patch(model, "yarn", scale=4.0, fuse_projection=True)
        if step == "unpatch":
            mrrope.unpatch(model)
        logits(model)
    assert [name for name, parameter in model.named_parameters() if parameter.is_inference()] == []
    with torch.enable_grad():
        gradients(model)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
        want = logits(model)
        mrrope.patch(model, "mrrope_pro", **PATCH, fuse_projection=True)
        assert_fused(model)
        assert_same(logits(model), logits(reference()))
        assert torch.equal(logits(mrrope.unpatch(model)), want)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_casting_a_patched_model(family: str) -> None:
    model = fused(family).to(torch.bfloat16)
    assert_same(logits(model), logits(reference(family).to(torch.bfloat16)))
    assert_fused(model)
    for attention in attentions(model):
        for name in SIDE_BY_SIDE.values():
            buffer = attention._buffers.get(name)
            assert buffer is None or buffer.dtype == torch.bfloat16


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stand_on_their_own(how: Callable[[Any], Any]) -> None:
    model = fused()
    want = logits(model)
    other = how(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert_same(logits(other), want)
    assert_fused(other)
    mrrope.unpatch(other)
    assert not attentions(other)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_compiled_copy_sees_weights_loaded_later(how: Callable[[Any], Any], dynamo: Any) -> None:
    model, other = how(fused("qwen2")), reference("qwen2")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(logits(compiled), logits(other))
    for parameter in other.parameters():
        parameter.mul_(1.5)
    model.load_state_dict(other.state_dict())
    assert_same(logits(compiled), logits(other))


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_saved_model(tmp_path: Path, zipped: bool, assigned: bool) -> None:
    """As older versions of torch saved one, tensors get their values after everything else; weights that were assigned
    lie apart."""
    model = fused()
    if assigned:
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    torch.save(model, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(logits(loaded), logits(model))
    assert_fused(loaded)


@pytest.mark.parametrize(("family", "kind"), [("llama", "weight"), ("qwen2", "bias"), ("phi3", "weight")])
def test_functional_calls_leave_their_tensors_alone(family: str, kind: str) -> None:
    model, other = fused(family), reference(family)
    given = {name: 1.5 * parameter for name, parameter in model.named_parameters() if name.endswith(kind)}
    places = {name: tensor.data_ptr() for name, tensor in given.items()}
    want = torch.func.functional_call(other, given, (tokens(2, 24),)).logits
    assert_same(torch.func.functional_call(model, given, (tokens(2, 24),)).logits, want)
    assert {name: tensor.data_ptr() for name, tensor in given.items()} == places
    assert_same(logits(model), logits(other))
    assert_fused(model)


def test_memory_shared_with_other_processes_stays_shared() -> None:
    model = fused("qwen2").share_memory()
    assert [name for name, parameter in model.named_parameters() if not parameter.is_shared()] == []
    assert_same(logits(model), logits(reference("qwen2")))
    assert_fused(model)
    mrrope.unpatch(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.is_shared()] == []


def test_without_memory() -> None:
    model = fused().to("meta")
    assert logits(model, input_ids=tokens(1, 12).to("meta")).shape == (1, 12, model.config.vocab_size)


def test_unpatched_projections_own_their_memory_under_adapters() -> None:
    model = fused()
    with_adapters_later(model)
    mrrope.unpatch(model)
    assert [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() != p.nbytes] == []


# --- patching again ---


def test_patched_anew_without() -> None:
    model = fused()
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert not attentions(model)
    assert_same(logits(model), logits(reference()))


def test_a_block_leaves_it_fused() -> None:
    model = fused()
    want = logits(model)
    with mrrope.patched(model, "rope"):
        assert not attentions(model)
    assert torch.equal(logits(model), want)
    assert_fused(model)


def test_a_block_that_fuses() -> None:
    model = reference()
    with mrrope.patched(model, "mrrope_pro", **PATCH, fuse_projection=True):
        assert_fused(model)
    assert not attentions(model)
    assert_same(logits(model), logits(reference()))


def with_adapters_later(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def with_another_class_later(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = type("Own", (nn.Linear,), {})(attention.q_proj.in_features, attention.q_proj.out_features)


def with_a_hook_later(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [with_adapters_later, with_another_class_later, with_a_hook_later])
def test_a_fused_model_that_could_not_be_fused_now_stays_as_it_is(change: Callable[[PreTrainedModel], None]) -> None:
    model = fused()
    change(model)
    want, were_fused = logits(model), attentions(model)
    with pytest.raises(ValueError, match="fuse_projection must be False for LlamaForCausalLM: LlamaAttention"):
        mrrope.patch(model, "yarn", scale=2.0, fuse_projection=True)
    assert attentions(model) == were_fused
    assert torch.equal(logits(model), want)
    with mrrope.patched(model, "rope"):
        assert not attentions(model)
    assert attentions(model) == were_fused
    assert torch.equal(logits(model), want)


# --- where its own code projects ---


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_training(family: str) -> None:
    model, other = fused(family).train(), reference(family).train()
    with torch.enable_grad():
        assert_same_gradients(gradients(model), gradients(other))


def test_weights_without_gradients_are_fused_in_training() -> None:
    models = [fused().train(), reference().train()]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(False)
    with torch.enable_grad():
        assert_same_gradients(*map(gradients, models))
        assert_fused(models[0])


def test_hooks_on_a_projection_see_it() -> None:
    model = fused()
    seen = []
    projection = model.model.layers[0].self_attn.k_proj
    handle = projection.register_forward_hook(lambda module, args, output: seen.append(output))
    assert_same(logits(model), logits(reference()))
    assert len(seen) == 1
    handle.remove()
    assert_fused(model)


def test_autocast() -> None:
    models = fused(), reference()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(*(logits(model).to(torch.bfloat16) for model in models))


class SometimesRotatingAttention(LlamaAttention):
    """Leaves longer texts as they are."""

    def forward(self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        rows = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rows[1] <= 8:
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        output, _ = modeling_llama.eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*rows, -1)), None


def test_a_call_that_does_not_rotate_raises() -> None:
    models = tiny_model("llama"), tiny_model("llama")
    for model, fuse_projection in zip(models, (True, False), strict=True):
        for layer in model.model.layers:
            layer.self_attn.__class__ = SometimesRotatingAttention
        mrrope.patch(model, "mrrope_pro", **PATCH, fuse_projection=fuse_projection)
    assert_same(*(logits(model, input_ids=tokens(1, 4)) for model in models))
    with pytest.raises(RuntimeError, match="the projection rotated k and q, which this call does not rotate"):
        logits(models[0], input_ids=tokens(1, 12))


class LookingAttention(LlamaAttention):
    """Asks a projection for its dtype."""

    def forward(self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        return super().forward(hidden_states.to(self.q_proj.weight.dtype), position_embeddings, attention_mask)


def test_projections_can_be_looked_at() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = LookingAttention
    mrrope.patch(model, "mrrope_pro", **PATCH, fuse_projection=True)
    assert_fused(model)
    assert_same(logits(model), logits(reference()))


def test_adapters_put_in_later() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = []
    for model in (fused(), reference()):
        torch.manual_seed(0)
        found.append(logits(peft.get_peft_model(model, config)))
    assert_same(*found)


# --- what is refused ---


def with_quantized_projections() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Quantized(layer.self_attn.k_proj)
    return model


def with_adapters() -> PreTrainedModel:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def with_clipping() -> PreTrainedModel:
    model = tiny_model("olmo")
    model.config.clip_qkv = 8.0
    return model


def with_one_bias() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.zeros(layer.self_attn.q_proj.out_features))
    return model


def with_mixed_dtypes() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.half()
    return model


def with_shared_projections() -> PreTrainedModel:
    model = tiny_model("llama")
    first, second = model.model.layers[:2]
    second.self_attn.k_proj = first.self_attn.k_proj
    return model


class NormingAttention(LlamaAttention):
    """Norms by names that nobody knows, with weights that commute with the rotation until others are loaded."""

    def forward(self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        rows = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).view(*rows, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (x.transpose(1, 2) for x in (self.first(q), self.second(k), v))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        output, _ = modeling_llama.eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*rows, -1)), None


def with_norms_of_ones() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = NormingAttention
        for name in ("first", "second"):
            setattr(layer.self_attn, name, modeling_llama.LlamaRMSNorm(layer.self_attn.head_dim))
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "norms": (
        lambda: tiny_model("qwen3"),
        "Qwen3Attention does more than split heads between its projection and the rotation",
    ),
    "norms of ones": (
        with_norms_of_ones,
        "NormingAttention does more than split heads between its projection and the rotation",
    ),
    "quantized": (with_quantized_projections, "LlamaAttention has a k_proj that is quantised or wrapped: .*Quantized"),
    "adapters": (with_adapters, "LlamaAttention has a q_proj that is quantised or wrapped: peft.*Linear"),
    "clipping": (with_clipping, "OlmoAttention does more than split heads between its projection and the rotation"),
    "one bias": (with_one_bias, "LlamaAttention has a bias in q_proj only"),
    "shared": (with_shared_projections, "LlamaAttention has projections that share their weights"),
    "mixed dtypes": (
        with_mixed_dtypes,
        "LlamaAttention has a q_proj.weight of torch.float16 on cpu and a k_proj.weight of torch.float32 on cpu",
    ),
    "other names": (lambda: tiny_model("gpt_neox"), "none of its modules takes position_embeddings and has q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, why = REFUSED[case]
    model = make()
    before = Snapshot(model)
    with pytest.raises(ValueError, match=f"fuse_projection must be False for {type(model).__name__}: {why}"):
        # Without an attention factor: norms take that away, and would be noticed by it.
        mrrope.patch(model, "ntk", scale=4.0, fuse_projection=True)
    before.assert_untouched()


def test_refused_again_leaves_it_patched() -> None:
    model = reference("qwen3")
    want = logits(model)
    with pytest.raises(ValueError, match="fuse_projection must be False"):
        mrrope.patch(model, "yarn", scale=2.0, fuse_projection=True)
    assert torch.equal(logits(model), want)
