"""Models patched with tables per layer and key head, against their own code that rotates head by head in float64."""

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

import transformers
from head_by_head import head_by_head, random_set, random_table
from head_table_models import FAMILIES, ROUNDING, Family, is_local, refused, set_for, settings_of
from model_tolerance import relative
from patched_models import LENGTH, LLAMA, UNFUSABLE, Snapshot, decoded, generated, gradients, logits, model_named
from tiny_models import TINY_SIZES, random_model, tiny_config_of, tiny_model, tokens
from transformers import PreTrainedModel

from mrrope.hf import rope_config
from mrrope.hf.layer_tables import LayerTables

pytestmark = pytest.mark.usefixtures("rope_types", "no_other_patched_models")


SETTINGS = (LLAMA["rotary_dim"], LLAMA["base"], LLAMA["original_max_position"])


def reference(
    model: PreTrainedModel, family: Family, tables_of: Callable[[int], Any], read: Callable[[Any], Any]
) -> Any:
    """Return what a stock model reads when every layer rotates its heads by the tables of ``tables_of``."""
    rotated = rope_config.global_settings(model).rotated_pairs.double()
    with head_by_head(model, tables_of, family.form, family.function, rotated_pairs=rotated) as calls:
        found = read(model)
    assert calls, "the reference never rotated"
    return found


# --- against the model's own code


@pytest.mark.filterwarnings("ignore:.*is extended by its configuration")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_and_head_rotates_by_its_own_table(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    tables = set_for(model, family.key_heads)
    ids = tokens(2, 24)
    plain = logits(model, input_ids=ids)
    of_layer = lambda i: None if is_local(model, i) else family.entry(tables, i)  # noqa: E731
    want = reference(model, family, of_layer, lambda model: logits(model, input_ids=ids))
    # Qwen3-Next amplifies the rounding of its norms, and of single tokens, by its recurrence.
    amplified = relative(decoded(model, ids, 16), plain)
    mrrope.patch(model, tables, fuse_norms=False)
    assert relative(logits(model, input_ids=ids), want) < ROUNDING
    assert relative(decoded(model, ids, 16), want) < ROUNDING + 2 * amplified, "prefill and single tokens with a cache"
    assert relative(plain, want) > 1e-3, "the tables make a difference"
    mrrope.unpatch(model)
    assert torch.equal(logits(model, input_ids=ids), plain)


@pytest.mark.parametrize("name", ["llama", "llama4_text"])
def test_fractions_of_a_position(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    tables = set_for(model, family.key_heads)
    call = {"input_ids": tokens(1, 24), "position_ids": torch.arange(24, dtype=torch.float64)[None] * 2.7}
    want = reference(model, family, lambda i: family.entry(tables, i), lambda model: logits(model, **call))
    mrrope.patch(model, tables, fuse_norms=False)
    # Positions are rounded to units of 2^-20, and heads of float64 see it.
    assert relative(logits(model, **call), want) < 1e-5
    assert relative(logits(model, **call | {"position_ids": call["position_ids"].long()}), want) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "gemma3_text", "llama4_text", "moshi"])
def test_head_tables_serve_all_layers(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    rng = random.Random(1)
    tables = mrrope.HeadTables(random_table(rng, *settings_of(model)) for _ in range(family.key_heads))
    want = reference(model, family, lambda i: None if is_local(model, i) else tables, logits)
    mrrope.patch(model, tables)
    assert relative(logits(model), want) < ROUNDING
    assert not any(LayerTables().state_of(module) for module in model.modules()), "one table for all needs no hook"


def test_a_table_per_layer_for_all_heads() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    rng = random.Random(2)
    tables = mrrope.TableSet([random_table(rng, *SETTINGS) for _ in range(2)])
    want = reference(model, FAMILIES["llama"], lambda i: tables[i], logits)
    assert relative(logits(mrrope.patch(model, tables)), want) < ROUNDING


def test_tables_that_are_all_the_same_are_one_table() -> None:
    model = tiny_model("llama")
    table = random_table(random.Random(3), *SETTINGS)
    want = logits(mrrope.patch(model, table))
    for same in (mrrope.HeadTables([table] * 2), mrrope.TableSet([table, mrrope.HeadTables([table] * 2)])):
        torch.testing.assert_close(logits(mrrope.patch(model, same)), want, rtol=1e-5, atol=1e-6)


def test_local_layers_use_their_entries_where_they_are_extended() -> None:
    config = tiny_config_of("gemma3_text")
    config.rope_parameters["sliding_attention"]["rope_theta"] = config.rope_parameters["full_attention"]["rope_theta"]
    model = random_model(config, dtype=torch.float64)
    tables = set_for(model, 2)
    want = reference(model, FAMILIES["gemma3_text"], lambda i: tables[i], logits)
    assert relative(logits(mrrope.patch(model, tables, local_layers=True)), want) < ROUNDING


def test_entries_of_local_layers_are_ignored() -> None:
    model = tiny_model("gemma3_text")
    first, second = set_for(model, 2), set_for(model, 2, seed=1)
    is_full = [kind == "full_attention" for kind in model.config.layer_types]
    mixed = mrrope.TableSet([a if full else b for a, b, full in zip(first, second, is_full, strict=True)])
    want = logits(mrrope.patch(model, first))
    assert torch.equal(logits(mrrope.patch(model, mixed)), want)


def test_rows_of_positions() -> None:
    """M-RoPE: an image between texts has three positions per token."""
    sizes = {**TINY_SIZES, "num_key_value_heads": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    config = transformers.Qwen2VLTextConfig(**sizes, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.Qwen2VLTextModel(config).double().eval()
    tables = random_set(4, 2, 2, *settings_of(model))
    rows = torch.stack([torch.arange(24), torch.arange(24) // 3, torch.arange(24) % 5])[:, None].expand(3, 2, 24)

    @torch.no_grad()
    def read(model: Any) -> torch.Tensor:
        return model(input_ids=tokens(2, 24) % 40, position_ids=rows).last_hidden_state

    of_pairs = [0] * 3 + [1] * 3 + [2] * 2
    for entries in (tables, tables[0]):
        mrrope.patch(model, entries)
        got = read(model)
        mrrope.unpatch(model)
        of_layer = (lambda i: tables[i]) if entries is tables else (lambda i: tables[0])
        with head_by_head(model, of_layer, rows=of_pairs):
            assert relative(got, read(model)) < ROUNDING


# --- in use


@pytest.mark.parametrize("name", ["llama", "llama4_text", "gemma3_text", "moshi"])
def test_generate(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    tables = set_for(model, family.key_heads)
    of_layer = lambda i: None if is_local(model, i) else tables[i]  # noqa: E731
    want = reference(model, family, of_layer, lambda model: generated(model, tokens(2, 10)))
    got = generated(mrrope.patch(model, tables), tokens(2, 10))
    assert torch.equal(got.sequences, want.sequences)
    assert relative(torch.stack(got.logits), torch.stack(want.logits)) < ROUNDING


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "recomputed"])
def test_gradients(checkpointing: bool | None) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tables = set_for(model, 2)
    want = reference(model, FAMILIES["llama"], lambda i: tables[i], gradients)
    want = {name: gradient.clone() for name, gradient in want.items()}
    model.zero_grad()
    mrrope.patch(model, tables, fuse_norms=False).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    got = gradients(model)
    assert got.keys() == want.keys()
    assert all(relative(got[name], want[name]) < 10 * ROUNDING for name in want)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere", "llama4_text", "moshi"])
def test_compiled_in_one_graph(name: str) -> None:
    model = mrrope.patch(tiny_model(name), set_for(tiny_model(name), FAMILIES[name].key_heads))
    want = logits(model)
    torch._dynamo.reset()
    got = logits(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_offloaded_by_accelerate(name: str, when: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(name)
    tables = set_for(model, 2)
    want = logits(mrrope.patch(model, tables))
    if when == "after":
        mrrope.unpatch(model)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    if when == "after":
        mrrope.patch(model, tables)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


def test_copies_and_pickles() -> None:
    model = tiny_model("llama")
    plain = logits(model)
    mrrope.patch(model, set_for(model, 2))
    want = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), want)
        assert torch.equal(logits(mrrope.unpatch(other)), plain)
    assert torch.equal(logits(model), want), "copies share nothing"


def test_unpatch_leaves_nothing() -> None:
    model = tiny_model("llama")
    hooks = [(module, dict(module._forward_pre_hooks)) for module in model.modules()]
    before = Snapshot(model)
    with mrrope.patched(model, set_for(model, 2)):
        assert sum(LayerTables().state_of(module) is not None for module in model.modules()) == 2
    before.assert_untouched()
    assert all(dict(module._forward_pre_hooks) == own for module, own in hooks)
    assert all(not module._forward_pre_hooks_with_kwargs for module in model.modules())


def test_hooks_of_others_stay() -> None:
    model = tiny_model("llama")
    seen: list[Any] = []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with mrrope.patched(model, set_for(model, 2)):
        logits(model)
    assert len(attention._forward_pre_hooks) == 1
    (kwargs,) = seen
    assert kwargs["position_embeddings"][1].shape == (1, 1, 2, 9)


def test_patching_anew_replaces_the_hooks() -> None:
    model = tiny_model("llama")
    first, second = set_for(model, 2), set_for(model, 2, seed=1)
    want = logits(mrrope.patch(model, second))
    assert torch.equal(logits(mrrope.patch(mrrope.patch(model, first), second)), want)
    one = first[0][0]
    alone = logits(mrrope.patch(tiny_model("llama"), one))
    assert torch.equal(logits(mrrope.patch(model, one)), alone)
    assert not any(LayerTables().state_of(module) for module in model.modules())


def test_casts_leave_the_tables_alone() -> None:
    model = tiny_model("llama")
    tables = set_for(model, 2)
    want = logits(mrrope.patch(copy.deepcopy(model).bfloat16(), tables))
    assert torch.equal(logits(mrrope.patch(model, tables).bfloat16()), want)


def test_from_a_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tables = set_for(model, 2)
    want = logits(mrrope.patch(model, tables))
    tables.save(tmp_path / "set.json")
    assert torch.equal(logits(mrrope.patch(model, tmp_path / "set.json")), want)
    assert torch.equal(logits(mrrope.patch(model, str(tmp_path / "set.json"))), want)
    want = logits(mrrope.patch(model, tables[0]))
    tables[0].save(tmp_path / "heads.json")
    assert torch.equal(logits(mrrope.patch(model, tmp_path / "heads.json")), want)


# --- what does not fit


def test_sets_for_other_models() -> None:
    model = tiny_model("llama")
    refused(model, random_set(0, 3, 2, *SETTINGS), "2 layers of LlamaForCausalLM, got one for 3")
    refused(model, random_set(0, 2, 4, *SETTINGS), "2 key heads of LlamaForCausalLM in layer 0, got tables for 4")
    heads = [random_table(random.Random(0), *SETTINGS) for _ in range(4)]
    refused(model, mrrope.HeadTables(heads), "2 key heads of LlamaForCausalLM .* got tables for 4")
    refused(model, random_set(0, 2, 2, 8, 1e4, LENGTH), "rotary_dim 16")
    refused(model, random_set(0, 2, 2, 16, 5e5, LENGTH), "base 10000")
    refused(model, random_set(0, 2, 2, 16, 1e4, 128), "original_max_position 64")
    refused(model, set_for(model, 2), "leaves no room for {'scale': 8.0}", scale=8.0)
    refused(model, set_for(model, 2), "got one TableSet", scale="auto")
    refused(model, [set_for(model, 2)], "scale must be 'auto'")
    refused(model, [random_set(0, 3, 2, *SETTINGS)], "2 layers", scale="auto")
    latent = tiny_model("deepseek_v3")
    refused(latent, set_for(latent, 4), "1 key heads of DeepseekV3ForCausalLM in layer 0, got tables for 4")


def test_a_set_for_a_patched_model_that_does_not_fit_leaves_the_patch() -> None:
    model = mrrope.patch(tiny_model("llama"), set_for(tiny_model("llama"), 2))
    want = logits(model)
    with pytest.raises(ValueError, match="2 layers"):
        mrrope.patch(model, random_set(0, 3, 2, *SETTINGS))
    assert torch.equal(logits(model), want)


def test_layers_that_cannot_be_told_apart() -> None:
    shared = tiny_model("zamba2")  # one attention module for several layers
    refused(shared, set_for(shared, 2), "all layers of Zamba2ForCausalLM: its Zamba2Attention serves several layers")
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    refused(model, set_for(model, 2), "two of LlamaAttention with the layer_idx 0")
    model.model.layers[1].self_attn.layer_idx = 7
    refused(model, set_for(model, 2), "has the layer_idx 7, and the configuration 2 layers")
    model.model.layers[1].self_attn.layer_idx = None
    refused(model, set_for(model, 2), "LlamaAttention does not know its layer")


def test_models_that_keep_their_own_code() -> None:
    model = model_named(UNFUSABLE)
    reason = (
        "one table for all heads and layers for LlamaForCausalLM: OwnCosines computes with cosines and sines itself"
    )
    refused(model, set_for(model, 2), reason)
    refused(model, set_for(model, 2)[0], reason)
