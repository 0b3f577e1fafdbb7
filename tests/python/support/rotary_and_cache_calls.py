"""Calls of rotary_and_cache, and what they must write."""

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
    assert_other_slots_unchanged,
    assert_rotated_float8,
    by_slot,
    by_token,
    nearest_float8,
)
from rotary_cases import Case, whole_memory
from rotary_reference import assert_rotated
from tensor_bits import same_bits

import mrrope

IN_PLACE = torch.ops.mrrope.rotary_and_cache_.default


@dataclass(frozen=True)
class Kept:
    """How a call's k and v are cached."""

    paged: bool = True
    cache_layout: str = "nhd"
    float8: torch.dtype | None = None
    scales: str = "none"
    slot_dtype: torch.dtype = torch.int64
    memory: str = "contiguous"
    q_out: bool = False


class Call(CacheCall):
    op = staticmethod(mrrope.rotary_and_cache_)
    inputs = ("q", "k", "v")

    def __init__(self, case: Case, kept: Kept, device: str) -> None:
        self.case, self.kept = case, kept
        self.q, self.k = case.heads_on(device)
        self.v = case.with_changes(seed=case.seed + 1).heads_on(device)[1]
        self.positions, self.table = case.positions(device), case.table()
        rng = np.random.default_rng([case.seed, 7])
        heads = case.heads[1]
        blocks, block_size, slots = random_slots(case, kept.paged, rng)
        self.slots = slots.to(device, kept.slot_dtype)
        shape = (blocks, block_size, heads) if kept.cache_layout == "nhd" else (blocks, heads, block_size)
        self.key_cache, self.value_cache = (
            cache_storage((*shape, case.head_dim), kept.memory, kept.float8 or case.dtype, device) for _ in range(2)
        )
        self.key_scale, self.value_scale = None, None
        if kept.scales != "none":
            count = {"one": (), "one in a row": (1,), "each": (heads,)}[kept.scales]
            values = torch.from_numpy(rng.uniform(0.004, 0.1, (2, *count)).astype(np.float32)).to(device)
            self.key_scale, self.value_scale = values
        self.q_out = torch.full_like(self.q, -5.0) if kept.q_out else None

    def arguments(self) -> dict:
        where = {"slots" if self.kept.paged else "cache_positions": self.slots}
        return {
            **{name: getattr(self, name) for name in ("q", "k", "v", "positions", "table", "key_cache", "value_cache")},
            **where,
            "layout": self.case.layout,
            "cache_layout": self.kept.cache_layout,
            "pairing": self.case.pairing,
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
            "q_out": self.q_out,
        }

    def raw_arguments(self) -> tuple:
        heads = (self.q,) if self.q_out is None else (self.q, self.q_out)
        packed = self.table.packed(self.q.device)
        options = (self.case.layout, self.kept.cache_layout, self.case.pairing, self.key_scale, self.value_scale)
        return (*heads, self.k, self.v, self.positions, packed, self.key_cache, self.value_cache, self.slots,
                self.kept.paged, *options)  # fmt: skip

    def written(self) -> list[torch.Tensor]:
        return [self.q if self.q_out is None else self.q_out, self.key_cache, self.value_cache]

    def each_slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are cached, and their slots, counted over all blocks."""
        length = self.key_cache.shape[1 if self.kept.cache_layout == "nhd" else 2]
        return cached_tokens(self.slots, None if self.kept.paged else length)

    def check(self, before: "Call") -> None:
        case, table = self.case, self.table
        assert_rotated(self.written()[0], before.q, self.positions, table, case.layout, case.pairing)
        for name in ("k", "v") + (() if self.q_out is None else ("q",)):
            assert same_bits(whole_memory(getattr(self, name)), whole_memory(getattr(before, name)))
        kept, slots = self.each_slot()
        positions = self.positions.expand(self.slots.shape).reshape(-1)[kept]
        for name, heads, scale in (("key", before.k, self.key_scale), ("value", before.v, self.value_scale)):
            cache, was = (getattr(call, f"{name}_cache") for call in (self, before))
            assert_other_slots_unchanged(cache, was, slots, self.kept.cache_layout)
            rows = by_slot(cache, self.kept.cache_layout)
            heads = by_token(heads, case.layout)[kept]
            if not self.kept.float8 and name == "key":
                assert_rotated(rows[slots], heads, positions, table, "thd", case.pairing)
            elif not self.kept.float8:
                assert same_bits(rows[slots], heads)
            elif name == "value":
                assert torch.equal(rows[slots], nearest_float8(heads.float(), scale, cache.dtype).view(torch.uint8))
            else:
                assert_rotated_float8(rows[slots].view(cache.dtype), heads, positions, table, case.pairing, scale)

    def slots_in_all(self) -> int:
        return by_slot(self.key_cache, self.kept.cache_layout).shape[0]
