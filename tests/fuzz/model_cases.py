"""One random run of a tiny model: its family, its RoPE, how it is patched and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tiny_models
import torch
from tiny_models import LENGTH
from transformers import PreTrainedModel

from fuzz.shrinking import choice
from mrrope.tables import SCALE_ONLY_METHODS

ROPES = ("own", "own", "default", "linear", "dynamic", "yarn", "llama3", "longrope")
WAYS = ("forward", "chunks", "steps", "two turns", "static", "cropped", "padded", "greedy", "beams", "gradients")
KEPT_MODELS = 400


@dataclass(frozen=True)
class ModelCase:
    """A model that is patched, reads a text, and is unpatched."""

    device: str = choice("cpu", "cuda")
    family: str = choice("llama")
    rope: str = choice(*ROPES)
    factor: float = choice(2.0, 4.0, 8.0)
    partial: float = choice(0.0, 0.5, 1.0)  # of a head rotates, in families that say so; 0 for as much as they do
    method: str = choice(*SCALE_ONLY_METHODS)
    scale: float | str = choice(1.0, 2.0, 4.0, "auto", "auto")
    way: str = choice(*WAYS)
    batch: int = choice(1, 2, 3)
    length: int = choice(4, 9, 17, 40, 66, 100, 140)
    chunk: int = choice(1, 3, 8, 20, 64)
    local_layers: bool = choice(False, False, True)
    fuse_projection: bool = choice(False, False, False, True)
    fuse_norms: bool = choice(True, True, False)
    seed: int = choice(0)

    def normalized(self) -> ModelCase:
        """The nearest case that makes sense: steps of one token take a while."""
        case = self
        if case.way in ("steps", "greedy", "beams"):
            case = replace(case, length=min(66, case.length))
        if case.way in ("chunks", "static", "padded"):
            chunk = next(size for size in (1, 3, 8, 20, 64) if size >= max(case.chunk, case.length // 16))
            case = replace(case, chunk=chunk)
        if case.scale == "auto" and case.method == "rope":
            case = replace(case, method="mrrope_pro")
        return case

    def run(self) -> None:
        """Reads in all the ways there are to compare, and raises a :class:`fuzz.shrinking.CaseError`."""
        from fuzz.models import check

        check(self)

    def model(self) -> PreTrainedModel:
        """The tiny model, unpatched; the same object for cases that differ in patch and text only."""
        return built_model(self.family, self.rope, self.factor, self.partial, self.device)


@lru_cache(maxsize=KEPT_MODELS)
def built_model(family: str, rope: str, factor: float, partial: float, device: str) -> PreTrainedModel:
    """With these settings where the family takes them, else with its own."""
    stock = tiny_models.tiny_model(family).to(device)
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
        changed = kept | {"rope_type": rope} | settings_of(rope, factor, pairs)
    text.rope_parameters = changed
    try:
        model = tiny_models.random_model(config).to(device)
        with torch.no_grad():
            model(**on(device, tiny_models.inputs(model, tiny_models.tokens(1, 4))))
    except Exception:  # whatever a family's own code makes of settings that no model of it has
        return stock
    return model


def settings_of(rope: str, factor: float, pairs: int) -> dict[str, Any]:
    """Valid parameters of a rope_type for the tiny models' length."""
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


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    """A call's tensors on a device; of a drafter's states, too."""

    def moved(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: moved(value) for name, value in x.items()}
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return moved(call)
