"""Models with fused RMSNorms, and their references."""

from typing import Any

import pytest
from torch import nn

import mrrope
from mrrope.hf.fusion.rms_norm import FusedNorms

pytest.importorskip("transformers")

from tiny_models import tiny_model
from transformers import PreTrainedModel

QK_NORMS = ("qwen3", "olmo2")


PATCH = {"scale": 4.0, "original_max_position": 64, "fuse_norms": True}


def fused(family: str = "llama", **options: Any) -> PreTrainedModel:
    return mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | options)


def reference(family: str = "llama", **options: Any) -> PreTrainedModel:
    return fused(family, fuse_norms=False, **options)


def norms(model: nn.Module) -> list[nn.Module]:
    """The norms whose class is swapped."""
    return [module for module in model.modules() if FusedNorms().state_of(module) is not None]
