"""The norms of patched models: torch's kernel norms, and everything else stays as it was.

The reference is the same model, patched without fuse_norms; and float64 arithmetic.
"""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.fusion.norm_probe import form_of
from mrrope.hf.fusion.rms_norm import norm_fused_in
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
from transformers import PreTrainedModel
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

FAMILIES = {
    "llama": "two a layer, one at the end",
    "qwen3": "those of q and k are left to the rotation",
    "llama4_text": "another name for eps",
    "deepseek_v3": "norms within the attention",
    "olmo2": "norms after the attention",
    "smollm3": "layers that do not rotate",
}
PATCH = {"scale": 4.0, "original_max_position": 64}
OTHERS = {
    "gemma3_text": "1 + weight",
    "cohere": "norms that take the mean away",
    "stablelm": "torch's own norms",
}

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What torch's norm is called with."""
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
    return [module for module in model.modules() if norm_fused_in(module) is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, calls: list[torch.Tensor]) -> None:
    model = fused(family)
    found = logits(model)
    assert len(calls) == len(norms(model)) > len(model.model.layers)
    assert_same(found, logits(reference(family)))


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
def test_other_dtypes(dtype: torch.dtype, calls: list[torch.Tensor]) -> None:
    """As near as the model's own code, or nearer, to the same weights in float64."""
    model, apart, exact = (tiny_model("llama").to(dtype) for _ in range(3))
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


def test_patched_anew_without() -> None:
    model = fused()
    mrrope.patch(model, "mrrope_pro", fuse_norms=False, **PATCH)
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


def test_with_everything_else() -> None:
    model = fused(fuse_projection=True, scale="auto", max_scale=8.0)
    apart = reference(scale="auto", max_scale=8.0)
    options = {"do_sample": False, "max_new_tokens": 80}
    assert_same_text(*(generated(one, tokens(2, 9), **options) for one in (model, apart)))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_stand_on_their_own(how: Callable[[Any], Any]) -> None:
    model = fused()
    found, plain = logits(model), logits(tiny_model("llama"))
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


def test_another_forward_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    found = logits(model)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: 2 * norm.weight * x)
    changed = logits(model)
    assert relative(changed, found) > 0.1
    assert_same(changed, logits(reference()))


@pytest.mark.parametrize("change", [with_another_eps, with_weights_in_another_dtype, with_a_hook, with_other_weights])
def test_what_changes_later_is_seen(change: Callable[[PreTrainedModel], None]) -> None:
    models = [fused(), reference()]
    before = logits(models[0])
    for model in models:
        change(model)
    found = [logits(model) for model in models]
    assert found[0].dtype == found[1].dtype
    assert_same(*found)
    assert (found[0] - before).norm() > 0.01 * before.norm() or found[0].dtype != before.dtype


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


def test_autocast(calls: list[torch.Tensor]) -> None:
    model, apart = fused(), reference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [logits(one) for one in (model, apart)]
    assert not calls
    assert torch.equal(*found)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_training(checkpointing: str | None) -> None:
    model, apart = fused().train(), reference().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    assert_same_gradients(gradients(model, use_cache=False), gradients(apart))


def test_compiled_it_is_the_model_s_own_code(dynamo: Any, calls: list[torch.Tensor]) -> None:
    model = fused()
    found = logits(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert not calls
    assert_same(found, logits(reference()))


@pytest.mark.usefixtures("process_group")
def test_sharded_later() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fused()
    mesh = init_device_mesh("cpu", (1,))
    for norm in norms(model):
        fully_shard(norm, mesh=mesh)
    assert_same(logits(model), logits(reference()))
    mrrope.unpatch(model)
    assert not norms(model)
    assert_same(logits(model), logits(tiny_model("llama")))


@pytest.mark.parametrize("family", OTHERS)
def test_norms_of_other_forms_are_left_alone(family: str) -> None:
    model = tiny_model(family)
    if family == "stablelm":
        for layer in model.model.layers:
            layer.input_layernorm = nn.RMSNorm(model.config.hidden_size)
    assert not norms(mrrope.patch(model, "mrrope_pro", **PATCH))


def test_norms_that_keep_other_values_are_tried_by_themselves() -> None:
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
    "the mean taken away": (lambda: CohereLayerNorm(4096), None),
    "the mean taken away, by torch": (lambda: nn.LayerNorm(4096, bias=False), None),
    "large weights": (lambda: with_weights(LlamaRMSNorm(4096), 60.0), 0.0),
    "large weights, and 1": (lambda: with_weights(Gemma3RMSNorm(4096), 60.0), 1.0),
    "weights of zero": (lambda: with_weights(LlamaRMSNorm(4096), 0.0), 0.0),
    "weights of zero, and 1": (lambda: with_weights(Gemma3RMSNorm(4096), 0.0), 1.0),
    "weights kept elsewhere": (lambda: LlamaRMSNorm(0), None),
    "not to be called": (lambda: Uncallable(4096), None),
    "more bits than it is given": (lambda: Widening(4096), None),
    "integers": (lambda: Quantising(4096), None),
    "another shape": (lambda: Flattening(4096), None),
    "another device": (lambda: Moving(4096), None),
    "something else in training": (lambda: OfItsMode(4096), None),
    "not to be copied": (lambda: Uncopyable(4096), None),
    "no shape yet": (lambda: nn.LazyBatchNorm1d(), None),
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
    make, offset = NORMS[kind]
    norm = make().to(dtype)
    before = dict(norm.named_parameters())
    form = form_of(norm)
    assert (form and form.weight_offset) == offset
    assert dict(norm.named_parameters()) == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["lora", "norms"])
def test_adapters(method: str, when: str) -> None:
    peft = pytest.importorskip("peft")
    adapter = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False),
        "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"),
    }[method]

    def wrapped(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapter()).train()

    apart = wrapped(reference())
    patch = functools.partial(mrrope.patch, method="mrrope_pro", **PATCH)
    model = wrapped(patch(tiny_model("llama"))) if when == "before" else patch(wrapped(tiny_model("llama")))
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


def test_without_memory() -> None:
    assert fused().to("meta")(input_ids=tokens(1, 4).to("meta")).logits.is_meta


def test_spread_weights_are_normed_by_the_models_own_code(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    norm = fused().model.norm
    form, x = norm_fused_in(norm), torch.ones(2, norm.weight.numel())
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
