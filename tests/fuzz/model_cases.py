"""Random runs of tiny models: family, RoPE settings, patch options, and how the text is read."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tiny_models
import torch
from tiny_models import LENGTH
from transformers import PreTrainedModel

from fuzz.shrinking import choice
from mrrope.tables.frequency_table import SCALE_ONLY_METHODS

ROPES = ("own", "own", "default", "linear", "dynamic", "yarn", "llama3", "longrope")
MODES = ("forward", "chunks", "steps", "chat", "static", "cropped", "padded", "greedy", "beams", "gradients")
CACHED_MODELS = 400


@dataclass(frozen=True)
class ModelCase:
    """A tiny model that is patched, run on a text, and unpatched."""

    device: str = choice("cpu", "cuda")
    family: str = choice("llama")
    rope: str = choice(*ROPES)
    factor: float = choice(2.0, 4.0, 8.0)
    partial: float = choice(0.0, 0.5, 1.0)  # partial_rotary_factor, in families that have it; 0 keeps theirs
    method: str = choice(*SCALE_ONLY_METHODS)
    scale: float | str = choice(1.0, 2.0, 4.0, "auto", "auto")
    mode: str = choice(*MODES)
    batch: int = choice(1, 2, 3)
    length: int = choice(4, 9, 17, 40, 66, 100, 140)
    chunk: int = choice(1, 3, 8, 20, 64)
    local_layers: bool = choice(False, False, True)
    fuse_norms: bool = choice(True, True, False)
    seed: int = choice(0)

    def normalized(self) -> ModelCase:
        """Return the nearest valid case, with fewer tokens where each is a step of its own."""
        case = self
        if case.mode in ("steps", "greedy", "beams"):
            case = replace(case, length=min(66, case.length))
        if case.mode in ("chunks", "static", "padded"):
            chunk = next(size for size in (1, 3, 8, 20, 64) if size >= max(case.chunk, case.length // 16))
            case = replace(case, chunk=chunk)
        if case.scale == "auto" and case.method == "rope":
            case = replace(case, method="mrrope_pro")
        return case

    def run(self) -> None:
        """Check the run.

        Raises:
            fuzz.shrinking.CaseError: A check fails.
        """
        from fuzz.model_checks import check

        check(self)

    def model(self) -> PreTrainedModel:
        """Return the unpatched tiny model; the same object for cases that differ in patch and text only."""
        return cached_model(self.family, self.rope, self.factor, self.partial, self.device)


@lru_cache(maxsize=CACHED_MODELS)
def cached_model(family: str, rope: str, factor: float, partial: float, device: str) -> PreTrainedModel:
    """Return a model with these RoPE settings where the family accepts them, else with its own."""
    if device != "cpu":
        return copy.deepcopy(cached_model(family, rope, factor, partial, "cpu")).to(device)
    stock = tiny_models.tiny_model(family)
    config = tiny_models.tiny_config_of(family)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    is_plain = isinstance(parameters.get("rope_theta"), (int, float)) and "mrope_section" not in parameters
    if not is_plain or (rope == "own" and not partial):
        return stock
    changed = dict(parameters)
    if partial and "partial_rotary_factor" in parameters:
        changed["partial_rotary_factor"] = partial
    if rope != "own":
        kept = {name: changed[name] for name in ("rope_theta", "partial_rotary_factor") if name in changed}
        pairs = next((x.numel() for name, x in stock.named_buffers() if name.endswith("inv_freq")), 0)
        changed = kept | {"rope_type": rope} | rope_settings(rope, factor, pairs)
    if "original_max_position_embeddings" in changed and hasattr(text, "original_max_position_embeddings"):
        # Phi-3's configurations have it beside rope_parameters too, where it wins: 64 of 64 tokens, so that the long
        # factors of longrope would begin past what the model reads.
        text.original_max_position_embeddings = changed["original_max_position_embeddings"]
    text.rope_parameters = changed
    try:
        model = tiny_models.random_model(config)
        with torch.no_grad():
            model(**tiny_models.inputs(model, tiny_models.tokens(1, 4)))
    except Exception:  # the family's code does not support these settings
        return stock
    return model


def rope_settings(rope: str, factor: float, pairs: int) -> dict[str, Any]:
    """Return valid parameters of a rope_type for the tiny models' length."""
    original = {"factor": factor, "original_max_position_embeddings": LENGTH // 4}
    return {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {**original, "beta_fast": 4.0, "beta_slow": 1.0},
        "llama3": {**original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {
            **original,
            "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
            "long_factor": [1.0 + (factor - 1.0) * i / max(1, pairs - 1) for i in range(pairs)],
        },
    }[rope]


def to_device(device: str, call: dict[str, Any]) -> dict[str, Any]:
    """Move forward arguments to a device, also inside dicts and tuples."""

    def moved(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: moved(value) for name, value in x.items()}
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return moved(call)
