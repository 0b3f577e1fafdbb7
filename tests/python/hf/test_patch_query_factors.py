"""Models patched with a factor for every query head, against their own code and against scaled projections."""

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
from head_by_head import COMPLEX, head_by_head, random_factors, random_set, random_table, with_factors
from head_table_models import FAMILIES, ROUNDING, Family, is_local, refused, rotaries_of, set_for, settings_of
from model_tolerance import relative
from patched_models import LLAMA, UNFUSABLE, decoded, generated, gradients, logits, model_named
from tiny_models import TINY_SIZES, random_model, tiny_config_of, tiny_model, tokens
from transformers import PreTrainedModel

from mrrope.hf import handoff, rope_config
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE

pytestmark = pytest.mark.usefixtures("rope_types", "no_other_patched_models")

SETTINGS = (LLAMA["rotary_dim"], LLAMA["base"], LLAMA["original_max_position"])
QUERY_HEADS = 4
"""Of all tiny models."""
ALONE = {"gemma3n_text", "gemma4_text", "deepseek_v4"}
"""Families that rotate queries and keys by calls of their own."""
INDEXED = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"}
"""Families whose attention has an indexer that rotates, too."""
NORMED = {"hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "nanochat"}
"""Families that norm rotated queries."""
SERVED = {name: family for name, family in FAMILIES.items() if name not in ALONE | NORMED}
SERVED |= {"deepseek_v2": Family(COMPLEX, "apply_rotary_emb", key_heads=1, dtype=torch.float32)}


def table_for(model: PreTrainedModel, seed: int = 0, scale: float = 4.0) -> mrrope.FrequencyTable:
    return random_table(random.Random(seed), *settings_of(model), scale)


def reference(
    model: PreTrainedModel, family: Family, tables_of: Callable[[int], Any], read: Callable[[Any], Any]
) -> Any:
    """Return what a stock model reads when every layer rotates, and scales its queries, by ``tables_of``."""
    rotated = rope_config.global_settings(model).rotated_pairs.double()
    with head_by_head(model, tables_of, family.form, family.function, rotated_pairs=rotated) as calls:
        found = read(model)
    assert calls, "the reference never rotated"
    return found


def with_scaled_queries(model: PreTrainedModel, factors_of: Callable[[int], Any]) -> PreTrainedModel:
    """Return a Llama whose query projections are scaled by the factors of each layer, of None not at all."""
    scaled = copy.deepcopy(model)
    for i, layer in enumerate(scaled.model.layers):
        factors = factors_of(i)
        if factors is not None:
            weight = layer.self_attn.q_proj.weight
            weight.data *= torch.tensor(factors).to(weight).repeat_interleave(weight.shape[0] // len(factors))[:, None]
    return scaled


# --- against the model's own code


@pytest.mark.filterwarnings("ignore:.*is extended by its configuration")
@pytest.mark.parametrize("name", SERVED)
def test_every_query_head_has_its_own_factor(name: str) -> None:
    family = SERVED[name]
    model = tiny_model(name, dtype=family.dtype)
    without = set_for(model, family.key_heads)
    tables = with_factors(without, QUERY_HEADS)
    ids = tokens(2, 24)
    plain = logits(model, input_ids=ids)
    of_layer = lambda i: None if is_local(model, i) else family.entry(tables, i)  # noqa: E731
    want = reference(model, family, of_layer, lambda model: logits(model, input_ids=ids))
    # Qwen3-Next amplifies the rounding of its norms, and of single tokens, by its recurrence.
    amplified = relative(decoded(model, ids, 16), plain)
    mrrope.patch(model, without)
    assert relative(logits(model, input_ids=ids), want) > 1e-3, "the factors make a difference"
    mrrope.patch(model, tables)
    assert relative(logits(model, input_ids=ids), want) < ROUNDING
    assert relative(decoded(model, ids, 16), want) < ROUNDING + 2 * amplified, "prefill and single tokens with a cache"
    mrrope.unpatch(model)
    assert torch.equal(logits(model, input_ids=ids), plain)


@pytest.mark.parametrize("kind", ["one table", "head tables", "set"])
def test_factors_are_those_of_the_query_projection(kind: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    without = {"one table": table_for(model), "head tables": set_for(model, 2)[0], "set": set_for(model, 2)}[kind]
    tables = with_factors(without, QUERY_HEADS)
    ids = tokens(2, 24)
    factors_of = lambda i: (tables[i] if kind == "set" else tables).query_factors  # noqa: E731
    scaled = mrrope.patch(with_scaled_queries(model, factors_of), without)
    want, want_decoded = logits(scaled, input_ids=ids), decoded(scaled, ids, 16)
    want_text = generated(scaled, ids[:, :10]).sequences
    mrrope.patch(model, tables)
    assert relative(logits(model, input_ids=ids), want) < ROUNDING
    assert relative(decoded(model, ids, 16), want_decoded) < ROUNDING
    assert torch.equal(generated(model, ids[:, :10]).sequences, want_text)


@pytest.mark.parametrize("kind", ["one table", "head tables"])
def test_a_factor_of_one_changes_nothing(kind: str) -> None:
    model = tiny_model("llama")
    without = table_for(model) if kind == "one table" else set_for(model, 2)[0]
    rows = [without] if kind == "one table" else without
    want = logits(mrrope.patch(model, without))
    torch.testing.assert_close(logits(mrrope.patch(model, mrrope.HeadTables(rows, [1.0] * QUERY_HEADS))), want)


def test_more_query_heads_than_one_row_holds() -> None:
    """Nine words per table, and factors for eleven query heads of one key head."""
    torch.manual_seed(0)
    sizes = {**TINY_SIZES, "hidden_size": 176, "num_key_value_heads": 1, "num_attention_heads": 11}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=64, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).double().eval()
    tables = with_factors(table_for(model), 11)
    want = reference(model, Family(), lambda i: tables, lambda model: logits(model, input_ids=tokens(2, 24) % 40))
    assert relative(logits(mrrope.patch(model, tables), input_ids=tokens(2, 24) % 40), want) < ROUNDING
    (rotary,) = rotaries_of(model)
    assert rotary.packed_table.shape == (1, 2 + 2, 1, 9)


@pytest.mark.parametrize("kind", ["set", "head tables", "one table"])
def test_rows_of_positions(kind: str) -> None:
    """M-RoPE: an image between texts has three positions per token."""
    sizes = {**TINY_SIZES, "num_key_value_heads": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    config = transformers.Qwen2VLTextConfig(**sizes, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.Qwen2VLTextModel(config).double().eval()
    without = random_set(4, 2, 2, *settings_of(model))
    tables = with_factors({"set": without, "head tables": without[0], "one table": without[0][1]}[kind], QUERY_HEADS)
    rows = torch.stack([torch.arange(24), torch.arange(24) // 3, torch.arange(24) % 5])[:, None].expand(3, 2, 24)

    @torch.no_grad()
    def read(model: Any) -> torch.Tensor:
        return model(input_ids=tokens(2, 24) % 40, position_ids=rows).last_hidden_state

    mrrope.patch(model, tables)
    got = read(model)
    mrrope.unpatch(model)
    of_layer = lambda i: tables[i] if kind == "set" else tables  # noqa: E731
    with head_by_head(model, of_layer, rows=[0] * 3 + [1] * 3 + [2] * 2):
        assert relative(got, read(model)) < ROUNDING


def test_llama4_without_norms_takes_factors() -> None:
    """Its embedding is one complex tensor, in which tables of all rows have to fit."""
    config = tiny_config_of("llama4_text")
    config.use_qk_norm = False
    model = random_model(config, dtype=torch.float64)
    family = FAMILIES["llama4_text"]
    for tables in (with_factors(set_for(model, 2), QUERY_HEADS), with_factors(table_for(model), QUERY_HEADS)):
        of_layer = lambda i: tables[i] if isinstance(tables, mrrope.TableSet) else tables  # noqa: B023, E731
        want = reference(model, family, of_layer, logits)
        with mrrope.patched(model, tables):
            assert relative(logits(model), want) < ROUNDING


def test_fractions_of_a_position() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tables = with_factors(set_for(model, 2), QUERY_HEADS)
    call = {"input_ids": tokens(1, 24), "position_ids": torch.arange(24, dtype=torch.float64)[None] * 2.7}
    want = reference(model, Family(), lambda i: tables[i], lambda model: logits(model, **call))
    # Positions are rounded to units of 2^-20, and heads of float64 see it.
    assert relative(logits(mrrope.patch(model, tables), **call), want) < 1e-5


# --- in use


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "recomputed"])
def test_gradients(checkpointing: bool | None) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tables = with_factors(set_for(model, 2), QUERY_HEADS)
    want = reference(model, Family(), lambda i: tables[i], gradients)
    want = {name: gradient.clone() for name, gradient in want.items()}
    model.zero_grad()
    mrrope.patch(model, tables).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    got = gradients(model)
    assert got.keys() == want.keys()
    assert all(relative(got[name], want[name]) < 10 * ROUNDING for name in want)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "cohere", "deepseek_v2", "moshi"])
def test_compiled_in_one_graph(name: str) -> None:
    tables = with_factors(set_for(tiny_model(name), SERVED[name].key_heads), QUERY_HEADS)
    model = mrrope.patch(tiny_model(name), tables)
    want = logits(model)
    torch._dynamo.reset()
    got = logits(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fuse_norms", [False, True])
def test_norms_of_queries(fuse_norms: bool) -> None:
    model = tiny_model("qwen3")
    tables = with_factors(set_for(model, 2), QUERY_HEADS)
    want = reference(model, Family(), lambda i: tables[i], logits)
    mrrope.patch(model, tables, fuse_norms=fuse_norms)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_copies_pickles_and_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tables = with_factors(set_for(model, 2), QUERY_HEADS)
    want = logits(mrrope.patch(model, tables))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), want)
    tables.save(tmp_path / "set.json")
    assert torch.equal(logits(mrrope.patch(model, tmp_path / "set.json")), want)
    assert mrrope.patch_of(model).tables == (tables,)


@pytest.mark.parametrize("kind", ["one table", "head tables", "set"])
def test_a_configuration_holds_them_whole(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    of_layers = set_for(model, 2)
    without = {"one table": table_for(model), "head tables": of_layers[0], "set": of_layers}[kind]
    tables = with_factors(without, QUERY_HEADS)
    with mrrope.patched(model, tables):
        want = logits(model)
    data = mrrope.export_config(model.config, tables, engine="transformers")
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.for_model(**data)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(logits(loaded), want)
    for engine in ("vllm", "sglang", "transformers-longrope"):
        with pytest.raises(ValueError, match="one table for all layers and heads and cannot express"):
            mrrope.export_config(model.config, tables, engine=engine)


# --- caches hold keys, which have no factors


def read_with_cache(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_tables_that_differ_in_factors_continue_each_others_caches() -> None:
    model = tiny_model("llama")
    table, ids = table_for(model), tokens(1, 24)
    cache = transformers.DynamicCache(config=model.config)
    read_with_cache(mrrope.patch(model, table), ids[:, :8], cache)
    for factors in ([2.0, 1.0, 0.5, 3.0], [0.5] * 4):
        mrrope.patch(model, mrrope.HeadTables([table], factors))
        read_with_cache(model, ids[:, cache.get_seq_length() :][:, :8], cache)
    mrrope.patch(model, mrrope.HeadTables([table_for(model, seed=1)], [0.5] * 4))
    with pytest.raises(ValueError, match="got keys that a patch of mrrope with other tables has rotated"):
        read_with_cache(model, ids[:, :1], cache)


def test_factors_alone_leave_the_unpatched_models_keys() -> None:
    """A cache of the unpatched model is continued without a warning where only queries are scaled."""
    model = tiny_model("llama")
    own = rope_config.global_settings(model).table
    cache = transformers.DynamicCache(config=model.config)
    read_with_cache(model, tokens(1, 8), cache)
    mrrope.patch(model, mrrope.HeadTables([own], [2.0, 1.0, 0.5, 3.0]))
    read_with_cache(model, tokens(1, 4), cache)
    mrrope.unpatch(model)
    read_with_cache(model, tokens(1, 4), cache)


# --- scale="auto"

NATIVE = 32


def growing_model(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**TINY_SIZES, "num_key_value_heads": 2, "num_attention_heads": 4, "num_hidden_layers": 3}
    sizes |= {"max_position_embeddings": NATIVE}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "qwen2_vl":
        config = transformers.Qwen2VLTextConfig(**sizes, rope_parameters=rope | {"mrope_section": [3, 3, 2]})
        return transformers.Qwen2VLTextModel(config).double().eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope)).double().eval()


KINDS = ["sets", "heads", "tables", "mixed", "one with factors"]


def ladder(model: PreTrainedModel, kind: str) -> tuple[list[Any], list[Any]]:
    """Return tables for scales 2 and 4 with factors, and the same without."""
    sets = [random_set(seed, 3, 2, *settings_of(model), scale) for seed, scale in ((0, 2.0), (1, 4.0))]
    tables = [each[0][1] for each in sets]
    steps = {
        "sets": sets,
        "heads": [each[0] for each in sets],
        "tables": tables,
        "mixed": [tables[0], sets[1]],
        "one with factors": sets,
    }[kind]
    with_all = [with_factors(step, QUERY_HEADS, seed=7 + i) for i, step in enumerate(steps)]
    return ([with_all[0], steps[1]] if kind == "one with factors" else with_all), steps


@pytest.mark.parametrize("kind", KINDS)
def test_each_length_has_its_own_factors(kind: str) -> None:
    model = growing_model()
    steps, _ = ladder(model, kind)
    mask = torch.tensor([[0] * 80 + [1] * 20, [0] * 50 + [1] * 50, [1] * 100])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = tokens(3, 100) % 40
    wants = [logits(model, input_ids=ids[:1, 80:])]
    for row, (length, step) in enumerate([(50, steps[0]), (100, steps[1])], 1):
        tables_of = lambda i: step[i] if isinstance(step, mrrope.TableSet) else step  # noqa: B023, E731
        read = lambda model: logits(model, input_ids=ids[row : row + 1, -length:])  # noqa: B023, E731
        wants.append(reference(model, Family(), tables_of, read))
    mrrope.patch(model, steps, scale="auto")
    got = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    for row, want in enumerate(wants):
        assert relative(got[row, -want.shape[1] :], want[0]) < ROUNDING


def in_chunks(model: Any, ids: torch.Tensor, lengths: list[int], cache: Any, **options: Any) -> None:
    start = 0
    for length in lengths:
        with torch.no_grad():
            model(input_ids=ids[:, start : start + length], past_key_values=cache, **options)
        start += length


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_keys_follow_a_growing_text(kind: str, cache: str) -> None:
    """Keys of the first layer depend on no query: they are those of the same ladder without factors."""
    model = growing_model()
    steps, without = ladder(model, kind)
    ids = tokens(2, 80) % 40
    caches = []
    for tables in (steps, without):
        mrrope.patch(model, tables, scale="auto")
        kept: Any = transformers.DynamicCache(config=model.config)
        if cache == "static":
            kept = transformers.StaticCache(config=model.config, max_cache_len=96)
        in_chunks(model, ids, [30, 1, 4, 25, 4, 16], kept)
        (index,) = getattr(kept, TABLES_ATTRIBUTE).values()
        assert index.tolist() == [2, 2]
        caches.append(kept)
    with_all, plain = caches
    assert relative(with_all.layers[0].keys[:, :, :80], plain.layers[0].keys[:, :, :80]) < 1e-12
    assert relative(with_all.layers[2].keys[:, :, :80], plain.layers[2].keys[:, :, :80]) > 1e-3


def test_a_grown_text_goes_on_with_the_factors_of_its_scale() -> None:
    """One layer: its keys depend on no query, so that the next token is that of a text read at once."""
    torch.manual_seed(0)
    sizes = {**TINY_SIZES, "num_key_value_heads": 2, "num_attention_heads": 4, "num_hidden_layers": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=NATIVE, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).double().eval()
    steps = [with_factors(table_for(model, seed, scale), QUERY_HEADS, seed) for seed, scale in ((0, 2.0), (1, 4.0))]
    ids = tokens(1, 100) % 40
    mrrope.patch(model, steps, scale="auto")
    for length, step in ((50, steps[0]), (100, steps[1])):
        text = ids[:, :length]
        read = lambda model: logits(model, input_ids=text)  # noqa: B023, E731
        want = reference(mrrope.unpatch(model), Family(), lambda i: step, read)  # noqa: B023
        mrrope.patch(model, steps, scale="auto")
        cache = transformers.DynamicCache(config=config)
        in_chunks(model, text, [20, length - 21], cache)
        assert relative(read_with_cache(model, text[:, -1:], cache), want[:, -1:]) < ROUNDING


@pytest.mark.parametrize("kind", ["sets", "heads", "tables"])
def test_rows_of_positions_follow_too(kind: str) -> None:
    model = growing_model("qwen2_vl")
    steps, without = ladder(model, kind)
    ids = tokens(2, 80) % 40
    keys = []
    for tables in (steps, without):
        mrrope.patch(model, tables, scale="auto")
        cache = transformers.DynamicCache(config=model.config)
        for start, end in ((0, 30), (30, 50), (50, 80)):
            positions = torch.arange(start, end).expand(3, 2, -1)
            in_chunks(model, ids[:, start:end], [end - start], cache, position_ids=positions)
        keys.append([layer.keys for layer in cache.layers])
    assert relative(keys[0][0], keys[1][0]) < 1e-12
    assert relative(keys[0][2], keys[1][2]) > 1e-3


def test_a_ladder_in_one_graph() -> None:
    model = growing_model()
    steps, _ = ladder(model, "sets")
    mrrope.patch(model, steps, scale="auto")
    ids = tokens(2, 40) % 40
    want = transformers.DynamicCache(config=model.config)
    in_chunks(model, ids, [30, 10], want)
    torch._dynamo.reset()
    got = transformers.DynamicCache(config=model.config)
    in_chunks(torch.compile(model, backend="eager", fullgraph=True), ids, [30, 10], got)
    torch._dynamo.reset()
    for one, other in zip(got.layers, want.layers, strict=True):
        assert relative(one.keys, other.keys) < ROUNDING


# --- what does not fit


def test_factors_for_another_number_of_query_heads() -> None:
    model = tiny_model("llama")
    table = random_table(random.Random(0), *SETTINGS)
    for count in (2, 8):
        message = f"query_factors for the 4 query heads of LlamaForCausalLM in layer 0, got {count}"
        refused(model, mrrope.HeadTables([table] * 2, [1.5] * count), message)
        refused(model, mrrope.HeadTables([table], [1.5] * count), message)
        of_second = mrrope.TableSet([table, mrrope.HeadTables([table], [1.5] * count)])
        refused(model, of_second, message.replace("layer 0", "layer 1"))
        refused(model, [of_second], message.replace("layer 0", "layer 1"), scale="auto")


@pytest.mark.filterwarnings("ignore:.*is extended by its configuration")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ALONE, "takes queries and keys alike, one by one"),
        (INDEXED, "Indexer rotates queries of its own by the same tables"),
        (NORMED, "norms rotated queries, which cancels factors"),
    ],
    ids=["alone", "indexed", "normed"],
)
def test_families_without_factors(names: set[str], message: str) -> None:
    for name in sorted(names):
        model = tiny_model(name)
        tables = mrrope.HeadTables([table_for(model)], random_factors(random.Random(0), QUERY_HEADS))
        of_model = f"method must hold no query_factors for {type(model).__name__}: .*{message}"
        refused(model, tables, of_model, base=tables.base)  # DeepSeek-V4's layers differ in their base


def test_attention_that_selects_tokens() -> None:
    model = tiny_model("qwen4_exp_text")
    tables = with_factors(table_for(model), QUERY_HEADS)
    refused(model, tables, "one table for all heads and layers for .* selects tokens")


def test_models_that_keep_their_own_code() -> None:
    model = model_named(UNFUSABLE)
    refused(model, with_factors(table_for(model), QUERY_HEADS), "OwnCosines computes with cosines and sines itself")


def test_tensor_parallel_models() -> None:
    model = tiny_model("llama")
    tables = with_factors(table_for(model), QUERY_HEADS)
    model._tp_size = 2
    refused(model, tables, "it is tensor parallel, and no rank has all query heads")
    model._tp_size = 1
    mrrope.patch(model, tables)


def test_rows_of_factors_pass_through_one_tensor() -> None:
    positions, table = torch.arange(12).view(2, 6), torch.randint(2**62, (2, 3, 2, 9))
    (packed,) = handoff.pack(positions, table, in_one_tensor=True)
    got_positions, got_table = handoff.unpack((packed,), 6)
    assert torch.equal(got_positions, positions)
    assert torch.equal(got_table, table)
