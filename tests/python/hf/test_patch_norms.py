"""Models that norm q and k, patched: one op norms and rotates, and everything else stays as it was.

The reference is the same model, patched, with its norms left to its own code.
"""

import contextlib
import copy
import functools
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mrrope
from mrrope.hf.conventions import Convention, DeferredNorm
from mrrope.hf.fusion.qk_norm import norms_wait_in

pytest.importorskip("transformers")

from model_tolerance import relative
from patched_models import (
    IN_A_FRESH_PROCESS,
    Snapshot,
    assert_same,
    assert_same_gradients,
    generated,
    gradients,
    logits,
)
from tiny_models import tiny_model, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel
from two_ranks import run_on_two_ranks

FAMILIES = {
    "qwen3": "per head",
    "gemma3_text": "per head, 1 + w, two kinds of layers",
    "olmo2": "over all heads",
    "qwen3_5_text": "per head, 1 + w, part of the head, several positions a token, a gate beside q",
    "lfm2": "other names",
    "gemma4_text": "q and k rotated apart",
}
PATCH = {"scale": 4.0, "original_max_position": 64}

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def patched(family: str, **options: Any) -> PreTrainedModel:
    return mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | options)


def reference(family: str, **options: Any) -> PreTrainedModel:
    """Patched too, with norm and rotation apart."""
    with norms_left_alone():
        return patched(family, **options)


@contextlib.contextmanager
def norms_left_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("mrrope.hf.patch.defer_norms", lambda *_: None)
        yield


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules whose norms are left to the rotation."""
    return [module for module in model.modules() if norms_wait_in(module)]


class Calls(TorchDispatchMode):
    """Counts the ops of mrrope."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "mrrope":
            self.counts[function._schema.name.removeprefix("mrrope::")] += 1
        return function(*args, **kwargs or {})


def calls(model: nn.Module) -> Counter[str]:
    with Calls() as mode:
        logits(model)
    return mode.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model, apart = patched(family), reference(family)
    found = attentions(model)
    assert found
    assert not attentions(apart)
    separate = 2 if family == "gemma4_text" else 1
    counts = calls(model)
    assert counts["qk_norm_rotary"] == separate * len(found)
    assert sum(counts.values()) == sum(calls(apart).values()), "one op for each rotation that there was"
    assert_same(logits(model), logits(apart))


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
@pytest.mark.parametrize("sizes", [(4, 1), (1, 1)], ids=["one for k", "one"])
def test_one_head(family: str, sizes: tuple[int, int]) -> None:
    """A norm of all heads is then one of the head, and goes with either kind."""
    config = tiny_model(family).config
    config.num_attention_heads, config.num_key_value_heads = sizes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.normal_(weight, 1.0, 0.5)
    with norms_left_alone():
        want = logits(mrrope.patch(copy.deepcopy(model), "mrrope_pro", **PATCH))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert calls(model)["qk_norm_rotary"] == len(model.model.layers)
    assert_same(logits(model), want)


def test_norms_of_two_kinds_in_one_rotation() -> None:
    """q over all its heads, k by the head."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2))
    norms = [DeferredNorm(torch.randn(size, generator=generator), 1e-6, 0.0) for size in (64, 16)]
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=10000.0, scale=4.0, original_max_position=64)
    packed, positions = table.packed(q.device), torch.arange(5)[None]
    convention = Convention("halves")
    all_of_q = nn.functional.rms_norm(q.transpose(1, 2).flatten(-2), (64,), norms[0].weight, 1e-6)
    normed = [
        all_of_q.unflatten(-1, (4, 16)).transpose(1, 2),
        nn.functional.rms_norm(k, (16,), norms[1].weight, 1e-6),
    ]
    found = convention.norm_and_rotate([q, k], norms, positions, packed, "bhsd")
    torch.testing.assert_close(found, convention.rotate(normed, positions, packed, "bhsd"))


def test_why_a_module_cannot_be_tried_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a defect of the op")

    monkeypatch.setattr(Convention, "norm_and_rotate", broken)
    with caplog.at_level("DEBUG", "mrrope.hf.fusion.qk_norm"):
        assert attentions(patched("qwen3")) == []
    assert "Qwen3Attention keeps its norms: it cannot be tried with its norms deferred" in caplog.text
    assert "a defect of the op" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_other_dtypes(family: str, dtype: torch.dtype) -> None:
    """As close to float64 as the model's own norm is, to within the rounding of either."""
    exact = logits(reference(family).double())
    found, apart = logits(patched(family).to(dtype)), logits(reference(family).to(dtype))
    assert found.dtype == dtype
    assert relative(found, exact) < max(1.25 * relative(apart, exact), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family: str) -> None:
    model = tiny_model(family)
    before, plain = Snapshot(model), logits(model)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert attentions(model)
    assert model.state_dict().keys() == {*before.keys}
    mrrope.unpatch(model)
    before.assert_untouched()
    assert torch.equal(logits(model), plain)


def test_a_layer_that_does_not_rotate_norms_by_itself() -> None:
    model = patched("exaone4")
    assert 0 < len(attentions(model)) < len(model.model.layers)
    assert_same(logits(model), logits(reference("exaone4")))


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "deepseek_v3", "cohere", "persimmon"])
def test_norms_of_another_kind_stay(family: str) -> None:
    """After the rotation, of what becomes q, or with a mean taken off."""
    model = tiny_model(family)
    if family == "cohere":
        config = model.config
        config.use_qk_norm = True
        model = type(model)(config).eval()
    model = mrrope.patch(model, "mrrope_pro", **PATCH)
    assert attentions(model) == []


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_what_happens_between_norm_and_rotation_is_noticed(clip: float | None) -> None:
    """Even where it changes nothing for the numbers that were tried."""
    model = tiny_model("olmoe")
    model.config.clip_qkv = clip
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert len(attentions(model)) == (0 if clip else len(model.model.layers))


def test_a_norm_called_by_itself_norms() -> None:
    model = patched("qwen3")
    x = torch.randn(3, 16)
    for attention, own in zip(attentions(model), tiny_model("qwen3").model.layers, strict=True):
        assert torch.equal(attention.q_norm(x), own.self_attn.q_norm(x))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_a_norm_see_it_norm(kind: str) -> None:
    model, apart = patched("qwen3").train(), reference("qwen3").train()
    seen: dict[nn.Module, list[Any]] = {model: [], apart: []}
    for which in seen:

        def hook(module: nn.Module, *tensors: Any, which: nn.Module = which) -> None:
            seen[which].append([(x[0] if isinstance(x, tuple) else x).detach() for x in tensors])

        getattr(which.model.layers[1].self_attn.q_norm, f"register_{kind}_hook")(hook)
    assert_same_gradients(gradients(model), gradients(apart))
    assert len(seen[model]) == len(seen[apart]) == 1
    for got, want in zip(seen[model][0], seen[apart][0], strict=True):
        assert_same(got, want)
    assert calls(model)["qk_norm_rotary"] == 2, "k of that layer alone, and the other layer"


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.Identity()], ids=["another", "none"])
def test_a_norm_put_in_later_is_used(norm: nn.Module) -> None:
    model, apart = patched("qwen3"), reference("qwen3")
    for which in (model, apart):
        which.model.layers[0].self_attn.q_norm = norm
    assert_same(logits(model), logits(apart))
    assert_same(logits(mrrope.unpatch(model)), logits(mrrope.unpatch(apart)))


def test_weights_changed_later_are_used() -> None:
    model, apart = patched("olmo2"), reference("olmo2")
    before = logits(model)
    for which in (model, apart):
        which.model.layers[0].self_attn.q_norm.weight.data.mul_(3.0)
        which.model.layers[1].self_attn.k_norm.weight = nn.Parameter(torch.full_like(
            which.model.layers[1].self_attn.k_norm.weight, 0.5
        ))  # fmt: skip
    assert relative(logits(model), before) > 1e-3
    assert_same(logits(model), logits(apart))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_an_eps_changed_later_is_used(compiles: bool, dynamo: Any) -> None:
    model, apart = patched("qwen3"), reference("qwen3")
    called = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    before = logits(called)
    for which in (model, apart):
        which.model.layers[0].self_attn.q_norm.variance_epsilon = 10.0
    assert relative(logits(called), before) > 1e-3
    assert_same(logits(called), logits(apart))


def test_hooks_on_all_modules_see_the_norms() -> None:
    model = patched("qwen3")
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        assert_same(logits(model), logits(reference("qwen3")))
    for attention in attentions(model):
        assert attention.q_norm in seen
        assert attention.k_norm in seen
    assert calls(model)["qk_norm_rotary"] == 2


def test_a_wrapped_forward_outlives_the_patch() -> None:
    model = patched("qwen3")
    for attention in attentions(model):
        attention.forward = functools.partial(attention.forward)
    assert_same(logits(model), logits(reference("qwen3")))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert attentions(model) == []
    assert_same(logits(model), logits(reference("qwen3")))
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))


def test_a_class_that_was_derived_meanwhile_stays() -> None:
    model = patched("qwen3")
    for attention in attentions(model):
        attention.__class__ = type("Derived", (type(attention),), {})
    assert calls(model)["qk_norm_rotary"] == 2
    assert {type(attention).__name__ for attention in attentions(copy.deepcopy(model))} == {"Derived"}
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert calls(model)["qk_norm_rotary"] == 2
    assert_same(logits(model), logits(reference("qwen3")))
    assert {type(layer.self_attn).__name__ for layer in model.model.layers} == {"Derived"}


@pytest.mark.usefixtures("process_group")
def test_unpatched_after_sharding() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = patched("qwen3")
    mesh = init_device_mesh("cpu", (1,))
    found = attentions(model)
    for attention in found:
        fully_shard(attention, mesh=mesh)
    assert_same(logits(model), logits(reference("qwen3")))
    mrrope.unpatch(model)
    assert attentions(model) == []
    assert all(isinstance(attention, FSDPModule) for attention in found)
    assert_same(logits(model), logits(tiny_model("qwen3")))


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> str:
    """An attention function that asks what its module is, and writes to it."""
    interfaces = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    sdpa = interfaces["sdpa"]

    def attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        module.last_length = query.shape[2]
        module.was_itself = isinstance(module, nn.Module) and "Attention" in module.__class__.__name__
        if hasattr(module, "left_over"):
            del module.left_over
        return sdpa(module, query, *args, **kwargs)

    monkeypatch.setitem(interfaces._global_mapping, "remembering", attend)
    return "remembering"


def test_attention_functions_get_what_they_take_for_the_module(remembering: str) -> None:
    model = patched("qwen3")
    model.set_attn_implementation(remembering)
    for attention in attentions(model):
        attention.left_over = True
    assert_same(logits(model), logits(reference("qwen3")))
    for attention in attentions(model):
        assert attention.last_length == 24
        assert attention.was_itself
        assert not hasattr(attention, "left_over")


def test_compiled_attention_functions_write_to_the_module(remembering: str, dynamo: Any) -> None:
    model = patched("qwen3")
    model.set_attn_implementation(remembering)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(logits(compiled), logits(reference("qwen3")))
    assert [attention.last_length for attention in attentions(model)] == [24, 24]


def test_an_attention_module_counts_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its model alone, not the ones by which it was tried."""
    model = tiny_model("qwen3").train()
    own_class = type(model.model.layers[0].self_attn)
    own_forward = own_class.forward

    def counting(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        self.register_buffer("seen", hidden_states, persistent=False)
        return own_forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(own_class, "forward", counting)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    found = attentions(model)
    assert len(found) == 2
    assert not any(hasattr(attention, "calls") or hasattr(attention, "seen") for attention in found)
    assert all(module.training for module in model.modules())
    for _ in range(3):
        logits(model.eval())
    assert [attention.calls for attention in found] == [3, 3]


class Quantized(nn.Linear):
    """A projection that keeps its weights in eight bits."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=False)
        self.scale = float(original.weight.abs().max()) / 127
        self.weight = nn.Parameter((original.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantized_projections() -> None:
    models = [tiny_model("qwen3") for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.q_proj = Quantized(layer.self_attn.q_proj)
    model = mrrope.patch(models[0], "mrrope_pro", **PATCH)
    with norms_left_alone():
        apart = mrrope.patch(models[1], "mrrope_pro", **PATCH)
    assert len(attentions(model)) == 2
    assert_same(logits(model), logits(apart))


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_autocast(family: str) -> None:
    """Weights in float32 make q and k float32 again in the model's own code: that is left to it."""
    model, apart = patched(family), reference(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), logits(apart))


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "qwen3_5_text"])
def test_training(family: str, checkpointing: str | None) -> None:
    model, apart = patched(family).train(), reference(family).train()
    want = gradients(apart)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    got = gradients(model, use_cache=False)
    assert_same_gradients(got, want)
    assert any("q_norm" in name for name in got)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_compiled_in_one_graph(family: str, dynamo: Any) -> None:
    model, apart = patched(family), reference(family)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(logits(compiled), logits(apart))
    ids = tokens(2, 24)
    want = gradients(apart.train())
    compiled.train()(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients({name: weight.grad for name, weight in model.named_parameters()}, want)


def test_compiled_before_it_is_patched(dynamo: Any) -> None:
    model = tiny_model("qwen3")
    plain = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(logits(compiled), plain)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert_same(logits(compiled), logits(reference("qwen3")))
    mrrope.unpatch(model)
    assert_same(logits(compiled), plain)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_generate(family: str, cache: str) -> None:
    options = {"cache_implementation": "static"} if cache == "static" else {}
    got, want = (generated(model, tokens(2, 12), **options) for model in (patched(family), reference(family)))
    assert torch.equal(got.sequences, want.sequences)
    assert_same(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_the_scale_follows_the_text(family: str) -> None:
    auto = {"scale": "auto", "max_scale": 4.0}
    model, apart = patched(family, **auto), reference(family, **auto)
    assert attentions(model)
    batch = torch.cat([nn.functional.pad(tokens(1, 40), (60, 0)), tokens(1, 100, seed=1)])
    call = {"input_ids": batch, "attention_mask": (batch != 0).long()}  # each with a table of its own
    assert_same(logits(model, **call), logits(apart, **call))
    got, want = (generated(which, tokens(1, 60)) for which in (model, apart))  # over a step
    assert torch.equal(got.sequences, want.sequences)
    assert_same(torch.stack(got.logits), torch.stack(want.logits))


def test_attention_weights_are_given() -> None:
    model, apart = patched("qwen3"), reference("qwen3")
    for which in (model, apart):
        which.set_attn_implementation("eager")
    got, want = (which(tokens(1, 9), output_attentions=True).attentions for which in (model, apart))
    assert len(got) == len(want) == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_models_beside_each_other() -> None:
    stock = tiny_model("qwen3")
    plain = logits(stock)
    models = [patched("qwen3"), patched("qwen3", scale=2.0)]
    want = [logits(reference("qwen3")), logits(reference("qwen3", scale=2.0))]
    for model, expected in zip(models, want, strict=True):
        assert torch.equal(logits(stock), plain)
        assert_same(logits(model), expected)
    mrrope.unpatch(models[0])
    assert torch.equal(logits(models[0]), plain)
    assert_same(logits(models[1]), want[1])


def test_patched_twice() -> None:
    model = patched("qwen3", scale=2.0)
    mrrope.patch(model, "mrrope_pro", **PATCH)
    assert attentions(model)
    assert_same(logits(model), logits(reference("qwen3")))
    assert torch.equal(logits(mrrope.unpatch(model)), logits(tiny_model("qwen3")))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_copies_stand_on_their_own(family: str, how: Callable[[Any], Any]) -> None:
    model = patched(family)
    found, plain = logits(model), logits(tiny_model(family))
    clone = how(model)
    assert len(attentions(clone)) == len(attentions(model))
    mrrope.unpatch(model)
    assert torch.equal(logits(clone), found)
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)
    assert type(clone.model.layers[0].self_attn) is type(model.model.layers[0].self_attn)


def test_unpickled_in_a_fresh_process(tmp_path: Path) -> None:
    cases = {}
    for family in ("qwen3", "olmo2"):
        plain, model = logits(tiny_model(family)), patched(family)
        cases[family] = (model, tokens(2, 24), logits(model), plain)
    path = tmp_path / "models.pickle"
    path.write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["lora", "norms"])
def test_adapters(method: str, when: str) -> None:
    peft = pytest.importorskip("peft")
    adapter = {
        "lora": lambda: peft.LoraConfig(
            r=4, target_modules=["q_proj", "k_proj"], lora_dropout=0.0, init_lora_weights=False
        ),
        "norms": lambda: peft.LNTuningConfig(target_modules=["q_norm", "k_norm"], task_type="CAUSAL_LM"),
    }[method]

    def wrapped(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapter()).train()

    apart = wrapped(reference("qwen3"))
    if when == "before":
        model = wrapped(patched("qwen3"))
    else:
        model = mrrope.patch(wrapped(tiny_model("qwen3")), "mrrope_pro", **PATCH)
    assert_same_gradients(gradients(model), gradients(apart))
    assert_same(logits(model.eval()), logits(apart.eval()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_accelerate(when: str) -> None:
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


DISTRIBUTED = """
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import mrrope
from mrrope.hf.fusion.qk_norm import norms_wait_in
from patched_models import logits
from tiny_models import tiny_model, tokens

PATCH = {"scale": 4.0, "original_max_position": 64}
folder = Path(sys.argv[1])


def attentions(model):
    return [module for module in model.modules() if norms_wait_in(module)]


def tensor_parallel(family):
    model = AutoModelForCausalLM.from_pretrained(folder / family, tp_plan="auto").eval()
    mrrope.patch(model, "mrrope_pro", **PATCH)
    return {"logits": logits(model), "waiting": len(attentions(model))}


def fully_sharded(family, when):
    mesh = init_device_mesh("cpu", (2,))
    model = tiny_model(family)
    if when == "before":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    if when == "after":
        mrrope.patch(model, "mrrope_pro", **PATCH)
    waiting = len(attentions(model))
    model.train()(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss.backward()
    gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    return {"gradients": gradients, "logits": logits(model.eval()), "waiting": waiting}


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
    """What the parts of the script above give in two processes on the CPU; fails where a part did not finish."""
    folder = tmp_path_factory.mktemp("distributed")
    for family in ("qwen3", "olmo2"):
        tiny_model(family).save_pretrained(folder / family)
    return run_on_two_ranks(DISTRIBUTED, folder)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_tensor_parallel(distributed: Callable[[str], dict[str, Any]], family: str) -> None:
    result = distributed(f"tensor_parallel-{family}")
    assert result["waiting"] == 0, "what is shared out among processes is left alone"
    assert_same(result["logits"], logits(reference(family)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_fully_sharded(distributed: Callable[[str], dict[str, Any]], family: str, when: str) -> None:
    result = distributed(f"fully_sharded-{family}-{when}")
    apart = reference(family)
    assert result["waiting"] == (len(apart.model.layers) if when == "before" else 0)
    assert_same(result["logits"], logits(apart))
    want: dict[str, Tensor] = gradients(apart.train())
    assert_same_gradients(result["gradients"], want)
