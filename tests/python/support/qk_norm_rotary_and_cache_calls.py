"""Calls of qk_norm_rotary_and_cache, and what they must write."""

from dataclasses import dataclass

import numpy as np
import torch
from cache_calls import (
    CacheCall,
    cache_storage,
    cached_tokens,
    random_slots,
)
from cache_reference import (
    FLOAT8,
    assert_other_slots_unchanged,
    by_slot,
    by_token,
    divisor,
    half_ulp,
    nearest_float8,
    saturated,
)
from norm_reference import EPS, normed
from rotary_cases import Case, whole_memory
from rotary_reference import TOLERANCES, pair_norms, rotated
from tensor_bits import bytes_outside, same_bits

import mrrope

TENSORS = ("q", "k", "v", "q_weight", "k_weight", "positions", "key_cache", "value_cache", "slots", "key_scale",
           "value_scale", "q_out", "q_scale", "q_scale_out", "gate")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a call does beside the rotation."""

    over: str = "head"
    offset: float = 0.0
    norms: tuple[bool, bool] = (True, True)
    gate: bool = False
    q_out: torch.dtype | str | None = None
    q_scale: str = "none"
    paged: bool = True
    cache_layout: str = "nhd"
    cache_dtype: torch.dtype | None = None
    scales: str = "none"
    memory: str = "contiguous"


class Call(CacheCall):
    op = staticmethod(mrrope.qk_norm_rotary_and_cache_)
    inputs = ("q", "k", "v")

    def __init__(self, case: Case, options: Options, device: str) -> None:
        self.case, self.options = case, options
        self.q, self.k = case.heads_on(device)
        others = case.with_changes(seed=case.seed + 1).heads_on(device)
        self.v, self.gate = others[1], others[0] if options.gate else None
        self.positions, self.table = case.positions(device), case.table()
        rng = np.random.default_rng([case.seed, 9])
        self.q_weight, self.k_weight = (
            self._weight(rng, heads, device) if is_normed else None
            for heads, is_normed in zip(case.heads, options.norms, strict=True)
        )
        blocks, size, slots = random_slots(case, options.paged, rng)
        self.slots = slots.to(device)
        shape = (blocks, size, case.heads[1]) if options.cache_layout == "nhd" else (blocks, case.heads[1], size)
        self.key_cache, self.value_cache = (
            self._storage((*shape, case.head_dim), options.cache_dtype, device) for _ in range(2)
        )
        self.key_scale, self.value_scale = (self._scale(rng, options.scales, case.heads[1], device) for _ in range(2))
        self.q_out = None
        if options.q_out is not None:
            dtype = None if options.q_out == "same" else options.q_out
            self.q_out = self._storage(tuple(self.q.shape), dtype, device)
        self.q_scale = self._scale(rng, options.q_scale, case.heads[0], device)
        self.q_scale_out = None
        if options.q_scale == "computed":
            self.q_scale_out = torch.full((*self.q.shape[:-1], 2), -5.0, device=device)[..., 0]

    def _weight(self, rng, heads: int, device: str) -> torch.Tensor:
        count = heads * self.case.head_dim if self.options.over == "all_heads" else self.case.head_dim
        return torch.from_numpy(rng.standard_normal(count)).to(device, self.case.dtype)

    def _storage(self, shape, dtype, device) -> torch.Tensor:
        return cache_storage(shape, self.options.memory, dtype or self.case.dtype, device)

    def _scale(self, rng, kind: str, heads: int, device: str) -> torch.Tensor | None:
        count = {"one": (), "each": (heads,)}.get(kind)
        if count is None:
            return None
        return torch.from_numpy(np.asarray(rng.uniform(0.004, 0.1, count), np.float32)).to(device)

    def arguments(self) -> dict:
        given = {name: getattr(self, name) for name in TENSORS if name != "slots"}
        return given | {
            "table": self.table,
            "slots" if self.options.paged else "cache_positions": self.slots,
            "eps": EPS if any(self.options.norms) else None,
            "weight_offset": self.options.offset,
            "over": self.options.over,
            "layout": self.case.layout,
            "cache_layout": self.options.cache_layout,
            "pairing": self.case.pairing,
        }

    def raw_arguments(self) -> tuple:
        packed = self.table.packed(self.q.device)
        heads = (self.q,) if self.q_out is None else (self.q, self.q_out)
        scales = () if self.q_out is None else (self.q_scale, self.q_scale_out)
        case, options = self.case, self.options
        return (*heads, self.k, self.v, self.q_weight, self.k_weight, self.positions, packed, self.key_cache,
                self.value_cache, self.slots, options.paged, EPS, options.offset, options.over, case.layout,
                options.cache_layout, case.pairing, self.key_scale, self.value_scale, None, self.gate,
                *scales)  # fmt: skip

    def written(self) -> list[torch.Tensor]:
        q = self.q if self.q_out is None else self.q_out
        return [x for x in (q, self.key_cache, self.value_cache, self.gate, self.q_scale_out) if x is not None]

    def exact(self, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 result by token, and for each component the magnitude that its error is relative to."""
        case, options = self.case, self.options
        wide = x.detach().cpu().double()
        if weight is not None:
            wide = normed(wide, weight.detach().cpu().double(), options.over, case.layout, options.offset)
        value = rotated(wide, self.positions, self.table, case.layout, case.pairing)
        norms = pair_norms(value, self.table.rotary_dim, case.pairing)
        return by_token(value, case.layout), by_token(norms, case.layout)

    def check(self, before: "Call") -> None:
        case = self.case
        unwritten = ["k", "v", "q_weight", "k_weight", "slots", "positions"] + ([] if self.q_out is None else ["q"])
        for name in unwritten:
            if getattr(self, name) is not None:
                assert same_bits(whole_memory(getattr(self, name)), whole_memory(getattr(before, name)))
        q, was = (call.q if call.q_out is None else call.q_out for call in (self, before))
        assert same_bits(bytes_outside(q), bytes_outside(was))
        value, norms = self.exact(before.q, self.q_weight)
        scale = self.q_scale
        if self.q_scale_out is not None:
            scale = by_token(self.q_scale_out[..., None], case.layout)[..., 0]
            self.assert_computed(scale, value, norms, q.dtype)
        self.assert_stored(by_token(q, case.layout), value, norms, scale)
        if self.gate is not None:
            self.assert_gate(before.gate)
        length = self.key_cache.shape[1 if self.options.cache_layout == "nhd" else 2]
        kept, slots = cached_tokens(self.slots, None if self.options.paged else length)
        for name in ("key_cache", "value_cache"):
            cache = getattr(self, name)
            assert_other_slots_unchanged(cache, getattr(before, name), slots, self.options.cache_layout)
            rows = by_slot(cache, self.options.cache_layout)[slots].view(cache.dtype)
            if name == "key_cache":
                value, norms = self.exact(before.k, self.k_weight)
                self.assert_stored(rows, value[kept.cpu()], norms[kept.cpu()], self.key_scale)
            elif cache.dtype in FLOAT8:
                nearest = nearest_float8(by_token(before.v, case.layout)[kept].float(), self.value_scale, cache.dtype)
                assert torch.equal(rows.view(torch.uint8), nearest.view(torch.uint8))
            else:
                assert same_bits(rows, by_token(before.v, case.layout)[kept])

    def arithmetic(self) -> float:
        dtype = self.case.dtype
        # The sum of squares and the inverse root add to the rotation's own error.
        return TOLERANCES[dtype].arithmetic + 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def assert_stored(self, actual, value, norms, scale) -> None:
        """Assert one rounding of the exact results, [tokens, heads, head_dim]."""
        if actual.dtype in FLOAT8:
            scale = (
                divisor(scale).cpu().double() if scale is None or scale.dim() < 2 else scale[..., None].cpu().double()
            )
            value = saturated(value / scale, actual.dtype)
            allowed = half_ulp(value, actual.dtype) + self.arithmetic() * norms / scale
        else:
            info = torch.finfo(actual.dtype)
            allowed = self.arithmetic() * norms + TOLERANCES[actual.dtype].rounding * value.abs()
            allowed = allowed + info.smallest_normal * info.eps
        excess = (actual.float() if actual.dtype in FLOAT8 else actual).cpu().double().sub(value).abs() - allowed
        assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"

    def assert_computed(self, scale, value, norms, dtype) -> None:
        if not value.numel():
            return
        largest = torch.finfo(dtype).max
        expected = (value.abs().amax(-1) / largest).clamp(min=2.0**-126)
        allowed = self.arithmetic() * norms.amax(-1) / largest + 2.0**-22 * expected
        assert ((scale.cpu().double() - expected).abs() <= allowed).all()

    def assert_gate(self, before: torch.Tensor) -> None:
        expected = before.cpu().double().sigmoid()
        info = torch.finfo(self.gate.dtype)
        # On a GPU the exponential of 16-bit results is approximate.
        allowed = expected * (info.eps / 2 + (2e-5 if info.bits == 16 else 4 * info.eps))
        excess = (self.gate.cpu().double() - expected).abs() - allowed - info.smallest_normal * info.eps
        assert (excess <= 0).all()
        assert same_bits(bytes_outside(self.gate), bytes_outside(before))
