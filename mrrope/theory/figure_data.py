"""The data of every figure, ready for JSON; the drawing uses nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from mrrope.tables.frequency_table import METHOD_TRAITS, SCALE_ONLY_METHODS, FrequencyTable, frequency_table
from mrrope.theory import attention_scores
from mrrope.theory.curves import first_zero, lowest_between, middle_pairs, similarities_up_to, spelled_number, trend

METHODS = SCALE_ONLY_METHODS
WITH_MIDDLE = tuple(method for method in METHODS if METHOD_TRAITS[method].has_temperature)
BASES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Bases for m-hat, as multiples of the setting's own."""
POINTS = 400
BINS = 100
"""Number of log-spaced bins of distances; B(m) is shown by its minimum in each."""


@dataclass(frozen=True)
class Setting:
    """The settings of all tables in a figure."""

    rotary_dim: int
    base: float
    original_max_position: int
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 1:
            raise ValueError(f"scale must be above 1, so that there is an extension to show, got {self.scale}")

    def table(self, method: str, **changes: Any) -> FrequencyTable:
        """The table of a method."""
        return frequency_table(method, **{**asdict(self), **changes})

    @property
    def middle(self) -> slice:
        """The middle pairs, the same for all methods."""
        pairs = middle_pairs(self.table("mrrope_pro"))
        if pairs.start == pairs.stop:
            raise ValueError(
                "original_max_position must be long enough for a pair to turn once, so that there are middle pairs to "
                f"show, got {self.original_max_position}"
            )
        return pairs

    @property
    def reach(self) -> int:
        """Length of the extended context."""
        return int(self.original_max_position * self.scale)

    @property
    def edges(self) -> list[int]:
        """Edges of the bins of distances."""
        return log_spaced(self.reach + 1, BINS)


def rounded(values: Iterable[float]) -> list[float]:
    """Round to five significant digits, which suffice for a plot."""
    return [float(f"{value:.5g}") for value in values]


def log_spaced(last: int, points: int) -> list[int]:
    """Distinct integers from 1 to ``last``, spaced logarithmically."""
    return sorted({round(last ** (i / (points - 1))) for i in range(points)})


def cumulative_scales(setting: Setting) -> dict[str, Any]:
    """Cumulative scale s_i of every pair, for the scale and its square root."""
    return {
        f"{scale:g}": {
            method: rounded(setting.table(method, scale=scale).cumulative_scale.tolist()) for method in METHODS
        }
        for scale in (setting.scale, math.sqrt(setting.scale))
    }


def radix_factors(setting: Setting) -> dict[str, Any]:
    """Radix factor lambda_i of every pair, and the trend over the middle pairs."""
    found = {}
    for method in WITH_MIDDLE:
        factors = setting.table(method).radix_factors
        # The outermost factors are excluded: a ramp that starts or ends between two pairs covers them partially.
        found[method] = {"factors": rounded(factors.tolist()), "trend": trend(factors[setting.middle][1:-1])}
    return found


def spelled_numbers(setting: Setting) -> dict[str, Any]:
    """m-hat per pair over positions, for several bases and for the methods."""
    positions = torch.arange(0, setting.reach + 1, max(setting.reach // POINTS, 1))

    def curve(table: FrequencyTable) -> list[float]:
        return rounded((spelled_number(table.inv_freq, positions) / len(table.inv_freq)).tolist())

    bases = [setting.base * factor for factor in BASES if setting.base * factor > 1]
    return {
        "positions": positions.tolist(),
        "by_base": {f"{base:g}": curve(setting.table("rope", base=base, scale=1.0)) for base in bases},
        "by_method": {method: curve(setting.table(method)) for method in METHODS},
    }


def similarities(setting: Setting) -> dict[str, Any]:
    """Minima and first zero of B(m), for all pairs and for the middle ones."""
    edges = setting.edges
    found: dict[str, Any] = {"distances": edges[:-1], "first_zero_by_scale": zeros_by_scale(setting)}
    for name, pairs in (("all", slice(None)), ("middle", setting.middle)):
        found[name] = {}
        for method in METHODS:
            frequencies = setting.table(method).inv_freq[pairs]
            values = similarities_up_to(frequencies, setting.reach)
            found[name][method] = {
                "first_zero": first_zero(values),
                "dips": rounded(dip / len(frequencies) for dip in lowest_between(values, edges)),
            }
    return found


def zeros_by_scale(setting: Setting) -> dict[str, Any]:
    """First zero of B(m) over all pairs, at smaller and larger scales."""
    scales = [setting.scale * factor for factor in (0.25, 0.5, 1.0, 2.0) if setting.scale * factor > 1]
    return {
        f"{scale:g}": {
            method: first_zero(
                similarities_up_to(
                    setting.table(method, scale=scale).inv_freq, int(setting.original_max_position * scale)
                )
            )
            for method in METHODS
        }
        for scale in scales
    }


def require_distances_past_native(setting: Setting) -> None:
    """Raise ValueError if no bin starts past the native length."""
    past = setting.edges[-2]
    if past < setting.original_max_position:
        raise ValueError(
            f"scale must be larger, so that distances past the native length of {setting.original_max_position} tokens "
            f"are shown, got {setting.scale:g}: the last of {BINS} stretches starts at {past}"
        )


def middle_attention(setting: Setting, model: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """The middle pairs' contribution to a real model's attention scores, over distance.

    For every bin of distances: the mean over token pairs, and its standard deviation within the bin.
    """
    products = attention_scores.pair_products(model, tokens)
    # The score is linear in the products: the mean product gives the mean score.
    mean_product = products.values.mean(0, keepdim=True)
    edges = setting.edges
    found: dict[str, Any] = {
        "layers": products.layers,
        "samples": len(products.values),
        "distances": edges[:-1],
        "methods": {},
    }
    for method in ("rope", *WITH_MIDDLE):
        distances = torch.arange(1, setting.reach + 1)
        means = attention_scores.scores(mean_product, setting.table(method), distances, setting.middle)[0]
        bins = [means[start - 1 : end - 1] for start, end in pairwise(edges)]
        found["methods"][method] = {
            "mean": rounded(values.mean().item() for values in bins),
            "wavering": rounded(values.std(correction=0).item() for values in bins),
        }
    return found
