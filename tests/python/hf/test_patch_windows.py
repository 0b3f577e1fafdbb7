"""``patch`` on models with sliding windows."""

import warnings
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative
from patched_models import (
    LENGTH,
    assert_same,
    logits,
    packed_tables,
    unfused,
)
from tiny_models import random_model, tiny_config_of, tiny_model, tokens

pytestmark = pytest.mark.usefixtures("quick_collection", "stock")


def test_a_model_of_windowed_layers_alone_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrrope.hf.rope_config.is_local", lambda _: True)
    model = tiny_model("llama")
    before = logits(model)
    with pytest.warns(UserWarning, match="keeps its own tables: all its layers with RoPE see only a window"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    torch.testing.assert_close(logits(model), before)
    mrrope.patch(model, "mrrope_pro", scale=4.0, local_layers=True)
    assert (logits(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [4.0, "auto"])
@pytest.mark.parametrize("family", ["mistral", "ministral"])
def test_a_window_under_one_rope_in_all_layers_warns(family: str, scale: float | str) -> None:
    model = tiny_model(family)
    ids = tokens(1, LENGTH)
    others = torch.cat([ids[:, :1] % 90 + 4, ids[:, 1:]], dim=1)
    reach = 256 if scale == 4.0 else 1024
    said = rf"reads {reach} tokens so, but no layer sees further back than its sliding window of 8: sliding_window"
    with pytest.warns(UserWarning, match=said):
        mrrope.patch(model, "mrrope_pro", scale=scale)
    assert torch.equal(*(logits(model, input_ids=each)[:, -1] for each in (ids, others))), "the first token is unseen"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 4 * LENGTH}),
        ("gemma2", {}),
        ("qwen2", {"sliding_window": 8}),
    ],
)
def test_layers_that_see_the_whole_text_do_not_warn(family: str, changes: dict[str, Any]) -> None:
    config = tiny_config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(random_model(config), "mrrope_pro", scale=4.0)


def test_a_window_that_is_not_extended_past_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(tiny_model("mistral"), "rope")


@pytest.mark.parametrize("local_layers", [False, True])
def test_local_layers_have_a_rope_of_their_own(local_layers: bool) -> None:
    size = {"rotary_dim": 16, "original_max_position": LENGTH}
    tables = {
        "full_attention": mrrope.frequency_table("mrrope_pro", base=1e6, scale=4.0, **size),
        "sliding_attention": mrrope.frequency_table("mrrope_pro" if local_layers else "rope", base=1e4,
                                                    scale=4.0 if local_layers else 1.0, **size),
    }  # fmt: skip
    reference, model = tiny_model("gemma3_text"), tiny_model("gemma3_text")
    plain = logits(model)
    for layer_type, table in tables.items():
        unfused(reference, table, layer_type)
    mrrope.patch(model, "mrrope_pro", scale=4.0, **({"local_layers": True} if local_layers else {}))
    for layer_type, table in tables.items():
        packed = packed_tables(model)[f"model.rotary_emb.{layer_type}_packed_table"]
        # The model's own frequencies are float32, so phase steps agree in their first 24 bits.
        difference = (packed[:-1] - table.turns).abs().double() / table.turns.abs()
        assert difference.max() < 2**-23
        assert packed[-1] == table.packed(torch.device("cpu"))[-1]
    assert_same(logits(model), logits(reference))
    assert relative(logits(reference), plain) > 1e-3
