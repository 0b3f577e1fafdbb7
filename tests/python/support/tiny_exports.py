"""Tiny models whose configurations tests export."""

import copy

import pytest
import torch

import mrrope

transformers = pytest.importorskip("transformers")
from layer_tables import random_set  # noqa: E402
from tiny_models import TINY_SIZES  # noqa: E402

ORIGINAL, SCALE = 64, 4.0


TINY = TINY_SIZES | {"max_position_embeddings": ORIGINAL}


BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}


def tiny(model_type: str, **more: object):
    return transformers.CONFIG_MAPPING[model_type](**TINY, **copy.deepcopy(BASE), **more)


def logits(model, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(length)[None] % 40).logits


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {},
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": ORIGINAL},
    "stablelm": {"partial_rotary_factor": 0.25},
}


def yarn_ratio() -> mrrope.FrequencyTable:
    return mrrope.frequency_table("yarn_ratio", rotary_dim=32, base=5e4, original_max_position=ORIGINAL, scale=2.0)


GEMMA = {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}


def tables_for(config, *, layers: int | None = None, key_heads: int | None = None) -> mrrope.TableSet:
    """Return a random set for a tiny model; other numbers of layers or heads make it one for another model."""
    return random_set(
        layers or config.num_hidden_layers,
        key_heads or config.num_key_value_heads,
        rotary_dim=32,
        base=50_000.0,
        original_max_position=ORIGINAL,
        scale=SCALE,
    )
