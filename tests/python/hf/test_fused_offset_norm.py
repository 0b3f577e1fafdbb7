"""RMSNorms of patched models that add 1 to their weight: one op, one rounding, and no other change.

The reference is the same model patched without fuse_norms, and float64 arithmetic.
"""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import mrrope
from mrrope.hf.fusion.norm_probe import form_of
from mrrope.hf.fusion.offset_norm import offset_rms_norm
from mrrope.hf.fusion.rms_norm import FusedNorms

pytest.importorskip("transformers")

from model_tolerance import relative
from op_counter import OpCounter
from patched_models import Snapshot, assert_same, assert_same_gradients, gradients, logits
from rotary_reference import TOLERANCES
from tiny_models import tiny_model, tokens
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

FAMILIES = {
    "gemma": "two a layer, one at the end",
    "gemma2": "four a layer",
    "gemma3_text": "q and k, per head, after their transpose",
    "qwen3_next": "q and k, before their transpose, from a projection with a gate",
    "qwen3_5_text": "the same, with M-RoPE",
    "vaultgemma": "no norms after the attention",
}
PATCH = {"scale": 4.0, "original_max_position": 64, "fuse_norms": True}
EPS = 1e-6
SHAPES = [(64,), (5, 64), (2, 3, 256), (2, 3, 258), (3, 1152), (2, 3, 2, 640), (1, 7, 4096), (2, 0, 64), (0, 640)]

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def fused(family: str, **options: Any) -> PreTrainedModel:
    return mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | options)


def reference(family: str) -> PreTrainedModel:
    return fused(family, fuse_norms=False)


def offset_norms(model: nn.Module) -> list[nn.Module]:
    forms = {module: FusedNorms().state_of(module) for module in model.modules()}
    return [module for module, form in forms.items() if form is not None and form.weight_offset == 1.0]


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    return values.to(device, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.detach().double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1.0 + weight.detach().double())


def assert_rounded_once(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    want = exact(x, weight)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    tolerance = TOLERANCES[x.dtype]
    arithmetic = tolerance.arithmetic + 16 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    allowed = (tolerance.rounding + arithmetic) * want.abs() + torch.finfo(x.dtype).smallest_normal
    assert ((got.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = fused(family)
    assert len(offset_norms(model)) > len(model.model.layers)
    with OpCounter("qk_norm_rotary") as counter:
        found = logits(model)
    assert counter.count == len(offset_norms(model))
    assert_same(found, logits(reference(family)))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "qwen3_5_text"])
def test_norms_of_q_and_k_are_among_them(family: str) -> None:
    model = fused(family)
    of_heads = [module for name, module in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    assert of_heads
    assert {*of_heads} < {*offset_norms(model)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_rounds_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    assert_rounded_once(offset_rms_norm(x, weight, EPS, 1.0), x, weight)


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (0, 1, 2, 3), (2, 1, 0, 3)])
def test_it_keeps_the_strides_of_heads(dims: tuple[int, ...]) -> None:
    x, weight = random(2, 3, 5, 64).permute(dims), random(64)
    got = offset_rms_norm(x, weight, EPS, 1.0)
    assert got.stride() == x.stride()
    assert_rounded_once(got, x, weight)


def test_heads_from_a_projection_with_a_gate() -> None:
    q, _ = random(2, 5, 3, 128).chunk(2, dim=-1)
    weight = random(64)
    assert_rounded_once(offset_rms_norm(q, weight, EPS, 1.0), q, weight)


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 3, 5, 64), (4, 640)])
def test_gradients(shape: tuple[int, ...]) -> None:
    x, weight = (random(*size, dtype=torch.float64).requires_grad_() for size in (shape, shape[-1:]))
    assert torch.autograd.gradcheck(lambda *inputs: offset_rms_norm(*inputs, EPS, 1.0), (x, weight), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_other_dtypes(family: str, dtype: torch.dtype) -> None:
    """As near as the model's own code, or nearer, to the same weights in float64."""
    model, apart, precise = (tiny_model(family).to(dtype) for _ in range(3))
    for one, fuse_norms in ((model, True), (apart, False), (precise.double(), False)):
        mrrope.patch(one, "yarn", scale=4.0, fuse_norms=fuse_norms)
    want = logits(precise)
    assert relative(logits(model), want) < 1.1 * relative(logits(apart), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family: str) -> None:
    model = tiny_model(family)
    before, plain = Snapshot(model), logits(model)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    mrrope.unpatch(model)
    before.assert_untouched()
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stand_on_their_own(clone: Any) -> None:
    model = fused("gemma3_text")
    found = logits(model)
    other = clone(model)
    mrrope.unpatch(model)
    assert torch.equal(logits(other), found)


def test_training_after_inference_mode() -> None:
    """The identity table outlives the mode in which it was first needed."""
    model = fused("gemma3_text").double()
    with torch.inference_mode():
        model(input_ids=tokens(2, 24))
    assert_same_gradients(gradients(model.float().train()), gradients(reference("gemma3_text").train()))


class TestOwnCode:
    """Calls that the op cannot serve."""

    @pytest.fixture
    def norm(self) -> nn.Module:
        return fused("gemma3_text").model.norm

    def test_rows_that_are_not_contiguous(self, norm: nn.Module) -> None:
        x = random(norm.weight.numel(), 3).T
        with OpCounter("qk_norm_rotary") as counter, torch.no_grad():
            assert_rounded_once(norm(x), x, norm.weight)
        assert counter.count == 0

    def test_tensors_without_data(self, norm: nn.Module) -> None:
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert norm(mode.from_tensor(random(3, norm.weight.numel()))).shape == (3, norm.weight.numel())
        x = random(3, norm.weight.numel())
        with torch.no_grad():
            assert_rounded_once(norm(x), x, norm.weight)

    def test_the_meta_device(self, norm: nn.Module) -> None:
        assert norm.to("meta")(random(3, norm.weight.numel()).to("meta")).is_meta

    def test_autocast(self, norm: nn.Module) -> None:
        x = random(3, norm.weight.numel())
        with torch.autocast("cpu", dtype=torch.bfloat16), OpCounter("qk_norm_rotary") as counter, torch.no_grad():
            norm(x)
        assert counter.count == 0

    def test_an_odd_number_of_components(self) -> None:
        assert form_of(Gemma3RMSNorm(63)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 640), (1, 2, 5, 256), (3, 1, 64)])
def test_on_a_gpu(cuda: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * random(*shape, dtype=dtype, device=cuda), random(shape[-1], dtype=dtype, device=cuda)
    got = offset_rms_norm(x, weight, EPS, 1.0)
    assert_rounded_once(got, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = offset_rms_norm(x, weight, EPS, 1.0)
    captured.fill_(math.nan)
    graph.replay()
    assert torch.equal(captured, got)


def test_captured_before_the_first_call(cuda: str) -> None:
    """The identity table of a graph holds nothing before a replay, and no other call may read it."""
    x, weight = (random(*shape, device=cuda) for shape in ((3, 66), (66,)))  # a size of this test alone
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = offset_rms_norm(x, weight, EPS, 1.0)
    assert_rounded_once(offset_rms_norm(x, weight, EPS, 1.0), x, weight)
    graph.replay()
    assert_rounded_once(captured, x, weight)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_training_on_a_gpu(cuda: str, family: str) -> None:
    model, apart = (patch(family).to(cuda).train() for patch in (fused, reference))
    ids = tokens(2, 24).to(cuda)
    found = []
    for one in (model, apart):
        one(input_ids=ids, labels=ids).loss.backward()
        found.append(torch.cat([weight.grad.flatten() for weight in one.parameters() if weight.grad is not None]))
    assert relative(*found) < 2e-5
