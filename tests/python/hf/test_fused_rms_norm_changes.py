"""Fused RMSNorms see what changes after ``patch``: weights, eps, hooks, classes."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope
from mrrope.hf.fusion.norm_probe import form_of

pytest.importorskip("transformers")

from fused_norms import PATCH, QK_NORMS, fused, norms, reference
from model_tolerance import relative
from patched_models import (
    assert_same,
    assert_same_gradients,
    gradients,
    logits,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

OTHERS = {
    "cohere": "norms that subtract the mean, those of q and k included",
    "stablelm": "nn.RMSNorm",
}


pytestmark = pytest.mark.usefixtures("quiet_transformers")


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


def test_a_class_that_was_derived_meanwhile_stays(norm_inputs: list[torch.Tensor]) -> None:
    model = fused("qwen3")
    found = norms(model)
    for norm in found:
        norm.__class__ = type("Derived", (type(norm),), {})
    logits(model)
    assert len(norm_inputs) == len(found)
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
