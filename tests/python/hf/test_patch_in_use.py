"""Patched models in use: generate, compile, train, fine-tune, place, shard and copy.

The reference is the same model unfused, with the same frequencies set by hand. Where stock transformers cannot do a
thing on this machine, the reference fails first, and the test is skipped with its reason.
"""

import contextlib
import copy
import importlib.util
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mrrope

pytest.importorskip("transformers")

import transformers
from model_tolerance import relative
from patched_models import (
    CONVENTIONS,
    KNOWN,
    LENGTH,
    UNFUSABLE,
    assert_same,
    assert_same_gradients,
    assert_same_text,
    decoded,
    generated,
    gradients,
    logits,
    model_named,
    packed_tables,
    ready,
    turns_in_local_layers_alone,
    unfused,
)
from tiny_models import causal_lm_families, inputs, tiny_model, tokens
from transformers import PreTrainedModel
from two_ranks import run_on_two_ranks

SLIDING_WINDOW = 8

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@contextlib.contextmanager
def skipped_where_stock_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        pytest.skip(f"stock transformers cannot: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def table_for(family: str) -> mrrope.FrequencyTable:
    rotary_dim, base = CONVENTIONS.get(family, (16, 1e4))
    return mrrope.frequency_table(
        "mrrope_pro", rotary_dim=rotary_dim, base=base, original_max_position=LENGTH, scale=4.0
    )


def pair(family: str = "llama", **config: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A patched model, and the same unfused."""
    models = tiny_model(family), tiny_model(family)
    for model in models:
        for name, value in config.items():
            setattr(model.config, name, value)
    return mrrope.patch(models[0], table_for(family)), unfused(models[1], table_for(family))


STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 40, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "looked up in the prompt": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate(strategy: str) -> None:
    model, reference = pair()
    ids = tokens(1, 12) if "prompt_lookup_num_tokens" in STRATEGIES[strategy] else tokens(2, 12)
    want = generated(reference, ids, **STRATEGIES[strategy])
    assert want.sequences.shape[1] == 20
    assert_same_text(generated(model, ids, **STRATEGIES[strategy]), want)


def test_generate_past_the_trained_length() -> None:
    model, reference = pair()
    ids = tokens(1, LENGTH - 4)
    assert_same_text(generated(model, ids), generated(reference, ids))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "llama4_text"])
def test_left_padding(family: str) -> None:
    model = mrrope.patch(tiny_model(family), table_for(family))
    prompts = [tokens(1, length, seed=length) for length in (12, 7, 3)]
    alone = [generated(model, prompt) for prompt in prompts]
    batch = torch.cat([nn.functional.pad(prompt, (12 - prompt.shape[1], 0)) for prompt in prompts])
    together = generated(model, batch, attention_mask=(batch != 0).long())
    for i, want in enumerate(alone):
        assert torch.equal(together.sequences[i, 12:], want.sequences[0, prompts[i].shape[1] :])
        assert_same(torch.stack(together.logits)[:, i], torch.stack(want.logits)[:, 0])


QUANTO = {"backend": "quanto", "nbits": 4, "residual_length": 4, "q_group_size": 16}
HQQ = {"backend": "hqq", "nbits": 4, "residual_length": 4, "q_group_size": 16}
CACHES: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({}, "DynamicLayer"),
    "static": ({"cache_implementation": "static"}, "StaticLayer"),
    "offloaded": ({"cache_implementation": "offloaded"}, "DynamicLayer"),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, "StaticLayer"),
    "quanto": ({"cache_implementation": "quantized", "cache_config": QUANTO}, "QuantoQuantizedLayer"),
    "hqq": ({"cache_implementation": "quantized", "cache_config": HQQ}, "HQQQuantizedLayer"),
    "sliding": ({}, "DynamicSlidingWindowLayer"),
    "sliding static": ({"cache_implementation": "static"}, "StaticSlidingWindowLayer"),
    "none": ({"use_cache": False}, ""),
}


@pytest.mark.parametrize("cache", CACHES)
def test_caches(cache: str) -> None:
    options, layer = CACHES[cache]
    needed = {"quanto": "optimum.quanto", "hqq": "hqq"}.get(cache)
    if needed and not (importlib.util.find_spec(needed.split(".")[0]) and importlib.util.find_spec(needed)):
        pytest.skip(f"{needed} is not installed")
    model, reference = pair("mistral", sliding_window=SLIDING_WINDOW) if "sliding" in cache else pair()
    ids = tokens(2, 12)
    with skipped_where_stock_fails():
        want = generated(reference, ids, **options)
    got = generated(model, ids, **options)
    assert_same_text(got, want)
    if layer:
        assert {type(layer).__name__ for layer in got.past_key_values.layers} == {layer}
    if "sliding" in cache:
        assert not torch.equal(generated(pair("mistral", sliding_window=None)[0], ids).sequences, got.sequences)


@pytest.mark.parametrize("family", causal_lm_families())
@pytest.mark.filterwarnings("ignore:.*not the fused op")
def test_cached_decode_equals_full_forward(family: str) -> None:
    model = tiny_model(family)
    input_ids = tokens(2, 18)
    if "input_ids" not in inputs(model, input_ids):
        pytest.skip("a drafter, which keeps no cache of its own")
    options = {"original_max_position": LENGTH, "local_layers": turns_in_local_layers_alone(model)}
    try:
        mrrope.patch(model, "mrrope_pro", scale=4.0, **options)
    except ValueError as error:
        if "must have rotary position embeddings" not in str(error):
            raise
        pytest.skip("cannot be patched: test_patch_families.py says why")
    full = logits(model, **inputs(model, input_ids))
    error = float((decoded(model, input_ids, 16) - full).abs().max() / full.abs().max())
    if error >= 1e-4 and family in KNOWN:
        pytest.xfail(KNOWN[family])
    assert error < 1e-4


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_attention_backends(backend: str) -> None:
    model, reference = pair()
    want = logits(reference)
    # transformers compiles flex_attention, which torch cannot do for every CPU.
    with torch.compiler.set_stance("force_eager"):
        with skipped_where_stock_fails():
            reference.set_attn_implementation(backend)
            assert_same(logits(reference), want)
        model.set_attn_implementation(backend)
        assert_same(logits(model), want)
        model.set_attn_implementation("eager")
        assert_same(logits(model), want)


def test_compiled_by_inductor(dynamo: Any) -> None:
    model, reference = pair()
    for which in (model, reference):
        del which.model.layers[1:]  # one layer is enough, in half the time
    assert_same(logits(torch.compile(model, fullgraph=True)), logits(reference))


@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3", "llama4_text"])
def test_compiled_in_one_graph(family: str, dynamo: Any) -> None:
    model, reference = pair(family)
    want = logits(reference)
    try:
        found = logits(torch.compile(model, backend="eager", fullgraph=True))
    except dynamo.exc.TorchDynamoException:
        with skipped_where_stock_fails():
            logits(torch.compile(reference, backend="eager", fullgraph=True))
        raise
    assert_same(found, want)


def test_compiled_before_it_is_patched(dynamo: Any) -> None:
    model = tiny_model("llama")
    plain = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(logits(compiled), plain)
    mrrope.patch(model, ready())
    assert_same(logits(compiled), logits(unfused(tiny_model("llama"), ready())))
    mrrope.patch(model, "pi", scale=4.0)
    assert_same(logits(compiled), logits(model))
    mrrope.unpatch(model)
    assert_same(logits(compiled), plain)


@pytest.mark.slow
def test_compiled_decoding_with_a_static_cache(dynamo: Any) -> None:
    counts = []
    found = []
    for model in pair():
        dynamo.reset()
        counter = dynamo.testing.CompileCounterWithBackend("aot_eager")
        eager = generated(model, tokens(1, 12), cache_implementation="static")
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
        found.append(generated(model, tokens(1, 12), cache_implementation="static"))
        assert_same_text(found[-1], eager)
        counts.append(counter.frame_count)
    assert_same_text(*found)
    assert counts[0] <= counts[1], "no more graphs than stock: decoding must not compile anew at every position"


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("family", ["llama", "glm", "deepseek_v3", "llama4_text", "qwen3_5_text"])
def test_training(family: str, checkpointing: str | None) -> None:
    model, reference = (model.train() for model in pair(family))
    want = gradients(reference)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    assert_same_gradients(gradients(model, use_cache=False), want)


def test_training_a_compiled_model(dynamo: Any) -> None:
    model, reference = (model.train() for model in pair())
    want = gradients(reference)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = tokens(2, 24)
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients({name: weight.grad for name, weight in model.named_parameters()}, want)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when: str) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )

    def wrapped(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapter).train()

    reference = wrapped(unfused(tiny_model("llama"), ready()))
    if when == "before":
        model = wrapped(mrrope.patch(tiny_model("llama"), ready()))
    else:
        model = wrapped(tiny_model("llama"))
        assert mrrope.patch(model, ready()) is model
    gradient = {}
    for which in (model, reference):
        gradient[which] = gradients(which)
        torch.optim.SGD([weight for weight in which.parameters() if weight.requires_grad], lr=0.1).step()
        which.eval()
    assert all("lora" in name for name in gradient[model])
    assert_same_gradients(gradient[model], gradient[reference])
    trained = logits(reference)
    assert_same(logits(model), trained)
    merged = model.merge_and_unload()
    assert packed_tables(merged)
    assert_same(logits(merged), trained)
    assert relative(logits(mrrope.unpatch(merged)), trained) > 1e-3


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_device_map(device_map: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    reference = tiny_model("llama")
    reference.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    plain = logits(model)
    assert_same(logits(mrrope.patch(model, ready())), logits(unfused(reference, ready())))
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("how", ["hooks", "offloaded", "offloaded with buffers"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_accelerate(how: str, when: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    want = logits(unfused(tiny_model("llama"), ready()))
    model = tiny_model("llama")
    plain = logits(model)
    if when == "before":
        mrrope.patch(model, ready())
    if how == "hooks":
        accelerate.dispatch_model(model, PLACES, force_hooks=True)
    else:
        accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=how == "offloaded with buffers")
    if when == "after":
        mrrope.patch(model, ready())
    assert_same(logits(model), want)
    assert_same(
        torch.stack(generated(model, tokens(1, 8)).logits), torch.stack(generated(pair()[1], tokens(1, 8)).logits)
    )
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same(logits(model), want)
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_in_use(how: Callable[[Any], Any]) -> None:
    """Copies made after generating and during training, with gradients, are independent."""
    model, reference = pair()
    generated(model, tokens(1, 8))
    want = gradients(reference.train())
    gradients(model.train())
    clone = how(model)
    mrrope.unpatch(model)
    assert clone.training
    assert_same(logits(clone), logits(reference))
    clone.zero_grad()
    assert_same_gradients(gradients(clone), want)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama4_text"])
def test_saved_whole(family: str, zipped: bool, tmp_path: Path) -> None:
    """In the format of older versions of torch, tensors get their values last."""
    model, reference = pair(family)
    torch.save(model, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    mrrope.unpatch(model)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(logits(loaded), logits(reference))
    assert torch.equal(logits(mrrope.unpatch(loaded)), logits(model))


def test_functional_call() -> None:
    model, reference = pair()
    given = {name: 1.5 * parameter.detach() for name, parameter in model.named_parameters()}
    found = []
    for which in (model, reference):
        inputs = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        torch.func.functional_call(which, inputs, (tokens(2, 24),)).logits.square().mean().backward()
        found.append({name: tensor.grad for name, tensor in inputs.items()})
    assert_same_gradients(*found)


@pytest.mark.filterwarnings("ignore:.*not the fused op")
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama4_text", "qwen4_exp_text", UNFUSABLE])
def test_patched_in_inference_mode(family: str) -> None:
    """Its tables must not be inference tensors."""
    model, reference = (model_named(family) for _ in range(2))
    with torch.inference_mode():
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    mrrope.patch(reference, "mrrope_pro", scale=4.0)
    assert [name for name, buffer in model.named_buffers() if buffer.is_inference()] == []
    assert_same_gradients(gradients(model.train()), gradients(reference.train()))


DISTRIBUTED = """
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import mrrope
from patched_models import logits, packed_tables, ready
from tiny_models import tiny_model, tokens

folder = Path(sys.argv[1])


def tensor_parallel():
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    result = {"weights": type(model.model.layers[0].self_attn.q_proj.weight).__name__, "plain": logits(model)}
    mrrope.patch(model, ready(), fuse_norms=True)
    result["patched"] = logits(model)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    result["text"] = model.generate(tokens(1, 12), **options)
    mrrope.patch(model, ready(), fuse_norms=False)
    result["unfused_norms"] = logits(model)
    mrrope.unpatch(model)
    return result | {"unpatched": logits(model)}


def fully_sharded(when):
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = tiny_model("llama")
    if when == "before":
        mrrope.patch(model, ready(), fuse_norms=True)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if when == "after":
        mrrope.patch(model, ready(), fuse_norms=True)
    model.train()(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss.backward()
    weights = dict(model.named_parameters())
    gradients = {name: weight.grad.full_tensor() for name, weight in weights.items()}
    return {"gradients": gradients, "logits": logits(model.eval()), "tables": packed_tables(model)}


for test in (tensor_parallel, fully_sharded):
    for arguments in [()] if test is tensor_parallel else [("before",), ("after",)]:
        result = test(*arguments)
        if torch.distributed.get_rank() == 0:
            torch.save(result, folder / "-".join([test.__name__, *arguments]))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The results of the script above in two processes on the CPU; fails where a part did not finish."""
    folder = tmp_path_factory.mktemp("distributed")
    tiny_model("llama").save_pretrained(folder / "model")
    return run_on_two_ranks(DISTRIBUTED, folder)


@pytest.mark.slow
def test_tensor_parallel(distributed: Callable[[str], dict[str, Any]]) -> None:
    result = distributed("tensor_parallel")
    assert result["weights"] == "DTensor"
    reference = tiny_model("llama")
    assert_same(result["plain"], logits(reference))
    unfused(reference, ready())
    assert_same(result["patched"], logits(reference))
    assert_same(result["unfused_norms"], logits(reference))
    assert torch.equal(result["text"], generated(reference, tokens(1, 12)).sequences)
    assert torch.equal(result["unpatched"], result["plain"])


@pytest.mark.parametrize("when", ["before", "after"])
def test_fully_sharded_in_mixed_precision(distributed: Callable[[str], dict[str, Any]], when: str) -> None:
    result = distributed(f"fully_sharded-{when}")
    assert torch.equal(result["tables"]["model.rotary_emb.packed_table"], ready().packed(torch.device("cpu")))
    assert result["logits"].dtype == torch.bfloat16
    # Norms with sharded weights stay unfused.
    unsharded = mrrope.patch(tiny_model("llama").bfloat16(), ready(), fuse_norms=when == "before")
    assert_same(result["logits"], logits(unsharded))
    # The error against float32 is no larger than that of stock code in bfloat16.
    exact, stock = (unfused(tiny_model("llama").to(dtype), ready()) for dtype in (torch.float32, torch.bfloat16))
    assert relative(result["logits"], logits(exact)) < 1.25 * relative(logits(stock), logits(exact))
    want, rounded = gradients(exact), gradients(stock)
    for name in want:
        assert relative(result["gradients"][name], want[name]) < 1.5 * relative(rounded[name], want[name]), name
