"""Families with tables per layer and key head, and the reference of each."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from head_by_head import COMPLEX, HALVES, INTERLEAVED, ONE_HALF, random_set
from patched_models import Snapshot
from transformers import PreTrainedModel

from mrrope.hf import rope_config
from mrrope.hf.layer_tables import LayerTables
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

ROUNDING = 2e-6
"""Relative error of the logits. Modeling code computes norms, some rotations and its own angles in float32."""


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


# --- what does not fit


def refused(model: PreTrainedModel, method: Any, message: str, **options: Any) -> None:
    before = Snapshot(model)
    with pytest.raises(ValueError, match=message):
        mrrope.patch(model, method, **options)
    before.assert_untouched()
    assert not any(LayerTables().state_of(module) for module in model.modules())


# --- tables being learned


def rotaries_of(model: torch.nn.Module) -> list[TableRotaryEmbedding]:
    return [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]
