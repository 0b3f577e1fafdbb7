"""Fused RMSNorms under autocast, training, torch.compile, adapters, export, offloading and sharding."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.fusion.rms_norm import FusedNorms

pytest.importorskip("transformers")

from fused_norms import PATCH, QK_NORMS, fused, norms, reference
from model_tolerance import relative
from patched_models import (
    assert_same,
    assert_same_gradients,
    gradients,
    logits,
)
from tiny_models import tiny_model, tokens
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.mark.parametrize("family", ["llama", *QK_NORMS])
def test_autocast(family: str, norm_inputs: list[torch.Tensor]) -> None:
    model, apart = fused(family), reference(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [logits(one) for one in (model, apart)]
    assert not norm_inputs
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
def test_compiled_it_is_the_model_s_own_code(family: str, dynamo: Any, norm_inputs: list[torch.Tensor]) -> None:
    model, apart = fused(family), reference(family)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = logits(compiled)
    assert not norm_inputs
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
