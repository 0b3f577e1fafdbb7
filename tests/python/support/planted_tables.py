"""Tables that a search has to find, and the distance to them."""

import math

import torch

import mrrope

SMOLLM2 = {"rotary_dim": 64, "base": 1e5, "original_max_position": 8192, "scale": 16.0}


def sigmoid_table() -> mrrope.FrequencyTable:
    """Return a table outside the power family, whose last cumulative scale is not the scale."""
    pair = torch.arange(32, dtype=torch.float64)
    scales = (math.log(13) * torch.sigmoid((pair - 12) / 2.5)).exp()
    factors = (scales[1:] / scales[:-1]).tolist()
    return mrrope.frequency_table("radix", factors=factors, attention_factor=1.15, **SMOLLM2)


def distance(table: mrrope.FrequencyTable, planted: mrrope.FrequencyTable) -> float:
    """Return the distance of two tables; scales and temperature weigh about as much as in SmolLM2's loss."""
    scales = (table.cumulative_scale.log() - planted.cumulative_scale.log()).square().mean().item()
    return scales + 3 * (table.attention_factor - planted.attention_factor) ** 2
