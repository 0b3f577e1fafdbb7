"""The tables that the study compares: every published method, two powers between and beyond, and Su's mixed radix."""

from __future__ import annotations

import torch

from mrrope.calibration.calibrate import FIXED_METHODS
from mrrope.evaluation.compared_methods import Method
from mrrope.table_lookup import NativeRope, resolve_table
from mrrope.tables import FrequencyTable

POWERS = (0.5, 2.0)
SU = "su"
SU_EXPONENT = 0.625
EVOLVED = "evolved"
HOPELESS = ("rope", "pi")
"""Find nothing far out and take as long as the others."""


def su_scales(pairs: int, scale: float) -> torch.Tensor:
    """exp(a m^b) for the m-th pair, counted from 1, with a such that the last one has the whole scale: Jianlin Su's
    mixed radix, float64."""
    place = torch.arange(1, pairs + 1, dtype=torch.float64) / pairs
    return torch.tensor(scale, dtype=torch.float64) ** place**SU_EXPONENT


def contenders(trained: NativeRope, scale: float) -> dict[str, FrequencyTable]:
    """By name. Su's comes without a temperature, as he published it."""
    fixed = {method: resolve_table(trained, method, scale, {}) for method in FIXED_METHODS}
    powers = {
        f"mrrope_pow {power:g}": resolve_table(trained, "mrrope_pow", scale, {"power": power}) for power in POWERS
    }
    su = resolve_table(trained, "longrope", scale, {"factors": su_scales(trained.rotary_dim // 2, scale)})
    return {**fixed, **powers, SU: su}


def as_methods(tables: dict[str, FrequencyTable]) -> list[Method]:
    """To evaluate."""
    return [Method(name, table=table) for name, table in tables.items()]
