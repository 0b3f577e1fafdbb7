"""Models patched with tables per layer and key head, against their own code that rotates head by head in float64."""

import copy
import gc
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

import transformers
from head_by_head import COMPLEX, HALVES, INTERLEAVED, ONE_HALF, head_by_head, random_set, random_table
from model_tolerance import relative
from patched_models import LENGTH, LLAMA, UNFUSABLE, Snapshot, decoded, generated, gradients, logits, model_named
from tiny_models import TINY_SIZES, random_model, tiny_config_of, tiny_model, tokens
from transformers import PreTrainedModel

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE
from mrrope.hf.layer_tables import LayerTables
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.tables import shipped

pytestmark = pytest.mark.usefixtures("rope_types")

ROUNDING = 2e-6
"""Relative error of the logits. Modeling code computes norms, some rotations and its own angles in float32."""
SETTINGS = (LLAMA["rotary_dim"], LLAMA["base"], LLAMA["original_max_position"])


@dataclass(frozen=True)
class Family:
    """How a modeling file applies RoPE, for the reference."""

    form: str = HALVES
    function: str = "apply_rotary_pos_emb"
    key_heads: int = 2
    dtype: torch.dtype = torch.float64
    keys_of: tuple[tuple[int, int], ...] = ()
    """Layers without keys of their own, each with the layer whose keys it attends to."""

    def entry(self, tables: mrrope.TableSet, layer: int) -> Any:
        return tables[dict(self.keys_of).get(layer, layer)]


FAMILIES = {
    "llama": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "gpt_neox": Family(key_heads=4),  # a quarter of each head, no grouped queries
    "phi": Family(),  # half of each head, split by the caller
    "glm": Family(),  # interleaved, half of each head
    "cohere": Family(INTERLEAVED),
    "gemma3_text": Family(),  # local layers with a RoPE of their own
    "gemma4_text": Family(keys_of=((2, 0), (3, 1))),  # and fewer rotated pairs in the others
    "llama4_text": Family(COMPLEX, "apply_rotary_emb"),
    "gpt_oss": Family(ONE_HALF, dtype=torch.float32),
    "qwen3_next": Family(dtype=torch.float32),  # layers without RoPE
    "deepseek_v3": Family(function="apply_rotary_pos_emb_interleave", key_heads=1, dtype=torch.float32),  # one key head
    "falcon": Family(key_heads=1),
    "moshi": Family(),  # a rotary embedding in every attention module
}


@pytest.fixture(autouse=True)
def no_other_patched_models() -> None:
    gc.collect()


def settings_of(model: torch.nn.Module) -> tuple[int, float, float]:
    own = rope_config.global_settings(model)
    assert own.original_max_position is not None
    return own.rotary_dim, own.base, own.original_max_position


def set_for(model: PreTrainedModel, key_heads: int, seed: int = 0) -> mrrope.TableSet:
    layers = model.config.get_text_config().num_hidden_layers
    return random_set(seed, layers, key_heads, *settings_of(model))


def is_local(model: PreTrainedModel, layer: int) -> bool:
    """Whether a layer has a window and a RoPE of its own, which a patch leaves alone."""
    rotary = next(rope_config.rotary_embeddings(model))
    return None not in rope_config.layer_types(rotary) and "sliding" in model.config.layer_types[layer]


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


# --- scale="auto"

NATIVE = 32


def growing_llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**TINY_SIZES, "num_key_value_heads": 2, "num_attention_heads": 4, "num_hidden_layers": 3}
    sizes |= {"max_position_embeddings": NATIVE, **changes}
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return transformers.LlamaForCausalLM(config).double().eval()


def ladder(model: PreTrainedModel, kind: str) -> list[Any]:
    """Return tables for scales 2 and 4: a set each, head tables each, or one of both."""
    sets = [random_set(seed, 3, 2, *settings_of(model), scale) for seed, scale in ((0, 2.0), (1, 4.0))]
    return {"sets": sets, "heads": [each[0] for each in sets], "mixed": [sets[0][0], sets[1]]}[kind]


KINDS = ["sets", "heads", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_length_is_read_with_its_set(kind: str) -> None:
    model = growing_llama()
    steps = ladder(model, kind)
    mask = torch.tensor([[0] * 80 + [1] * 20, [0] * 50 + [1] * 50, [1] * 100])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = tokens(3, 100) % 40
    wants = [logits(model, input_ids=ids[:1, 80:])]
    for row, (length, step) in enumerate([(50, steps[0]), (100, steps[1])], 1):
        with mrrope.patched(model, step):
            wants.append(logits(model, input_ids=ids[row : row + 1, -length:]))
    mrrope.patch(model, steps, scale="auto")
    got = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    for row, want in enumerate(wants):
        assert relative(got[row, -want.shape[1] :], want[0]) < ROUNDING


@torch.no_grad()
def in_chunks(model: Any, ids: torch.Tensor, lengths: list[int], cache: Any) -> torch.Tensor:
    found, start = [], 0
    for length in lengths:
        found.append(model(ids[:, start : start + length], past_key_values=cache).logits)
        start += length
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_keys_follow_a_growing_text(kind: str, cache: str) -> None:
    """In the first layer keys do not depend on what was read before: re-rotated ones are those of a fresh prefill."""
    model = growing_llama()
    mrrope.patch(model, ladder(model, kind), scale="auto")
    ids = tokens(2, 80) % 40
    config = model.config

    def new_cache() -> Any:
        dynamic = transformers.DynamicCache(config=config)
        return dynamic if cache == "dynamic" else transformers.StaticCache(config=config, max_cache_len=96)

    grown, fresh = new_cache(), new_cache()
    in_chunks(model, ids, [30, 1, 4, 25, 4, 16], grown)
    with mrrope.expecting(model, 80):
        in_chunks(model, ids, [80], fresh)
    (tables,) = getattr(grown, TABLES_ATTRIBUTE).values()
    assert tables.tolist() == [2, 2]
    assert relative(grown.layers[0].keys[:, :, :80], fresh.layers[0].keys[:, :, :80]) < 1e-12
    # A product of fewer rows may be summed in another order.
    assert relative(grown.layers[0].values[:, :, :80], fresh.layers[0].values[:, :, :80]) < 1e-12


def growing_gemma() -> PreTrainedModel:
    """Return a model in which every second layer is local: the others are re-rotated without their neighbours."""
    config = tiny_config_of("gemma3_text")
    config.num_hidden_layers, config.max_position_embeddings = 4, NATIVE
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return random_model(config, dtype=torch.float64)


@pytest.mark.parametrize("build", [growing_llama, growing_gemma])
def test_every_layer_is_re_rotated_by_its_own_table(build: Callable[[], PreTrainedModel]) -> None:
    """Across a step, every layer's keys are those that its new table rotates from the same unrotated keys."""
    model = build()
    own, layers = settings_of(model), model.config.num_hidden_layers
    tables = random_set(0, layers, 2, *own, 2.0)
    mrrope.patch(model, [tables], scale="auto")
    ids = tokens(1, 40) % 40
    cache = transformers.DynamicCache()
    in_chunks(model, ids, [30], cache)
    before = [layer.keys.clone() for layer in cache.layers]
    in_chunks(model, ids[:, 30:], [10], cache)
    native = rope_config.global_settings(model).table
    positions = torch.arange(30, dtype=torch.float64)
    for i in [i for i in range(layers) if not is_local(model, i)]:
        for head in range(2):
            table = tables[i] if isinstance(tables[i], mrrope.FrequencyTable) else tables[i][head]
            angles = positions[:, None] * (table.inv_freq - native.inv_freq)
            first, second = before[i][0, head].chunk(2, -1)
            turned = torch.polar(torch.full_like(angles, table.attention_factor), angles) * torch.complex(first, second)
            want = torch.cat([turned.real, turned.imag], -1)
            assert relative(cache.layers[i].keys[0, head, :30], want) < 1e-12


def test_layers_of_several_types_follow_too() -> None:
    model = tiny_model("gemma3_text", dtype=torch.float64)
    tables = set_for(model, 2)
    ids = tokens(2, 80)
    want = logits(model, input_ids=ids[:, :60])
    mrrope.patch(model, [tables], scale="auto")
    assert relative(logits(model, input_ids=ids[:, :60]), want) < ROUNDING
    got = decoded(model, ids, 60)
    assert torch.isfinite(got).all()
    with mrrope.patched(model, tables):
        fixed = logits(model, input_ids=ids)
    assert relative(logits(model, input_ids=ids), fixed) < ROUNDING


def test_a_shipped_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    model = tiny_model("llama")
    for name, scale in {"tiny-16x": 16.0, "tiny-2x": 2.0, "tiny-heads-4x": 4.0}.items():
        dim, base, length = settings_of(model)
        table = mrrope.frequency_table(
            "mrrope_pro", rotary_dim=dim, base=base, original_max_position=length, scale=scale
        )
        tables = mrrope.TableSet([mrrope.HeadTables([table] * 2)] * model.config.num_hidden_layers)
        (tables if "heads" in name else table).save(tmp_path / f"{name}.json")
    mrrope.patch(model, "tiny", scale="auto")
    (rotary,) = rotaries_of(model)
    assert [table.scale for table in rotary.tables[None]] == [1.0, 2.0, 16.0]
    mrrope.patch(model, "tiny-heads", scale="auto")
    (rotary,) = rotaries_of(model)
    assert [table[0].scale for table in rotary.tables[None][1:]] == [4.0]
    mrrope.unpatch(model)
    for unknown in ("tin", "tiny-2x", "other", str(tmp_path / "tiny-2x.json")):
        refused(model, unknown, r"a ladder that comes with mrrope \(tiny, tiny-heads\)", scale="auto")
    refused(model, "tiny", "leaves no room for {'alpha': 4.0}", scale="auto", alpha=4.0)


def test_generate_with_a_ladder_of_sets() -> None:
    model = growing_llama()
    steps = ladder(model, "sets")
    ids = tokens(2, 30) % 40
    with mrrope.patched(model, steps[0]):
        want = generated(model, ids)
    got = generated(mrrope.patch(model, steps, scale="auto"), ids)
    assert torch.equal(got.sequences, want.sequences)


def test_a_ladder_of_sets_in_one_graph() -> None:
    model = growing_llama()
    mrrope.patch(model, ladder(model, "sets"), scale="auto")
    ids = tokens(2, 40) % 40
    want = in_chunks(model, ids, [30, 10], transformers.DynamicCache(config=model.config))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = in_chunks(compiled, ids, [30, 10], transformers.DynamicCache(config=model.config))
    torch._dynamo.reset()
    assert relative(got, want) < ROUNDING


def test_latent_attention_follows_tables_by_layer() -> None:
    model = tiny_model("deepseek_v3")
    tables = set_for(model, 1)
    ids = tokens(2, 80)
    mrrope.patch(model, [tables], scale="auto")
    grown = transformers.DynamicCache(config=model.config)
    in_chunks(model, ids, [60, 20], grown)
    fresh = transformers.DynamicCache(config=model.config)
    with mrrope.expecting(model, 80):
        in_chunks(model, ids, [80], fresh)
    assert relative(grown.layers[0].keys, fresh.layers[0].keys) < 1e-5


# --- what does not fit


def refused(model: PreTrainedModel, method: Any, message: str, **options: Any) -> None:
    before = Snapshot(model)
    with pytest.raises(ValueError, match=message):
        mrrope.patch(model, method, **options)
    before.assert_untouched()
    assert not any(LayerTables().state_of(module) for module in model.modules())


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


# --- in a configuration


def exported(model: PreTrainedModel, tables: Any, **options: Any) -> Any:
    data = mrrope.export_config(model.config, tables, engine="transformers", **options)
    return transformers.AutoConfig.for_model(**data)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["set", "heads"])
def test_a_configuration_that_holds_tables(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    tables = set_for(model, 2)
    tables = tables if kind == "set" else tables[0]
    config = exported(model, tables)
    with mrrope.patched(model, tables):
        want = logits(model)
    model.config.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert mrrope.is_patched(loaded)
    assert torch.equal(logits(loaded), want)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), want)
    built = transformers.AutoModelForCausalLM.from_config(config)
    built.load_state_dict(model.state_dict())
    assert torch.equal(logits(built.eval()), want)
    plain = logits(model)
    torch.testing.assert_close(logits(mrrope.unpatch(loaded)), plain, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_built_with_tables_is_extended_from_its_own_length() -> None:
    """Not from the length that its tables reach, which its configuration states."""
    model = tiny_model("llama")
    tables = set_for(model, 2)
    built = transformers.AutoModelForCausalLM.from_config(exported(model, tables)).eval()
    built.load_state_dict(model.state_dict())
    for method, options in (("mrrope_pro", {"scale": 2.0}), ([tables], {"scale": "auto"})):
        want = logits(mrrope.patch(model, method, **options))
        torch.testing.assert_close(logits(mrrope.patch(built, method, **options)), want, rtol=1e-4, atol=1e-5)
        assert [rotary.tables[None][-1] for rotary in rotaries_of(built)] == [
            rotary.tables[None][-1] for rotary in rotaries_of(model)
        ]


def test_a_configuration_whose_tables_do_not_fit_it() -> None:
    model = tiny_model("llama")
    config = exported(model, set_for(model, 2))
    for name, value, message in (
        ("head_dim", 2 * config.head_dim, f"rotary_dim {2 * config.head_dim}, got TableSet"),
        ("num_hidden_layers", 3, "a set for the 3 layers of LlamaModel, got one for 2"),
        ("num_key_value_heads", 1, "tables for the 1 key heads of LlamaModel in layer 0, got tables for 2"),
    ):
        wrong = copy.deepcopy(config)
        setattr(wrong, name, value)
        with pytest.raises(ValueError, match=message):
            transformers.LlamaForCausalLM(wrong)


def test_threads_may_load_models_with_tables(tmp_path: Path) -> None:
    model = tiny_model("llama")
    built = transformers.AutoModelForCausalLM.from_config(exported(model, set_for(model, 2)))
    built.save_pretrained(tmp_path)
    want = logits(built.eval())

    def load(_: int) -> torch.Tensor:
        return logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())

    with ThreadPoolExecutor(8) as threads:
        assert all(torch.equal(found, want) for found in threads.map(load, range(16)))


class OddConfig(transformers.PreTrainedConfig):
    model_type = "odd"


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep those of torch; that of transformers calls get_text_config."""


@pytest.mark.parametrize(
    "odd",
    [
        {"rope_parameters": [1, 2]},
        {"rope_parameters": "rope_type"},
        {"rope_parameters": 3},
        {"text_config": OddConfig(), "decoder": OddConfig()},  # get_text_config raises
    ],
    ids=["list", "text", "number", "two text parts"],
)
def test_models_without_tables_are_left_alone(odd: dict[str, Any]) -> None:
    config = OddConfig()
    for name, value in odd.items():
        setattr(config, name, value)
    assert not mrrope.is_patched(OddModel(config))


def test_a_configuration_that_names_a_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tables = set_for(model, 2)
    tables.save(tmp_path / "set.json")
    one = tables[0][0]
    one.save(tmp_path / "one.json")
    for file, same in (("set.json", tables), ("one.json", one)):
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "mrrope", "rope_theta": 1e4, "table": str(tmp_path / file)}
        built = transformers.AutoModelForCausalLM.from_config(config).eval()
        built.load_state_dict(model.state_dict())
        with mrrope.patched(model, same):
            torch.testing.assert_close(logits(built), logits(model), rtol=1e-4, atol=1e-5)


def test_a_configuration_without_a_table() -> None:
    with pytest.raises(Exception, match="table field must be a dict of tables, a path or a name, got None"):
        transformers.LlamaConfig(**TINY_SIZES, rope_parameters={"rope_type": "mrrope", "rope_theta": 1e4})
    parameters = {"rope_type": "mrrope", "rope_theta": 1e4, "factor": "auto", "table": ["2x.json", "4x.json"]}
    config = transformers.LlamaConfig(**TINY_SIZES, rope_parameters=parameters)  # as vLLM's plugin reads it
    with pytest.raises(ValueError, match=r"table field must be a dict of tables, a path or a name, got \['2x.json'"):
        transformers.LlamaForCausalLM(config)


# --- tables being learned


def learned(tables: Any) -> torch.Tensor:
    """Return tables as a float64 tensor of radians per position and attention factor."""
    heads = [tables] * 2 if isinstance(tables, mrrope.FrequencyTable) else tables
    return torch.tensor([[*table.inv_freq, table.attention_factor] for table in heads], dtype=torch.float64)


def rotaries_of(model: torch.nn.Module) -> list[TableRotaryEmbedding]:
    return [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "gemma3_text", "llama4_text", "gemma4_text"])
def test_learned_tables_rotate_as_ready_ones(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    tables, start = set_for(model, family.key_heads), set_for(model, family.key_heads, seed=1)
    want = logits(mrrope.patch(model, tables))
    mrrope.patch(model, start)
    (rotary,) = rotaries_of(model)
    by_layer = torch.stack([learned(entry) for entry in tables]).requires_grad_()
    rotary.learned = {"full_attention": by_layer, None: by_layer}
    assert relative(logits(model), want) < ROUNDING
    model(input_ids=tokens(2, 24)).logits.square().sum().backward()
    is_used = torch.tensor([not is_local(model, i) and i not in dict(family.keys_of) for i in range(len(tables))])
    if name == "llama4_text":
        is_used = torch.tensor([bool(layer) for layer in model.config.no_rope_layers])
    assert (by_layer.grad.abs().amax((1, 2)) > 0).equal(is_used)
    rotary.learned = None
    assert relative(logits(model), logits(mrrope.patch(model, start))) == 0


def test_gradients_of_learned_tables() -> None:
    """Against central differences of the patched model itself, with packed tables."""
    model = tiny_model("llama", dtype=torch.float64)
    tables = set_for(model, 2)
    mrrope.patch(model, tables, fuse_norms=False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    (rotary,) = rotaries_of(model)
    values = torch.stack([learned(entry) for entry in tables]).requires_grad_()
    weights = torch.randn(2, 24, model.config.vocab_size, generator=torch.Generator().manual_seed(0)).double()

    def loss(values: torch.Tensor) -> torch.Tensor:
        rotary.learned = {None: values}
        return (model(input_ids=tokens(2, 24)).logits * weights).sum()

    (gradient,) = torch.autograd.grad(loss(values), values)
    step = 1e-3  # float32 norms in the model: smaller steps drown in their rounding
    with torch.no_grad():
        for index in [(0, 0, 0), (0, 1, 3), (1, 0, 7), (1, 1, 2), (1, 0, 8)]:
            moved = values.detach().clone()
            moved[index] += step
            ahead = loss(moved)
            moved[index] -= 2 * step
            slope = (ahead - loss(moved)) / (2 * step)
            assert abs(float(slope - gradient[index])) < 2e-2 * float(gradient.abs().max())


def test_learned_tables_for_all_layers_need_no_set() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tables = set_for(model, 2)[0]
    want = logits(mrrope.patch(model, tables))
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    (rotary,) = rotaries_of(model)
    rotary.learned = {None: learned(tables)}
    assert relative(logits(model), want) < ROUNDING
    rotary.learned = {None: learned(tables).expand(2, -1, -1)}
    with pytest.raises(ValueError, match="a table of 2 layers must pass an attention module that knows its layer"):
        logits(model)
