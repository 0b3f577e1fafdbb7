"""The tables that the studies compare: the published methods, two more powers, and Su's mixed radix."""

from __future__ import annotations

import torch

from mrrope.calibration.calibrate import FIXED_METHODS
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.truncated import TRUNCATED
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.lookup import NativeRope, resolve_table

POWERS = (0.5, 2.0)
SU = "su"
SU_EXPONENT = 0.625
EVOLVED = "evolved"
WEAK_METHODS = ("rope", "pi")
"""Find no key at long range and take as long as the others."""


def su_scales(pairs: int, scale: float) -> torch.Tensor:
    """Cumulative scales of Jianlin Su's mixed radix, float64.

    Pair m, counted from 1, has exp(a m^b), with ``a`` such that the last pair has the full scale.
    """
    place = torch.arange(1, pairs + 1, dtype=torch.float64) / pairs
    return torch.tensor(scale, dtype=torch.float64) ** place**SU_EXPONENT


def tables_to_compare(trained: NativeRope, scale: float) -> dict[str, FrequencyTable]:
    """The tables by name. Su's has no temperature, as published."""
    fixed = {method: resolve_table(trained, method, scale, {}) for method in FIXED_METHODS}
    powers = {
        f"mrrope_pow {power:g}": resolve_table(trained, "mrrope_pow", scale, {"power": power}) for power in POWERS
    }
    su = resolve_table(trained, "longrope", scale, {"factors": su_scales(trained.rotary_dim // 2, scale)})
    return {**fixed, **powers, SU: su}


def as_methods(tables: dict[str, FrequencyTable]) -> list[Method]:
    """The tables as methods of an evaluation, and the stock model over windows of its native length."""
    return [*(Method(name, table=table) for name, table in tables.items()), Method(TRUNCATED)]
