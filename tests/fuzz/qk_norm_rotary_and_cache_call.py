"""Calls of qk_norm_rotary_and_cache_."""

from __future__ import annotations

import numpy as np
import torch
from norm_reference import normed
from rotary_cases import POISON
from rotary_reference import TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.op_call import Alternative, Arguments, Expected, Tensor, compute_eps
from fuzz.op_cases import OpCase
from fuzz.rotary_and_cache_call import RotaryAndCacheCall


class QkNormRotaryAndCacheCall(RotaryAndCacheCall):
    """A call of rotary_and_cache_ with norms, a gate and float8 q."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        random = case.numpy_random(8)
        q = self.arguments["q"]
        q_scale, q_scale_out = None, None
        if case.q_float8:
            self.arguments["q_out"] = self.as_float8(torch.empty_like(q), getattr(torch, case.float8_dtype))
            if case.q_scales == "computed":
                q_scale_out = torch.full(q.shape[:-1], POISON, device=case.device)
            elif case.q_scales != "none":
                values = random.uniform(0.004, 0.1, (case.q_heads,) if case.q_scales == "each" else ())
                q_scale = torch.from_numpy(np.asarray(values, np.float32)).to(case.device)
        self.arguments |= {
            "q_weight": self.weight(case.q_heads) if case.norms in ("both", "q") else None,
            "k_weight": self.weight(case.k_heads) if case.norms in ("both", "k") else None,
            "eps": case.eps,
            "weight_offset": case.weight_offset,
            "over": case.over,
            "gate": self.gate(q) if case.gate else None,
            "q_scale": q_scale,
            "q_scale_out": q_scale_out,
        }

    def gate(self, q: Tensor) -> Tensor:
        return self.tensors.alias_of(q) if self.case.alias == "gate" else self.tensors.heads(self.case.q_heads)[0]

    def weight(self, heads: int) -> Tensor:
        size = heads * self.case.head_dim if self.case.over == "all_heads" else self.case.head_dim
        return self.tensors.random((size,)) / self.case.magnitude

    def written(self, arguments: Arguments) -> list[Tensor]:
        others = [arguments["gate"], arguments["q_scale_out"]]
        return super().written(arguments) + [x for x in others if x is not None]

    def run(self, arguments: Arguments) -> list[Tensor]:
        mrrope.qk_norm_rotary_and_cache_(**arguments)
        return self.written(arguments)

    def exact(self, before: Arguments, name: str) -> tuple[Tensor, Tensor]:
        """Return q or k normed and rotated, and the error of the arithmetic."""
        case = self.case
        x, weight = before[name].double(), before[f"{name}_weight"]
        if weight is not None:
            x = normed(x, weight.double(), case.over, case.layout, case.weight_offset, case.eps)
        value = self.rotated(x, before, name == "q")
        norms = float64_reference.pair_norms(value, case.rotary_dim, case.pairing)
        # The norm adds a sum of squares and an inverse square root.
        return value, (TOLERANCES[case.torch_dtype].arithmetic + 16 * compute_eps(case)) * norms

    def stored(self, value: Tensor, error: Tensor, dtype: torch.dtype, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return values and allowed errors as they are stored: divided by their scale and saturated as float8."""
        if dtype not in float64_reference.FLOAT8:
            return value, error + TOLERANCES[dtype].rounding * value.abs() + float64_reference.smallest_subnormal(dtype)
        value = float64_reference.saturated(value / scale, dtype)
        return value, error / scale + float64_reference.half_ulp(value, dtype)

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        value, error = self.exact(before, "q")
        dtype = case.torch_dtype if before["q_out"] is None else before["q_out"].dtype
        scale: Tensor | float = 1.0
        if before["q_scale"] is not None:
            scale = before["q_scale"].double().reshape(-1, 1)
            scale = scale[:, None] if case.layout == "bhsd" else scale
        computed = []
        if before["q_scale_out"] is not None:
            largest = torch.finfo(dtype).max
            scale = (value.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-126)
            scale_error = error.amax(-1, keepdim=True) / largest + 2.0**-22 * scale
            error = error + value.abs() * scale_error / scale
            computed = [Expected("q_scale_out", scale[..., 0], scale_error[..., 0], torch.float32)]
        found = [Expected("q", *self.stored(value, error, dtype, scale))]
        keys, allowed = (self.by_token(x) for x in self.exact(before, "k"))
        cache_dtype = self.cache_dtype or case.torch_dtype
        scale = self.divisor(before["key_scale"])
        keys, allowed = self.stored(keys, allowed, cache_dtype, scale)
        values = self.by_token(before["v"]).double()
        if self.cache_dtype is not None:
            scale = self.divisor(before["value_scale"])
            values = float64_reference.nearest_float8(self.by_token(before["v"]), scale, self.cache_dtype).double()
        found.append(self.scattered("key", before, keys, allowed))
        found.append(self.scattered("value", before, values, torch.zeros_like(values)))
        if before["gate"] is not None:
            gate = before["gate"].double().sigmoid()
            # The exponential of 16-bit results is approximate on a GPU.
            error = gate * (2e-5 if case.torch_dtype.itemsize == 2 else 8 * compute_eps(case))
            found.append(Expected("gate", *self.stored(gate, error, case.torch_dtype, 1.0)))
        return found + computed

    def alternatives(self) -> list[Alternative]:
        if self.case.q_float8:
            return []
        return super().alternatives()
