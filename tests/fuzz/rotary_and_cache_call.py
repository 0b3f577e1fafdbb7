"""Calls of rotary_and_cache_."""

from __future__ import annotations

import numpy as np
import torch
from rotary_cases import POISON, storage_of
from rotary_reference import TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase, by_heads

SPARE_SLOTS = 3


class RotaryAndCacheCall(OpCall):
    """A call with a paged or a static cache."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, k, v = self.tensors.heads(case.q_heads, case.k_heads, case.k_heads)
        k = self.tensors.alias_of(q) if case.alias == "k" else k
        v = self.tensors.alias_of(q) if case.alias == "v" else v
        count = {"one": 1, "each": case.batch, "index": case.table_count}[case.tables]
        self.table_heads = case.k_heads if case.has_table_per_key_head else 1
        self.tables = case.make_tables(count, self.table_heads)
        rows = case.make_rows(len(self.tables))
        self.row_of_pair = None if rows is None else rows.to(case.device)
        self.query_factors = case.make_query_factors(count)
        given = by_heads(self.tables, self.table_heads, rows, case.position_rows, self.query_factors)
        tokens, sequences = case.tokens, case.sequences
        blocks, size = (-(-sequences * tokens // 4) + 2, 5) if case.paged else (sequences, tokens + SPARE_SLOTS)
        random = case.numpy_random(7)
        if case.paged:
            places = random.permutation(blocks * size)[: sequences * tokens].reshape(sequences, tokens)
        else:
            places = np.array([random.permutation(size)[:tokens] for _ in range(sequences)]).reshape(sequences, tokens)
        places = np.where(random.random(places.shape) < 0.2, random.choice([-1, -9], places.shape), places)
        slots = torch.from_numpy(places.astype(np.int64)).to(case.device, getattr(torch, case.slot_dtype))
        shape = (blocks, size, case.k_heads) if case.cache_layout == "nhd" else (blocks, case.k_heads, size)
        key_cache, value_cache = (self.cache((*shape, case.head_dim)) for _ in range(2))
        scales: list[Tensor | None] = [None, None]
        if case.scales != "none":
            each = {"one": (), "one in a row": (1,), "each": (case.k_heads,)}[case.scales]
            values = random.uniform(0.004, 0.1, (2, *each)).astype(np.float32) * np.float32(case.magnitude)
            scales = list(torch.from_numpy(values).to(case.device))
        self.arguments = {
            "q": q,
            "k": k,
            "v": v,
            "positions": self.tensors.positions(),
            "table": given[0] if case.tables == "one" else given,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slots" if case.paged else "cache_positions": slots[0] if case.layout == "thd" else slots,
            "layout": case.layout,
            "cache_layout": case.cache_layout,
            "pairing": case.pairing,
            "key_scale": scales[0],
            "value_scale": scales[1],
            "table_index": self.tensors.table_index(0) if case.tables == "index" else None,
            "q_out": torch.full_like(q, POISON) if case.q_out else None,
        }

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        with torch.device(self.case.device):
            cache = storage_of(shape, self.case.cache_memory, self.case.torch_dtype)
        return cache if self.cache_dtype is None else self.as_float8(cache, self.cache_dtype)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.case.float8_dtype) if self.case.float8 else None

    def as_float8(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a poisoned float8 tensor with the same sizes and strides."""
        elements = cache.untyped_storage().nbytes() // cache.element_size()
        memory = torch.full((elements,), POISON, device=self.case.device).to(dtype)
        return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    def written(self, arguments: Arguments) -> list[Tensor]:
        q = arguments["q"] if arguments["q_out"] is None else arguments["q_out"]
        return [q, arguments["key_cache"], arguments["value_cache"]]

    def run(self, arguments: Arguments) -> list[Tensor]:
        q = mrrope.rotary_and_cache_(**arguments)
        return [q, arguments["key_cache"], arguments["value_cache"]]

    def rotated(self, x: Tensor, before: Arguments, is_q: bool) -> Tensor:
        """Return q or k rotated; neighbouring heads share a head table."""
        case, index = self.case, before["table_index"]
        of_tables = []
        for head, steps in enumerate(PhaseSteps.of_heads(self.tables, self.table_heads, case.device)):
            rows = None if self.row_of_pair is None else self.row_of_pair[head :: self.table_heads]
            if index is not None:
                steps, rows = steps.select(index), None if rows is None else rows[index.long()]
            of_tables.append(float64_reference.rotations(before["positions"], steps, case.layout, rows))
        by = float64_reference.of_every_head(of_tables, x, case.layout)
        if is_q and self.query_factors is not None:
            by = float64_reference.times_query_factors(by, self.query_factors, index, case.layout)
        return float64_reference.rotated(x, by, case.pairing)

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        q, k = (self.rotated(before[name], before, name == "q") for name in ("q", "k"))
        options = (case.torch_dtype, case.rotary_dim, case.pairing)
        found = [Expected("q", q, float64_reference.allowed_error(q, *options))]
        k_scale, v_scale = (self.divisor(before[f"{name}_scale"]) for name in ("key", "value"))
        if self.cache_dtype is not None:
            tail = float64_reference.nearest_float8(self.by_token(before["k"]), k_scale, self.cache_dtype).double()
            keys, k_allowed = self.float8_keys(self.by_token(k), tail, k_scale, self.cache_dtype)
            values = float64_reference.nearest_float8(self.by_token(before["v"]), v_scale, self.cache_dtype).double()
        else:
            keys, k_allowed = self.by_token(k), self.by_token(float64_reference.allowed_error(k, *options))
            values = self.by_token(before["v"]).double()
        for name, rows, allowed in (("key", keys, k_allowed), ("value", values, torch.zeros_like(values))):
            found.append(self.scattered(name, before, rows, allowed))
        return found

    def float8_keys(self, k: Tensor, tail: Tensor, scale: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rotated keys divided by their scale and saturated, and the allowed error of half a float8 ULP."""
        dim = self.case.rotary_dim
        over = k / (scale.double() if isinstance(scale, Tensor) else scale)
        norms = float64_reference.pair_norms(over, dim, self.case.pairing)
        value = float64_reference.saturated(over, dtype)
        allowed = float64_reference.half_ulp(value, dtype) + TOLERANCES[torch.float32].arithmetic * norms
        value[..., dim:], allowed[..., dim:] = tail[..., dim:], 0.0
        return value, allowed

    def scattered(self, name: str, before: Arguments, rows: Tensor, allowed: Tensor) -> Expected:
        """Return the whole cache after the writes; tokens without a slot write nothing."""
        case = self.case
        cache = before[f"{name}_cache"].double()
        by_slot = (cache.transpose(1, 2) if case.cache_layout == "hnd" else cache).flatten(0, 1)
        slots = before["slots" if case.paged else "cache_positions"].reshape(-1).long()
        if not case.paged:
            length = case.tokens + SPARE_SLOTS
            sequence = torch.arange(len(slots), device=slots.device) // max(1, case.tokens)
            slots = torch.where(slots < 0, slots, slots + length * sequence)
        # Tokens without a slot go to an extra row, which is dropped.
        rest = len(by_slot)
        slots = torch.where(slots < 0, rest, slots)
        spare = by_slot.new_zeros(1, *by_slot.shape[1:])
        value = torch.cat([by_slot, spare]).index_copy(0, slots, rows)[:rest]
        allowed = torch.zeros_like(torch.cat([by_slot, spare])).index_copy(0, slots, allowed)[:rest]
        shape = cache.transpose(1, 2).shape if case.cache_layout == "hnd" else cache.shape
        value, allowed = value.view(shape), allowed.view(shape)
        if case.cache_layout == "hnd":
            value, allowed = value.transpose(1, 2), allowed.transpose(1, 2)
        return Expected(f"{name}_cache", value, allowed)

    def by_token(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2) if self.case.layout == "bhsd" else x
        return x if self.case.layout == "thd" else x.flatten(0, 1)

    def divisor(self, scale: Tensor | None) -> Tensor | float:
        return 1.0 if scale is None else scale.reshape(-1, 1)

    def alternatives(self) -> list[Alternative]:
        def toggle_q_out(arguments: Arguments) -> list[Tensor]:
            q_out = torch.empty_like(arguments["q"]) if arguments["q_out"] is None else None
            return self.run(arguments | {"q_out": q_out})

        without = "without q_out" if self.case.q_out else "with q_out"
        return [Alternative(f"the call {without}", toggle_q_out, is_bitwise=True)]
