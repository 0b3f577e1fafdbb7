"""Patched models that do not rotate by the stock function: replaced by another library, or custom attention."""

import functools
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from tiny_models import tiny_model, tokens
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

from mrrope.hf import rotary_embedding

SETTINGS = {"rotary_dim": 16, "base": 1e4, "original_max_position": 64}
TABLE = mrrope.frequency_table("mrrope_pro", **SETTINGS, scale=4.0)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(tokens(2, 24)).logits


def with_frequencies(model: PreTrainedModel, table: mrrope.FrequencyTable) -> PreTrainedModel:
    """Set a table's frequencies in the stock model."""
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(table.inv_freq)
    rotary.attention_scaling = table.attention_factor
    return model


def assert_reads_by_the_table(model: nn.Module) -> None:
    reference = with_frequencies(tiny_model("llama"), TABLE)
    assert relative(logits(model), logits(reference)) < tolerance(reference, logits)


def their_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Another library's replacement, which takes any tensors for cosines and sines."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@pytest.fixture(autouse=True)
def llamas_own_function(monkeypatch: pytest.MonkeyPatch, stock: Any) -> None:
    """Restore Llama's own function after the test."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stock)


# --- replaced ---

REPLACED = r"modeling_llama.apply_rotary_pos_emb must be what mrrope.patch put there, got .*{}: apply other patches"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_function_put_over_ours_is_noticed(compiled: bool, dynamo: Any) -> None:
    patched = mrrope.patch(tiny_model("llama"), TABLE)
    model = torch.compile(patched, backend="eager") if compiled else patched
    logits(model)
    modeling_llama.apply_rotary_pos_emb = their_rotation
    with pytest.raises(RuntimeError, match=REPLACED.format("their_rotation")):
        logits(model)


def test_liger_applied_after_patch_is_noticed() -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    model = mrrope.patch(tiny_model("llama"), TABLE)
    others = dict.fromkeys(("rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False)
    liger.apply_liger_kernel_to_llama(rope=True, **others)
    with pytest.raises(RuntimeError, match=REPLACED.format("liger_rotary_pos_emb")):
        logits(model)


def test_patching_again_goes_over_what_was_put_over_ours() -> None:
    models = [mrrope.patch(tiny_model("llama"), TABLE) for _ in range(2)]
    modeling_llama.apply_rotary_pos_emb = their_rotation
    mrrope.patch(models[1], TABLE)
    for model in models:
        assert_reads_by_the_table(model)
    plain = logits(tiny_model("llama"))
    for model in models:
        assert torch.equal(logits(mrrope.unpatch(model)), plain)
    assert modeling_llama.apply_rotary_pos_emb is their_rotation


def test_a_function_with_ligers_parameters_is_fused(recwarn: pytest.WarningsRecorder) -> None:
    def rotation(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        return their_rotation(q, k, cos, sin, unsqueeze_dim)

    modeling_llama.apply_rotary_pos_emb = rotation
    model = mrrope.patch(tiny_model("llama"), TABLE)
    assert not recwarn.list
    assert_reads_by_the_table(model)


@pytest.mark.parametrize("keeps", ["__wrapped__", "closure"])
def test_a_wrapper_over_ours_is_left_alone(keeps: str) -> None:
    model = mrrope.patch(tiny_model("llama"), TABLE)
    ours = modeling_llama.apply_rotary_pos_emb
    calls = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(*args, **kwargs)

    modeling_llama.apply_rotary_pos_emb = functools.wraps(ours)(wrapper) if keeps == "__wrapped__" else wrapper
    assert_reads_by_the_table(model)
    assert calls


# --- custom attention ---


class CustomAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotated(q, k, position_embeddings)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class RotatesInline(CustomAttention):
    def rotated(self, q, k, position_embeddings):
        c, s = position_embeddings
        return tuple(x * c[:, None] + rotate_half(x) * s[:, None] for x in (q, k))


def rotate_by(x, embedding):
    """An apply function of unknown name and parameters."""
    return x * embedding[0].unsqueeze(1) + rotate_half(x) * embedding[1].unsqueeze(1)


class RotatesByAHelper(CustomAttention):
    def rotated(self, q, k, position_embeddings):
        return rotate_by(q, position_embeddings), rotate_by(k, position_embeddings)


class InheritsItsRotation(RotatesByAHelper):
    pass


class RotatesByTheStockFunction(CustomAttention):
    def rotated(self, q, k, position_embeddings):
        c, s = position_embeddings
        return modeling_llama.apply_rotary_pos_emb(q, k, c, s)


class RotatesByOneOfTheBelow(CustomAttention):
    def rotated(self, q, k, position_embeddings):
        return self.rotate(q, position_embeddings), self.rotate(k, position_embeddings)


def rotate_by_cast(x, embedding):
    c, s = (part.to(x.dtype).unsqueeze(1) for part in embedding)
    return x * c + rotate_half(x) * s


def rotate_by_halves(x, embedding):
    first, second = x.chunk(2, dim=-1)
    c, s = (part[..., : first.shape[-1]].unsqueeze(1) for part in embedding)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rotate_by_doubled(x, embedding):
    c, s = (torch.cat((part, part), dim=-1).unsqueeze(1) for part in embedding)
    return x * c + rotate_half(x) * s


def rotate_by_first_half(x, embedding):
    first, second = x.chunk(2, dim=-1)
    c, s = (part.chunk(2, dim=-1)[0].unsqueeze(1) for part in embedding)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rotate_by_repeated(x, embedding):
    c, s = (part[..., : part.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1) for part in embedding)
    return x * c + rotate_half(x) * s


def rotate_by_complex(x, embedding):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    c, s = (part.unsqueeze(1) for part in embedding)
    return torch.view_as_real(pairs * torch.complex(c.to(x.dtype), s.to(x.dtype))).flatten(-2)


class FailsInTheProbe(RotatesByAHelper):
    """Its own code raises where it has no mask, as in a probe."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        assert attention_mask.dim() == 4, "a mask of four dimensions"
        return super().forward(hidden_states, position_embeddings)


def custom_llama(attention: type[nn.Module], layers: slice = slice(None)) -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers[layers]:
        layer.self_attn.__class__ = attention
    return model


@pytest.mark.parametrize("layers", [slice(None), slice(-1, None)], ids=["all", "last"])
@pytest.mark.parametrize("attention", [RotatesInline, RotatesByAHelper, InheritsItsRotation])
def test_attention_that_rotates_by_itself_gets_the_table(attention: type[nn.Module], layers: slice) -> None:
    model = custom_llama(attention, layers).train()
    plain, random_state = logits(model), torch.get_rng_state()
    with pytest.warns(UserWarning, match=f"not the fused op: {attention.__name__} computes with cosines and sines"):
        mrrope.patch(model, TABLE)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(logits(model), logits(with_frequencies(custom_llama(attention, layers).train(), TABLE)))
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


@pytest.mark.parametrize("hooked", ["hook", "forward"])
def test_attention_with_hooks_is_probed_too(hooked: str) -> None:
    """accelerate sets another forward on the instance."""
    model = custom_llama(RotatesByAHelper)
    for layer in model.model.layers:
        attention = layer.self_attn
        if hooked == "hook":
            attention.register_forward_hook(lambda *_: pytest.fail("a probe must not run hooks"))
        else:
            attention.forward = functools.partial(type(attention).forward, attention)
    with pytest.warns(UserWarning, match="RotatesByAHelper computes with cosines and sines"):
        mrrope.patch(model, TABLE)


def test_attention_that_rotates_by_itself_cannot_follow() -> None:
    model = custom_llama(RotatesByAHelper)
    plain = logits(model)
    with pytest.raises(ValueError, match=r"scale must be a number .*RotatesByAHelper computes with"):
        mrrope.patch(model, "mrrope_pro", scale="auto")
    assert torch.equal(logits(model), plain)


def test_attention_on_the_meta_device_is_read_instead() -> None:
    model = custom_llama(RotatesInline)
    for layer in model.model.layers:
        layer.self_attn.to("meta")
    with pytest.warns(UserWarning, match="RotatesInline computes with cosines and sines itself"):
        mrrope.patch(model, TABLE)


def test_custom_attention_that_uses_the_stock_function_is_fused(recwarn: pytest.WarningsRecorder) -> None:
    model = mrrope.patch(custom_llama(RotatesByTheStockFunction), TABLE)
    assert not recwarn.list
    assert_reads_by_the_table(model)


@pytest.mark.parametrize(
    "rotate",
    [
        *(rotate_by, rotate_by_cast, rotate_by_halves, rotate_by_first_half),
        *(rotate_by_doubled, rotate_by_repeated, rotate_by_complex),
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("method", ["one table", "heads", "layers"])
@torch.no_grad()
def test_what_is_handed_over_cannot_be_used_as_cosines(
    rotate: Callable[..., Tensor], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that the probe misses raises at its first forward, whatever the numbers of tokens and sequences."""
    monkeypatch.setattr(RotatesByOneOfTheBelow, "rotate", staticmethod(rotate), raising=False)
    monkeypatch.setattr(rotary_embedding, "own_rotation", lambda *_: (None, {}))
    model = custom_llama(RotatesByOneOfTheBelow)
    heads = mrrope.HeadTables([TABLE, mrrope.frequency_table("yarn", **SETTINGS, scale=4.0)])
    tables: dict[str, Any] = {"heads": heads, "layers": mrrope.TableSet([heads, TABLE])}
    mrrope.patch(model, tables.get(method, TABLE))
    half = model.config.hidden_size // model.config.num_attention_heads // 2
    for batch, length in itertools.product((1, 2, 4), (1, 2, 5, 10, half, half + 1, 2 * half, 24)):
        with pytest.raises(RuntimeError, match=r"must match the size|must be broadcastable|Sizes of tensors"):
            model(tokens(batch, length), use_cache=False)


def test_attention_whose_probe_fails_is_named() -> None:
    """One warning for all its layers; the model gets the fused op."""
    model = custom_llama(FailsInTheProbe)
    words = r"LlamaForCausalLM gets the fused op, and FailsInTheProbe could not be probed \(AttributeError: .*raises"
    with pytest.warns(UserWarning, match=words) as found:
        mrrope.patch(model, TABLE)
    assert len(found) == 1
    with pytest.raises((RuntimeError, AssertionError, AttributeError)):
        logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(tiny_model("llama"), TABLE)


def test_probing_leaves_no_trace_in_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    own_forward = LlamaAttention.forward

    def counting(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        self.register_buffer("seen", hidden_states, persistent=False)
        return own_forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counting)
    mrrope.patch(model, TABLE)
    attentions = [layer.self_attn for layer in model.model.layers]
    assert not any(hasattr(attention, "calls") or hasattr(attention, "seen") for attention in attentions)
    assert all(module.training for module in model.modules())
    for _ in range(3):
        logits(model.eval())
    assert [attention.calls for attention in attentions] == [3, 3]


def test_probing_leaves_functions_in_place() -> None:
    before = dict(vars(sys.modules[modeling_llama.__name__]))
    model = custom_llama(RotatesByAHelper)
    with pytest.warns(UserWarning, match="not the fused op"):
        mrrope.patch(model, TABLE)
    assert {name: value for name, value in vars(modeling_llama).items() if value is not before.get(name)} == {}
