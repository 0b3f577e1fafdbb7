"""Calls of mla_rotary_and_cache_."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from rotary_cases import POISON, storage_of
from rotary_reference import HEAD_AXIS, TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase

SPARE_SLOTS = 3


class MlaRotaryAndCacheCall(OpCall):
    """A call with a paged or a static cache. q_rope is the last part of ``head_dim`` wide heads, as is the latent."""

    query = "q_rope"
    aliases: ClassVar[dict[str, str]] = {"k": "k_rope", "v": "latent"}

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        (q,) = self.tensors.heads(case.q_heads)
        count = {"one": 1, "each": case.batch, "index": case.table_count}[case.tables]
        self.tables = [case.make_table(i) for i in range(count)]
        tokens, sequences = case.tokens, case.sequences
        blocks, size = (-(-sequences * tokens // 4) + 2, 5) if case.paged else (sequences, tokens + SPARE_SLOTS)
        random = case.numpy_random(7)
        if case.paged:
            places = random.permutation(blocks * size)[: sequences * tokens].reshape(sequences, tokens)
        else:
            places = np.array([random.permutation(size)[:tokens] for _ in range(sequences)]).reshape(sequences, tokens)
        places = np.where(random.random(places.shape) < 0.2, random.choice([-1, -9], places.shape), places)
        slots = torch.from_numpy(places.astype(np.int64)).to(case.device, getattr(torch, case.slot_dtype))
        scale = None
        if case.scales != "none":
            value = np.float32(random.uniform(0.004, 0.1)) * np.float32(case.magnitude)
            scale = torch.full((1,), float(value), device=case.device)
        q_rope = q[..., case.head_dim - case.rotary_dim :]
        k_rope, latent = self.tensors.token_rows(case.rotary_dim), self.tensors.token_rows(case.head_dim)
        axis = HEAD_AXIS[case.layout]
        if case.alias == "k":
            k_rope = q_rope.squeeze(axis) if case.alias_form == "heads" else self.tensors.alias_of(q_rope)
        elif case.alias == "v":
            latent = q_rope.squeeze(axis)
        self.arguments = {
            "q_rope": q_rope,
            "k_rope": k_rope,
            "latent": latent,
            "positions": self.tensors.positions(),
            "table": self.tables[0] if case.tables == "one" else self.tables,
            "cache": self.cache((blocks, size, latent.shape[-1] + case.rotary_dim)),
            "slots" if case.paged else "cache_positions": slots[0] if case.layout == "thd" else slots,
            "layout": case.layout,
            "pairing": case.pairing,
            "scale": scale,
            "table_index": self.tensors.table_index(0) if case.tables == "index" else None,
            "q_out": torch.full_like(q_rope, POISON) if case.q_out else None,
        }

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        with torch.device(self.case.device):
            cache = storage_of(shape, self.case.cache_memory, self.case.torch_dtype)
        if not self.case.float8:
            return cache
        elements = cache.untyped_storage().nbytes() // cache.element_size()
        memory = torch.full((elements,), POISON, device=self.case.device).to(getattr(torch, self.case.float8_dtype))
        return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    def written(self, arguments: Arguments) -> list[Tensor]:
        q = arguments["q_rope"] if arguments["q_out"] is None else arguments["q_out"]
        return [q, arguments["cache"]]

    def run(self, arguments: Arguments) -> list[Tensor]:
        return [mrrope.mla_rotary_and_cache_(**arguments), arguments["cache"]]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        steps = PhaseSteps.of(self.tables, case.device)
        if before["table_index"] is not None:
            steps = steps.select(before["table_index"])
        by = float64_reference.rotations(before["positions"], steps, case.layout, None)
        options = (case.torch_dtype, case.rotary_dim, case.pairing)
        q = float64_reference.rotated(before["q_rope"], by, case.pairing)
        found = [Expected("q_rope", q, float64_reference.allowed_error(q, *options))]
        axis = HEAD_AXIS[case.layout]
        k_rope, has_head = before["k_rope"], before["k_rope"].dim() == before["q_rope"].dim()
        shared = k_rope if has_head else k_rope.unsqueeze(axis + 1 + k_rope.dim())
        key = float64_reference.rotated(shared, by, case.pairing).squeeze(axis)
        allowed = float64_reference.allowed_error(key, *options)
        latent = before["latent"].double()
        if case.float8:
            scale = 1.0 if before["scale"] is None else before["scale"]
            dtype = getattr(torch, case.float8_dtype)
            latent = float64_reference.nearest_float8(before["latent"], scale, dtype).double()
            over = key / (scale.double() if isinstance(scale, Tensor) else scale)
            norms = float64_reference.pair_norms(over, case.rotary_dim, case.pairing)
            key = float64_reference.saturated(over, dtype)
            allowed = float64_reference.half_ulp(key, dtype) + TOLERANCES[torch.float32].arithmetic * norms
        rows = torch.cat([latent, key], dim=-1)
        return [*found, self.scattered(before, rows, torch.cat([torch.zeros_like(latent), allowed], dim=-1))]

    def scattered(self, before: Arguments, rows: Tensor, allowed: Tensor) -> Expected:
        """Return the whole cache after the writes; tokens without a slot write nothing."""
        cache = before["cache"].double()
        dim, count = rows.shape[-1], cache.shape[0] * cache.shape[1]
        slots = before["slots" if self.case.paged else "cache_positions"].reshape(-1).long()
        if not self.case.paged:
            sequence = torch.arange(len(slots), device=slots.device) // max(1, self.case.tokens)
            slots = torch.where(slots < 0, slots, slots + cache.shape[1] * sequence)
        # Tokens without a slot go to an extra row, which is dropped.
        slots = torch.where(slots < 0, count, slots)
        by_slot = torch.cat([cache.flatten(0, 1), cache.new_zeros(1, dim)])
        value = by_slot.index_copy(0, slots, rows.reshape(len(slots), dim))[:count]
        allowed = torch.zeros_like(by_slot).index_copy(0, slots, allowed.reshape(len(slots), dim))[:count]
        return Expected("cache", value.view(cache.shape), allowed.view(cache.shape))

    def alternatives(self) -> list[Alternative]:
        def toggle_q_out(arguments: Arguments) -> list[Tensor]:
            q_out = torch.empty_like(arguments["q_rope"]) if arguments["q_out"] is None else None
            return self.run(arguments | {"q_out": q_out})

        without = "without q_out" if self.case.q_out else "with q_out"
        return [Alternative(f"the call {without}", toggle_q_out, is_bitwise=True)]
