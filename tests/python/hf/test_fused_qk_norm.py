"""Models that norm q and k: norms fused with the rotation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope

pytest.importorskip("transformers")

from fused_norms import PATCH, QK_NORMS, fused, norms, reference
from patched_models import (
    assert_same,
    assert_same_gradients,
    gradients,
    logits,
)
from tiny_models import tiny_model, tokens
from transformers import AutoModelForCausalLM
from two_ranks import run_on_two_ranks

pytestmark = pytest.mark.usefixtures("quiet_transformers")


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
