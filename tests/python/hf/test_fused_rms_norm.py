"""RMSNorms of patched models, those of q and k included: torch's fused kernel, and no other change.

Those that add 1 to their weight are in test_fused_offset_norm.py.

The reference is the same model patched without fuse_norms, and float64 arithmetic.
"""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope
from mrrope.hf.fusion.norm_probe import form_of
from mrrope.hf.fusion.rms_norm import FusedNorms
from mrrope.hf.rope_config import rotary_embeddings

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from patched_models import (
    Snapshot,
    assert_same,
    assert_same_gradients,
    assert_same_text,
    generated,
    gradients,
    logits,
)
from tiny_models import causal_lm_families, inputs, tiny_model, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from two_ranks import run_on_two_ranks

FAMILIES = {
    "llama": "two a layer, one at the end",
    "qwen3": "q and k, per head",
    "llama4_text": "another name for eps",
    "deepseek_v3": "norms within the attention",
    "olmo2": "norms after the attention; q and k, over all heads",
    "smollm3": "layers that do not rotate",
    "lfm2": "q and k, under other names",
    "hunyuan_v1_dense": "q and k, after the rotation",
    "exaone4": "q and k, also in layers that do not rotate",
}
QK_NORMS = ("qwen3", "olmo2")
PATCH = {"scale": 4.0, "original_max_position": 64, "fuse_norms": True}
OTHERS = {
    "cohere": "norms that subtract the mean, those of q and k included",
    "stablelm": "nn.RMSNorm",
}

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs of torch's norm."""
    found: list[torch.Tensor] = []
    rms_norm = nn.functional.rms_norm

    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(x)
        return rms_norm(x, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "rms_norm", noted)
    return found


def fused(family: str = "llama", **options: Any) -> PreTrainedModel:
    return mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | options)


def reference(family: str = "llama", **options: Any) -> PreTrainedModel:
    return fused(family, fuse_norms=False, **options)


def norms(model: nn.Module) -> list[nn.Module]:
    """The norms whose class is swapped."""
    return [module for module in model.modules() if FusedNorms().state_of(module) is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, calls: list[torch.Tensor]) -> None:
    model = fused(family)
    found = logits(model)
    assert len(calls) == len(norms(model)) > len(model.model.layers)
    assert_same(found, logits(reference(family)))


@pytest.mark.slow
def test_every_family_norms_as_it_did() -> None:
    """Those that have norms of this kind; most do."""
    changed = []
    for family in causal_lm_families():
        if not [*rotary_embeddings(tiny_model(family))]:
            continue
        model = fused(family, local_layers=True)
        if not norms(model):
            continue
        changed.append(family)
        apart = reference(family, local_layers=True)

        @torch.no_grad()
        def run(one: nn.Module) -> torch.Tensor:
            return one(**inputs(one, tokens(1, 16))).logits

        assert relative(run(model), run(apart)) < tolerance(apart, run), family
    assert len(changed) > 80, changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_rounds_once(dtype: torch.dtype) -> None:
    model = fused().to(dtype)
    norm = model.model.norm
    x = 3 * torch.randn(64, norm.weight.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    exact = exact * norm.weight.double()
    one_rounding = torch.finfo(dtype).eps / 2

    def error(got: torch.Tensor) -> float:
        return float(((got.double() - exact) / exact).abs().max())

    with torch.no_grad():
        assert error(norm(x)) < 1.01 * one_rounding
        mrrope.unpatch(model)
        assert error(norm(x)) > 1.5 * one_rounding, "the model's own code rounds twice"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_other_dtypes(family: str, dtype: torch.dtype, calls: list[torch.Tensor]) -> None:
    """As near as the model's own code, or nearer, to the same weights in float64."""
    model, apart, exact = (tiny_model(family).to(dtype) for _ in range(3))
    for one, fuse_norms in ((model, True), (apart, False), (exact.double(), False)):
        mrrope.patch(one, "yarn", scale=4.0, fuse_norms=fuse_norms)
    want = logits(exact)
    assert relative(logits(model), want) < 1.1 * relative(logits(apart), want)
    assert {x.dtype for x in calls} == {dtype}


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family: str) -> None:
    model = tiny_model(family)
    before, plain = Snapshot(model), logits(model)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert norms(model)
    assert model.state_dict().keys() == {*before.keys}
    mrrope.unpatch(model)
    before.assert_untouched()
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_by_default_only_rope_is_patched(family: str) -> None:
    model = tiny_model(family)
    own = {module: type(module) for module in model.modules()}
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert not norms(model)
    assert all(type(module) is own[module] for module in model.modules() if module in own)
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        assert not norms(model)
    mrrope.patch(model, "mrrope_pro", scale=4.0, fuse_norms=True)
    assert norms(model)


def test_patched_anew_without() -> None:
    model = fused()
    mrrope.patch(model, "mrrope_pro", **PATCH | {"fuse_norms": False})
    assert torch.equal(logits(model), logits(reference()))
    assert not norms(model)


def test_a_block_leaves_it_fused() -> None:
    model = fused()
    found, fused_norms = logits(model), norms(model)
    with mrrope.patched(model, "yarn", scale=2.0, fuse_norms=False):
        assert not norms(model)
    assert norms(model) == fused_norms
    assert torch.equal(logits(model), found)


def test_a_block_that_fuses() -> None:
    model = tiny_model("llama")
    before = Snapshot(model)
    with mrrope.patched(model, "mrrope_pro", **PATCH):
        assert_same(logits(model), logits(reference()))
    before.assert_untouched()


@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_auto_scale(family: str) -> None:
    model, apart = (patch(family, scale="auto", max_scale=8.0) for patch in (fused, reference))
    batch = torch.cat([nn.functional.pad(tokens(1, 40), (60, 0)), tokens(1, 100, seed=1)])
    call = {"input_ids": batch, "attention_mask": (batch != 0).long()}  # sequences of two scales
    assert_same(logits(model, **call), logits(apart, **call))
    options = {"do_sample": False, "max_new_tokens": 80}  # over a step
    assert_same_text(*(generated(one, tokens(2, 9), **options) for one in (model, apart)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gemma3_text", *QK_NORMS])
def test_generate(family: str, cache: str) -> None:
    options = {"cache_implementation": "static"} if cache == "static" else {}
    assert_same_text(*(generated(model, tokens(2, 12), **options) for model in (fused(family), reference(family))))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_copies_stand_on_their_own(family: str, how: Callable[[Any], Any]) -> None:
    model = fused(family)
    found, plain = logits(model), logits(tiny_model(family))
    clone = how(model)
    assert len(norms(clone)) == len(norms(model))
    mrrope.unpatch(model)
    assert torch.equal(logits(clone), found)
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)
    assert type(clone.model.norm) is type(model.model.norm)


def with_another_eps(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 0.5


def with_weights_in_another_dtype(model: PreTrainedModel) -> None:
    model.model.norm.double()
    model.lm_head.double()


def with_a_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: 2 * output)


def with_other_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(3.0)


def with_another_parameter(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].self_attn.k_norm.weight
    model.model.layers[1].self_attn.k_norm.weight = nn.Parameter(torch.full_like(weight, 0.1))


def with_another_eps_of_q(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 10.0


def with_another_norm(model: PreTrainedModel) -> None:
    norm = model.model.layers[0].self_attn.q_norm
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(norm.weight.numel())


def without_a_norm(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_norm = nn.Identity()


def test_another_forward_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    found = logits(model)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: 2 * norm.weight * x)
    changed = logits(model)
    assert relative(changed, found) > 0.1
    assert_same(changed, logits(reference()))


CHANGES = [with_another_eps, with_weights_in_another_dtype, with_a_hook, with_other_weights]
CHANGES_OF_QK_NORMS = [with_another_parameter, with_another_eps_of_q, with_another_norm, without_a_norm]


@pytest.mark.parametrize(
    ("family", "change"),
    [*(("llama", change) for change in CHANGES), *((f, change) for f in QK_NORMS for change in CHANGES_OF_QK_NORMS)],
)
def test_what_changes_later_is_seen(family: str, change: Callable[[PreTrainedModel], None]) -> None:
    models = [fused(family), reference(family)]
    before = logits(models[0])
    for model in models:
        change(model)
    found = [logits(model) for model in models]
    assert found[0].dtype == found[1].dtype
    assert_same(*found)
    assert (found[0] - before).norm() > 0.001 * before.norm() or found[0].dtype != before.dtype
    assert_same(*(logits(mrrope.unpatch(model)) for model in models))


def test_an_eps_changed_later_is_seen_when_compiled(dynamo: Any) -> None:
    model, apart = fused("qwen3"), reference("qwen3")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = logits(compiled)
    for which in (model, apart):
        with_another_eps_of_q(which)
    assert relative(logits(compiled), before) > 1e-3
    assert_same(logits(compiled), logits(apart))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_a_norm_of_q(kind: str) -> None:
    seen: list[list[list[Tensor]]] = []
    models = fused("qwen3").train(), reference("qwen3").train()
    for model in models:
        calls: list[list[Tensor]] = []

        def hook(module: nn.Module, *tensors: Any, calls: list[list[Tensor]] = calls) -> None:
            calls.append([(x[0] if isinstance(x, tuple) else x).detach() for x in tensors])

        getattr(model.model.layers[1].self_attn.q_norm, f"register_{kind}_hook")(hook)
        seen.append(calls)
    assert_same_gradients(*map(gradients, models))
    assert [len(calls) for calls in seen] == [1, 1]
    for got, want in zip(seen[0][0], seen[1][0], strict=True):
        assert_same(got, want)


def test_hooks_on_all_modules_see_the_norms() -> None:
    model = fused("qwen3")
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        assert_same(logits(model), logits(reference("qwen3")))
    assert {*norms(model)} < {*seen}


def test_a_wrapped_forward_outlives_the_patch() -> None:
    model = fused("qwen3")
    wrapped = [layer.self_attn.q_norm for layer in model.model.layers]
    for norm in wrapped:
        norm.forward = functools.partial(norm.forward)
    assert_same(logits(model), logits(reference("qwen3")))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert not {*wrapped} & {*norms(model)}
    assert_same(logits(model), logits(reference("qwen3")))
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))


def test_a_class_that_was_derived_meanwhile_stays(calls: list[torch.Tensor]) -> None:
    model = fused("qwen3")
    found = norms(model)
    for norm in found:
        norm.__class__ = type("Derived", (type(norm),), {})
    logits(model)
    assert len(calls) == len(found)
    assert {type(norm).__name__ for norm in norms(copy.deepcopy(model))} == {"Derived"}
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert norms(model) == found
    assert_same(logits(model), logits(reference("qwen3")))
    assert {type(norm).__name__ for norm in found} == {"Derived"}


def test_a_norm_that_is_given_a_gate() -> None:
    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
            normed = super().forward(hidden_states)
            return normed if gate is None else normed * gate

    model = tiny_model("llama")
    model.model.norm.__class__ = Gated
    mrrope.patch(model, "mrrope_pro", **PATCH)
    norm, x = model.model.norm, torch.randn(3, model.config.hidden_size)
    assert norm in norms(model)
    with torch.no_grad():
        for arguments in ((x, x), (x,)):
            assert_same(norm(*arguments), Gated.forward(norm, *arguments))
        assert torch.equal(norm(x, gate=x), norm(x, x))
        assert torch.equal(norm(hidden_states=x), Gated.forward(norm, x))


@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_autocast(family: str, calls: list[torch.Tensor]) -> None:
    model, apart = fused(family), reference(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [logits(one) for one in (model, apart)]
    assert not calls
    assert torch.equal(*found)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", *QK_NORMS])
def test_training(family: str, checkpointing: str | None) -> None:
    model, apart = fused(family).train(), reference(family).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    assert_same_gradients(gradients(model, use_cache=False), gradients(apart))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *QK_NORMS])
def test_compiled_it_is_the_model_s_own_code(family: str, dynamo: Any, calls: list[torch.Tensor]) -> None:
    model, apart = fused(family), reference(family)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = logits(compiled)
    assert not calls
    assert_same(found, logits(apart))
    ids = tokens(2, 24)
    compiled.train()(input_ids=ids, labels=ids).loss.backward()
    got = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same_gradients(got, gradients(apart.train()))


def test_compiled_before_it_is_patched(dynamo: Any) -> None:
    model = tiny_model("qwen3")
    plain = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(logits(compiled), plain)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert_same(logits(compiled), logits(reference("qwen3")))
    mrrope.unpatch(model)
    assert_same(logits(compiled), plain)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("sharded", ["norms", "attention"])
def test_sharded_later(sharded: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = fused("qwen3")
    mesh = init_device_mesh("cpu", (1,))
    found = norms(model) if sharded == "norms" else [layer.self_attn for layer in model.model.layers]
    for module in found:
        fully_shard(module, mesh=mesh)
    assert_same(logits(model), logits(reference("qwen3")))
    mrrope.unpatch(model)
    assert not norms(model)
    assert all(isinstance(module, FSDPModule) for module in found)
    assert_same(logits(model), logits(tiny_model("qwen3")))


@pytest.mark.parametrize("family", OTHERS)
def test_norms_of_other_forms_are_left_alone(family: str) -> None:
    model = tiny_model(family)
    if family == "cohere":
        model.config.use_qk_norm = True
        model = type(model)(model.config).eval()
    if family == "stablelm":
        for layer in model.model.layers:
            layer.input_layernorm = nn.RMSNorm(model.config.hidden_size)
    assert not norms(mrrope.patch(model, "mrrope_pro", **PATCH))


def test_norms_that_keep_other_values_are_probed_by_themselves() -> None:
    class Switched(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return getattr(self, "factor", 1.0) * super().forward(hidden_states)

    model = tiny_model("llama")
    changed = [layer.post_attention_layernorm for layer in model.model.layers]
    for norm in (*changed, model.model.norm):
        norm.__class__ = Switched
    for norm in changed[1:]:
        norm.factor = 0.5
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert {changed[0], model.model.norm} < {*norms(model)}
    assert not {*changed[1:]} & {*norms(model)}


def with_weights(norm: nn.Module, value: float) -> nn.Module:
    nn.init.constant_(norm.weight, value)
    return norm


NORMS = {
    "the mean taken away": (lambda: CohereLayerNorm(4096), False),
    "the mean taken away, by torch": (lambda: nn.LayerNorm(4096, bias=False), False),
    "large weights": (lambda: with_weights(LlamaRMSNorm(4096), 60.0), True),
    "large weights, and 1": (lambda: with_weights(Gemma3RMSNorm(4096), 60.0), True),
    "weights of zero": (lambda: with_weights(LlamaRMSNorm(4096), 0.0), True),
    "weights of zero, and 1": (lambda: with_weights(Gemma3RMSNorm(4096), 0.0), True),
    "weights kept elsewhere": (lambda: LlamaRMSNorm(0), False),
    "not to be called": (lambda: Uncallable(4096), False),
    "more bits than it is given": (lambda: Widening(4096), False),
    "integers": (lambda: Quantising(4096), False),
    "another shape": (lambda: Flattening(4096), False),
    "another device": (lambda: Moving(4096), False),
    "something else in training": (lambda: OfItsMode(4096), False),
    "not to be copied": (lambda: Uncopyable(4096), False),
    "no shape yet": (lambda: nn.LazyBatchNorm1d(), False),
}


class Quantising(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states).to(torch.int8)


class Flattening(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states).flatten()


class Moving(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states).to("meta")


class OfItsMode(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states) * (2.0 if self.training else 1.0)


class Uncopyable(LlamaRMSNorm):
    def __copy__(self) -> Any:
        raise TypeError("there is one of me")


class Uncallable(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        raise IndexError("only by those who know me")


class Widening(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_told_apart_whatever_their_weights(kind: str, dtype: torch.dtype) -> None:
    make, is_rms_norm = NORMS[kind]
    norm = make().to(dtype)
    before = dict(norm.named_parameters())
    assert (form_of(norm) is not None) == is_rms_norm
    assert dict(norm.named_parameters()) == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["lora", "norms"])
def test_adapters(method: str, when: str) -> None:
    peft = pytest.importorskip("peft")
    adapter = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False),
        "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "q_norm"], task_type="CAUSAL_LM"),
    }[method]

    def wrapped(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapter()).train()

    apart = wrapped(reference("qwen3"))
    patch = functools.partial(mrrope.patch, method="mrrope_pro", **PATCH)
    model = wrapped(patch(tiny_model("qwen3"))) if when == "before" else patch(wrapped(tiny_model("qwen3")))
    assert norms(model)
    assert_same_gradients(gradients(model), gradients(apart))
    assert_same(logits(model.eval()), logits(apart.eval()))
    assert not norms(mrrope.unpatch(model))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    ids = tokens(1, 8)
    with torch.no_grad():
        exported = torch.export.export(fused(), (ids,), {"use_cache": False}, strict=strict)
        found = exported.module()(ids, use_cache=False).logits
    assert_same(found, logits(reference(), input_ids=ids))


def test_hooks_of_accelerate_that_came_first() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    accelerate.hooks.attach_execution_device_hook(model, torch.device("cpu"))
    assert not norms(mrrope.patch(model, "mrrope_pro", **PATCH))
    assert_same(logits(model), logits(reference()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded_by_accelerate(when: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("qwen3")
    plain = logits(model)
    if when == "before":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    accelerate.cpu_offload(model, torch.device("cpu"))
    if when == "after":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    want = logits(reference("qwen3"))
    assert_same(logits(model), want)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same(logits(model), want)
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


def test_without_memory() -> None:
    assert fused().to("meta")(input_ids=tokens(1, 4).to("meta")).logits.is_meta


def test_spread_weights_are_normed_by_the_models_own_code(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    norm = fused().model.norm
    form, x = FusedNorms().state_of(norm), torch.ones(2, norm.weight.numel())
    assert form.is_of(norm, x)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), init_device_mesh("cpu", (1,))))
    assert not form.is_of(norm, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(cuda: str, dtype: torch.dtype) -> None:
    model, apart, exact = (tiny_model("llama").to(cuda, dtype) for _ in range(3))
    for one, fuse_norms in ((model, True), (apart, False), (exact.double(), False)):
        mrrope.patch(one, "yarn", scale=4.0, fuse_norms=fuse_norms)
    ids = tokens(2, 24).to(cuda)
    found = {}
    for name, one in (("fused", model), ("apart", apart), ("exact", exact)):
        one(input_ids=ids, labels=ids).loss.backward()
        found[name] = torch.cat([weight.grad.double().flatten() for weight in one.parameters()])
    errors = {name: relative(found[name], found["exact"]) for name in ("fused", "apart")}
    assert errors["fused"] < 1.2 * errors["apart"]

    norm, x = model.model.norm, torch.randn(7, model.config.hidden_size, device=cuda, dtype=dtype)
    with torch.no_grad():
        want = norm(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = norm(x)
        captured.fill_(math.nan)
        graph.replay()
    assert torch.equal(captured, want)


# --- models that norm q and k ---


@pytest.mark.parametrize("family", QK_NORMS)
@pytest.mark.parametrize("sizes", [(4, 1), (1, 1)], ids=["one for k", "one"])
def test_one_head(family: str, sizes: tuple[int, int]) -> None:
    config = tiny_model(family).config
    config.num_attention_heads, config.num_key_value_heads = sizes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.normal_(weight, 1.0, 0.5)
    want = logits(mrrope.patch(copy.deepcopy(model), "mrrope_pro", **PATCH | {"fuse_norms": False}))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert {layer.self_attn.k_norm for layer in model.model.layers} < {*norms(model)}
    assert_same(logits(model), want)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_what_happens_between_norm_and_rotation_still_does(clip: float | None) -> None:
    models = tiny_model("olmoe"), tiny_model("olmoe")
    for model, fuse_norms in zip(models, (True, False), strict=True):
        model.config.clip_qkv = clip
        mrrope.patch(model, "mrrope_pro", **PATCH | {"fuse_norms": fuse_norms})
    assert_same(*map(logits, models))


def test_a_norm_called_by_itself_norms() -> None:
    x = torch.randn(3, 16)
    for layer, own in zip(fused("qwen3").model.layers, tiny_model("qwen3").model.layers, strict=True):
        assert_same(layer.self_attn.q_norm(x), own.self_attn.q_norm(x))


class Quantized(nn.Linear):
    """A projection that keeps its weights in eight bits."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=False)
        self.scale = float(original.weight.abs().max()) / 127
        self.weight = nn.Parameter((original.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantized_projections() -> None:
    models = tiny_model("qwen3"), tiny_model("qwen3")
    for model, fuse_norms in zip(models, (True, False), strict=True):
        for layer in model.model.layers:
            layer.self_attn.q_proj = Quantized(layer.self_attn.q_proj)
        mrrope.patch(model, "mrrope_pro", **PATCH | {"fuse_norms": fuse_norms})
    assert norms(models[0])
    assert_same(*map(logits, models))


def test_attention_weights_are_given() -> None:
    model, apart = fused("qwen3"), reference("qwen3")
    for which in (model, apart):
        which.set_attn_implementation("eager")
    got, want = (which(tokens(1, 9), output_attentions=True).attentions for which in (model, apart))
    assert len(got) == len(want) == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_models_beside_each_other() -> None:
    stock = tiny_model("qwen3")
    plain = logits(stock)
    models = [fused("qwen3"), fused("qwen3", scale=2.0)]
    want = [logits(reference("qwen3")), logits(reference("qwen3", scale=2.0))]
    for model, expected in zip(models, want, strict=True):
        assert torch.equal(logits(stock), plain)
        assert_same(logits(model), expected)
    mrrope.unpatch(models[0])
    assert torch.equal(logits(models[0]), plain)
    assert_same(logits(models[1]), want[1])


def test_patched_twice() -> None:
    model = fused("qwen3", scale=2.0)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert norms(model)
    assert_same(logits(model), logits(reference("qwen3")))
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))


DISTRIBUTED = """
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import mrrope
from mrrope.hf.fusion.rms_norm import FusedNorms
from patched_models import logits
from tiny_models import tiny_model, tokens

PATCH = {"scale": 4.0, "original_max_position": 64, "fuse_norms": True}
folder = Path(sys.argv[1])


def tensor_parallel(family):
    model = AutoModelForCausalLM.from_pretrained(folder / family, tp_plan="auto").eval()
    mrrope.patch(model, "mrrope_pro", **PATCH)
    return {"logits": logits(model)}


def fully_sharded(family, when):
    mesh = init_device_mesh("cpu", (2,))
    model = tiny_model(family)
    if when == "before":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    if when == "after":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    count = sum(FusedNorms().state_of(module) is not None for module in model.modules())
    model.train()(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss.backward()
    gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    return {"gradients": gradients, "logits": logits(model.eval()), "norms": count}


for family in ("qwen3", "olmo2"):
    for test in (tensor_parallel, fully_sharded):
        for arguments in [()] if test is tensor_parallel else [("before",), ("after",)]:
            result = test(family, *arguments)
            if torch.distributed.get_rank() == 0:
                torch.save(result, folder / "-".join([test.__name__, family, *arguments]))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The results of the script above in two processes on the CPU; fails where a part did not finish."""
    folder = tmp_path_factory.mktemp("distributed")
    for family in QK_NORMS:
        tiny_model(family).save_pretrained(folder / family)
    return run_on_two_ranks(DISTRIBUTED, folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", QK_NORMS)
def test_tensor_parallel(distributed: Callable[[str], dict[str, Any]], family: str) -> None:
    assert_same(distributed(f"tensor_parallel-{family}")["logits"], logits(reference(family)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", QK_NORMS)
def test_fully_sharded(distributed: Callable[[str], dict[str, Any]], family: str, when: str) -> None:
    result = distributed(f"fully_sharded-{family}-{when}")
    assert result["norms"] == (len(norms(fused(family))) if when == "before" else 0), "sharded weights are left alone"
    apart = reference(family)
    assert_same(result["logits"], logits(apart))
    assert_same_gradients(result["gradients"], gradients(apart.train()))
