"""``scale="auto"`` with a ladder of table sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

import transformers
from head_by_head import random_set
from head_table_models import ROUNDING, is_local, refused, rotaries_of, set_for, settings_of
from model_tolerance import relative
from patched_models import decoded, generated, logits
from tiny_models import TINY_SIZES, random_model, tiny_config_of, tiny_model, tokens
from transformers import PreTrainedModel

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE
from mrrope.tables import shipped

pytestmark = pytest.mark.usefixtures("rope_types", "no_other_patched_models")


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
