"""scale="auto" under compilation, copies, offloading, other dtypes and threads."""

import copy
import io
import pickle
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

import mrrope
from mrrope.hf.auto_scale.follower import GenerateKnowingLengths
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import transformers
from auto_scaled_models import (
    GENERATE,
    assert_keys_match_their_positions,
    auto_scaled,
    caches,
    counted,
    logits,
    pickled,
    tables_of,
    text,
    tiny_llama,
    tiny_mistral,
)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {"mode": "reduce-overhead"}], ids=["traced", "cuda graphs"])
def test_compiled_decoding_is_one_graph_across_steps(model, how):
    """With a right-padded prompt, and positions that count its real tokens only."""
    if "mode" in how and model.device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    auto_scaled(model)
    ids, mask = text(80, batch=2), torch.ones(2, 80, dtype=torch.long)
    mask[1, 15:20] = 0
    positions = counted(mask)
    step = torch.compile(model, fullgraph=True, **how)
    read = {}
    for name, forward in (("eager", model), ("compiled", step)):
        cache = caches(model)["static"]
        options = {"past_key_values": cache, "attention_mask": mask[:, :20], "position_ids": positions[:, :20]}
        parts = [logits(model, ids[:, :20], **options)]
        torch._dynamo.reset()
        with torch._dynamo.config.patch(error_on_recompile=name == "compiled"):
            for at in range(20, 80):
                # One shape in every step, as in generate.
                sees = torch.nn.functional.pad(mask[:, : at + 1], (0, 160 - at - 1)).bool()[:, None, None]
                options = {"attention_mask": sees, "position_ids": positions[:, at : at + 1].clone()}
                part = logits(forward, ids[:, at : at + 1], past_key_values=cache, **options)
                parts.append(part.clone())
        assert tables_of(cache) == [2, 2]
        assert_keys_match_their_positions(model, cache, ids, positions, 80)
        read[name] = torch.cat(parts, dim=1)
    torch.testing.assert_close(read["compiled"], read["eager"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_decoding_with_a_cache_that_grows(model):
    """One graph for the first step and one for all others, as in the unpatched model."""
    auto_scaled(model)
    ids, positions = text(70, batch=2), torch.arange(70).expand(2, -1)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, ids[:, :25], past_key_values=cache)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    for at in range(25, 70):
        logits(step, ids[:, at : at + 1], past_key_values=cache, position_ids=positions[:, at : at + 1].clone())
    assert tables_of(cache) == [2, 2]
    assert graphs.frame_count == 2
    assert_keys_match_their_positions(model, cache, ids, positions, 70)


@pytest.mark.slow
def test_compiled_decoding_past_a_static_window():
    model = auto_scaled(tiny_mistral())
    ids = text(70, batch=2)
    positions = torch.arange(70).expand(2, -1)
    cache = caches(model)["static"]
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits(model, ids[:, :10], past_key_values=cache)
    for at in range(10, 70):
        logits(step, ids[:, at : at + 1], past_key_values=cache, position_ids=positions[:, at : at + 1].clone())
        assert_keys_match_their_positions(model, cache, ids, positions, at + 1)
    assert tables_of(cache) == [2, 2]


def test_unpatched_it_is_as_before(model):
    ids = text(60)
    before, keys = logits(model, ids), set(vars(model))
    auto_scaled(model)
    assert isinstance(model.generate, GenerateKnowingLengths)
    mrrope.unpatch(model)
    assert torch.equal(logits(model, ids), before)
    assert set(vars(model)) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nested_patches(model):
    auto_scaled(model)
    ids = text(60)
    before = logits(model, ids)
    with mrrope.patched(model, "rope"):
        assert not torch.equal(logits(model, ids), before)
    assert torch.equal(logits(model, ids), before)
    assert isinstance(model.generate, GenerateKnowingLengths)
    cache = transformers.DynamicCache(config=model.config)
    for part in ids.split(20, dim=1):
        logits(model, part, past_key_values=cache)
    assert tables_of(cache) == [1]


def saved(model, *, zipped):
    file = io.BytesIO()
    torch.save(model, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied_by",
    [copy.deepcopy, pickled, partial(saved, zipped=True), partial(saved, zipped=False)],
    ids=["deepcopy", "pickle", "torch.save", "torch.save of old"],
)
def test_copies_follow_independently(model, copied_by):
    auto_scaled(model)
    ids = text(60)
    want = torch.cat(
        [
            logits(model, part, past_key_values=cache)
            for cache in [caches(model)["dynamic"]]
            for part in ids.split(20, dim=1)
        ],
        dim=1,
    )
    copied = copied_by(model)
    mrrope.unpatch(model)
    cache = caches(copied)["dynamic"]
    got = torch.cat([logits(copied, part, past_key_values=cache) for part in ids.split(20, dim=1)], dim=1)
    assert torch.equal(got, want)
    assert copied.generate.model is copied
    mrrope.unpatch(copied)


READS_CHUNKS = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, parts = pickle.load(file)
model.model.register_forward_pre_hook(lambda *_: None)  # must not replace the model's own hook
cache = None
with torch.no_grad():
    for part in parts:
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values
print([index.tolist() for index in cache.mrrope_tables.values()])
"""


@pytest.mark.slow
def test_a_pickled_model_follows_in_another_process(tmp_path):
    model = auto_scaled(tiny_llama())
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, text(60, batch=2).split(20, dim=1))))
    run = subprocess.run(
        [sys.executable, "-c", READS_CHUNKS, "model.pickle"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )  # not in the checkout, whose package may lack the built library
    assert run.stdout.strip() == "[[1, 1]]"


def all_offloaded(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def embeddings_offloaded(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    parts = ["model.layers", "model.norm", "model.rotary_emb", "lm_head"]
    devices = {"model.embed_tokens": "disk", **dict.fromkeys(parts, "cpu")}
    return accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [all_offloaded, embeddings_offloaded])
def test_offloaded_weights(offload, tmp_path):
    """Parameters that are loaded when their module is called."""
    model = tiny_llama()
    ids = text(60)
    parts = ids.split(20, dim=1)

    def read(model):
        cache = transformers.DynamicCache(config=model.config)
        read = torch.cat([logits(model, part, past_key_values=cache) for part in parts], dim=1)
        assert tables_of(cache) == [1]
        return read

    want = read(auto_scaled(copy.deepcopy(model)))
    model = offload(model, tmp_path)
    assert next(model.parameters()).is_meta
    torch.testing.assert_close(read(auto_scaled(model)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_layer_is_found_in_any_dtype(model, dtype):
    """With keys that are large in a few slow components, as in real models."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data[14:16] *= 100.0
    auto_scaled(model.to(dtype))
    rotary = next(m for m in model.modules() if isinstance(m, TableRotaryEmbedding))
    assert [part.layer for part in rotary.follower.keys[None].parts] == [0, 1, 2]
    assert all(part.has_attention_factor for part in rotary.follower.keys[None].parts)


def test_other_dtypes(model):
    auto_scaled(model)
    model.to(torch.bfloat16)
    ids = text(60)
    with mrrope.patched(model, "mrrope_pro", scale=2.0):
        want = logits(model, ids)
    assert torch.equal(logits(model, ids), want)


def test_unpatching_through_another_module_leaves_generate_as_it_was(model):
    ids = text(20)
    want = model.generate(ids, max_new_tokens=5, **GENERATE)
    auto_scaled(model)
    mrrope.unpatch(model.model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **GENERATE), want)


def test_an_interrupted_patch_leaves_the_model_as_it_was(model, monkeypatch):
    mrrope.patch(model, "mrrope_pro", scale=2.0)
    ids = text(40)
    before = logits(model, ids)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mrrope.hf.auto_scale.module_patch.find_cached_keys", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto_scaled(model)
    assert torch.equal(logits(model, ids), before)


def test_a_cache_of_another_ladder_is_refused(model):
    auto_scaled(model)
    with torch.no_grad():
        cache = model(text(40)).past_key_values
    mrrope.patch(model, "mrrope_uni", scale="auto", max_scale=2.0)
    with pytest.raises(
        ValueError, match="past_key_values must be empty or filled by the tables that the model has now"
    ):
        logits(model, text(1), past_key_values=cache)


def test_a_cache_with_gradients_is_refused(model):
    auto_scaled(model)
    cache = model(text(10)).past_key_values
    with pytest.raises(ValueError, match="past_key_values must not carry gradients"):
        model(text(1), past_key_values=cache)


def test_a_layer_added_later_is_refused(model):
    auto_scaled(model)
    ids = text(40)
    added = copy.deepcopy(model.model.layers[-1])
    added.self_attn.layer_idx = 3
    model.model.layers.append(added)
    model.config.num_hidden_layers = 4
    cache = transformers.DynamicCache()
    logits(model, ids[:, :20], past_key_values=cache)
    message = "model must be patched anew: it had 3 layers that cache when it was patched, .* keys of layer 3"
    with pytest.raises(ValueError, match=message):
        logits(model, ids[:, 20:], past_key_values=cache)
    auto_scaled(model)
    logits(model, ids[:, 20:], past_key_values=cache)
    assert tables_of(cache) == [1]


def test_a_layer_whose_keys_are_zero_is_refused(model):
    ids = text(20)
    model.model.layers[1].self_attn.k_proj.weight.data.zero_()
    before = logits(model, ids)
    message = "scale must be a number .* the keys of layer 1 are all zero, so that no rotation shows in them"
    with pytest.raises(ValueError, match=message):
        auto_scaled(model)
    assert torch.equal(logits(model, ids), before)


def in_another_thread(call):
    """Return the result of a call in another thread, or raise its error."""
    results = []

    def run():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_two_threads_are_refused_and_one_after_the_other_is_not(model):
    """The second call starts while the first is between its embeddings and its rotary embedding."""
    auto_scaled(model)
    ids = text(60)
    want = logits(model, ids[:, :40]), logits(model, ids)
    refused = []

    def other(*_):
        hook.remove()
        refused.append(in_another_thread(lambda: logits(model, ids)))

    hook = model.model.embed_tokens.register_forward_hook(other)
    cache = transformers.DynamicCache(config=model.config)
    assert torch.equal(logits(model, ids[:, :40], past_key_values=cache), want[0])
    assert tables_of(cache) == [1]
    assert isinstance(refused[0], RuntimeError)
    assert str(refused[0]).startswith("model must be called by one thread at a time")
    assert torch.equal(in_another_thread(lambda: logits(model, ids)), want[1])


def test_threads_between_the_steps_of_generate_are_refused(model):
    auto_scaled(model)
    ids, refused = text(20), []

    def other(step, scores):
        refused.append(in_another_thread(lambda: model.generate(ids, max_new_tokens=100, **GENERATE)))
        refused.append(in_another_thread(lambda: logits(model, ids)))
        return scores

    out = model.generate(ids, max_new_tokens=3, logits_processor=[other], return_dict_in_generate=True, **GENERATE)
    assert len(refused) == 6
    assert all(isinstance(error, RuntimeError) for error in refused)
    assert tables_of(out.past_key_values) == [0]
    done = in_another_thread(lambda: model.generate(ids, max_new_tokens=3, **GENERATE))
    assert torch.equal(done, out.sequences)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_releases_the_model_to_other_threads(model, error):
    auto_scaled(model)

    def fails(*_):
        raise error

    hook, ids = model.model.norm.register_forward_pre_hook(fails), text(20)
    with pytest.raises(error):
        model.generate(ids, max_new_tokens=3, **GENERATE)
    hook.remove()
    assert in_another_thread(lambda: logits(model, ids)).shape == (1, 20, model.config.vocab_size)
