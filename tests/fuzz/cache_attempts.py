"""What a case calls, with what, and what it should give: the ops that write caches, and the one that projects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import POISON, storage_of
from reference import TOLERANCES
from torch.nn.functional import linear

import mrrope
from fuzz import exact
from fuzz.attempts import Arguments, Attempt, Expected, Tensor, float32_or_more
from fuzz.exact import FLOAT8, SMALLEST_FLOAT8, Steps
from fuzz.op_cases import OpCase

SPARE_SLOTS = 3


class RescaleAttempt(Attempt):
    """rescale_cache_ of several layers, or of some blocks of them, which may hold each block once."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        self.olds, self.news = (self.tables(stream) for stream in (0, 1))
        layers = [self.tensors.view(case.heads_shape(case.q_heads), self.memory(i)) for i in range(case.layers)]
        blocks = None
        if case.blocks:
            # As many blocks as sequences, out of some more.
            shape = list(case.heads_shape(case.q_heads))
            shape[0] += SPARE_SLOTS
            layers = [self.tensors.view(tuple(shape), self.memory(i)) for i in range(case.layers)]
            order = case.numpy_random(5).permutation(shape[0])[: case.batch]
            blocks = torch.from_numpy(order.astype(np.int64)).to(case.device)
        as_given = (lambda tables: tables[0]) if case.tables == "one" else list
        self.arguments = {
            "keys": layers,
            "positions": self.tensors.positions(),
            "old": as_given(self.olds),
            "new": as_given(self.news),
            "layout": case.layout,
            "pairing": case.pairing,
            "blocks": blocks,
        }

    def memory(self, layer: int) -> str:
        return "contiguous" if self.case.memory == "packed" else self.case.memory

    def tables(self, stream: int) -> list[mrrope.FrequencyTable]:
        """One for each sequence, and at least one."""
        random = self.case.numpy_random(6, stream)
        count = 1 if self.case.tables == "one" else self.case.sequences
        return [self.case.make_table(int(random.integers(0, self.case.table_count + 1))) for _ in range(max(1, count))]

    def written(self, arguments: Arguments) -> list[Tensor]:
        return arguments["keys"]

    def invoke(self, arguments: Arguments) -> list[Tensor]:
        mrrope.rescale_cache_(**arguments)
        return arguments["keys"]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        steps = Steps.of(self.news, case.device).relative_to(Steps.of(self.olds, case.device))
        by = exact.rotations(before["positions"], steps, case.layout, None)
        stays = torch.tensor([old == new for old, new in zip(self.olds, self.news, strict=True)], device=case.device)
        found = []
        for i, keys in enumerate(before["keys"]):
            taken = keys if before["blocks"] is None else keys[before["blocks"]]
            value = exact.rotated(taken, by, case.pairing)
            allowed = exact.allowed_error(value, case.torch_dtype, case.rotary_dim, case.pairing)
            kept = stays.view(-1, *[1] * (keys.dim() - 1))
            value, allowed = torch.where(kept, taken.double(), value), torch.where(kept, 0.0, allowed)
            if before["blocks"] is not None:
                whole, none = keys.double(), torch.zeros(keys.shape, dtype=torch.float64, device=case.device)
                value = whole.index_copy(0, before["blocks"], value)
                allowed = none.index_copy(0, before["blocks"], allowed)
            found.append(Expected(f"keys[{i}]", value, allowed))
        return found


class CacheAttempt(Attempt):
    """rotary_and_cache_, paged or static."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, k, v = self.tensors.heads(case.q_heads, case.k_heads, case.k_heads)
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
            "table": self.tables[0] if case.tables == "one" else self.tables,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slots" if case.paged else "cache_positions": slots[0] if case.layout == "thd" else slots,
            "layout": case.layout,
            "cache_layout": case.cache_layout,
            "pairing": case.pairing,
            "key_scale": scales[0],
            "value_scale": scales[1],
            "table_index": self.tensors.table_numbers(0) if case.tables == "index" else None,
            "q_out": torch.full_like(q, POISON) if case.q_out else None,
        }

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        with torch.device(self.case.device):
            cache = storage_of(shape, self.case.cache_memory, self.case.torch_dtype)
        if not self.case.float8:
            return cache
        elements = cache.untyped_storage().nbytes() // cache.element_size()
        memory = torch.full((elements,), POISON, device=self.case.device).to(FLOAT8)
        return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    def written(self, arguments: Arguments) -> list[Tensor]:
        q = arguments["q"] if arguments["q_out"] is None else arguments["q_out"]
        return [q, arguments["key_cache"], arguments["value_cache"]]

    def invoke(self, arguments: Arguments) -> list[Tensor]:
        q = mrrope.rotary_and_cache_(**arguments)
        return [q, arguments["key_cache"], arguments["value_cache"]]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        steps = Steps.of(self.tables, case.device)
        if before["table_index"] is not None:
            steps = steps.picked(before["table_index"])
        by = exact.rotations(before["positions"], steps, case.layout, None)
        q = exact.rotated(before["q"], by, case.pairing)
        k = exact.rotated(before["k"], by, case.pairing)
        options = (case.torch_dtype, case.rotary_dim, case.pairing)
        found = [Expected("q", q, exact.allowed_error(q, *options))]
        k_scale, v_scale = (self.divisor(before[f"{name}_scale"]) for name in ("key", "value"))
        if case.float8:
            tail = exact.nearest_float8(self.by_token(before["k"]), k_scale).double()
            keys, k_allowed = self.float8_keys(self.by_token(k), tail, k_scale)
            values = exact.nearest_float8(self.by_token(before["v"]), v_scale).double()
        else:
            keys, k_allowed = self.by_token(k), self.by_token(exact.allowed_error(k, *options))
            values = self.by_token(before["v"]).double()
        for name, rows, allowed in (("key", keys, k_allowed), ("value", values, torch.zeros_like(values))):
            found.append(self.scattered(name, before, rows, allowed))
        return found

    def float8_keys(self, k: Tensor, tail: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """Rotated keys over their scale, saturated, and half a unit in the last place of float8."""
        dim = self.case.rotary_dim
        over = k / (scale.double() if isinstance(scale, Tensor) else scale)
        norms = exact.pair_norms(over, dim, self.case.pairing)
        value = over.clamp(-448, 448)
        allowed = (value.abs() * 2.0**-4).clamp(min=SMALLEST_FLOAT8 / 2)
        allowed = allowed + TOLERANCES[torch.float32].arithmetic * norms
        value[..., dim:], allowed[..., dim:] = tail[..., dim:], 0.0
        return value, allowed

    def scattered(self, name: str, before: Arguments, rows: Tensor, allowed: Tensor) -> Expected:
        """The whole cache, where tokens without a slot leave everything as it was."""
        case = self.case
        cache = before[f"{name}_cache"].double()
        by_slot = (cache.transpose(1, 2) if case.cache_layout == "hnd" else cache).flatten(0, 1)
        slots = before["slots" if case.paged else "cache_positions"].reshape(-1).long()
        if not case.paged:
            length = case.tokens + SPARE_SLOTS
            sequence = torch.arange(len(slots), device=slots.device) // max(1, case.tokens)
            slots = torch.where(slots < 0, slots, slots + length * sequence)
        # One more row takes what is left out.
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

    def other_ways(self) -> dict[str, Any]:
        def with_q_elsewhere(arguments: Arguments) -> list[Tensor]:
            q_out = torch.empty_like(arguments["q"]) if arguments["q_out"] is None else None
            return self.invoke(arguments | {"q_out": q_out})

        return {"bits with q elsewhere": with_q_elsewhere}


class ProjectionAttempt(Attempt):
    """qkv_rotary."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        rows = (case.tokens,) if case.layout == "thd" else (case.batch, case.tokens)
        outputs = (case.q_heads + 2 * case.k_heads) * case.head_dim
        weight = self.tensors.random((outputs, case.inputs)) / case.magnitude
        self.tables = [case.make_table(i) for i in range(1 if case.tables == "one" else case.batch)]
        x = self.tensors.random((*rows, case.inputs + 8))[..., : case.inputs]
        self.arguments = {
            "x": x if case.memory == "padded" else x.contiguous(),
            "weight": weight,
            "bias": self.tensors.random((outputs,)) if case.bias else None,
            "positions": self.tensors.positions(),
            "table": self.tables[0] if case.tables == "one" else self.tables,
            "num_q_heads": case.q_heads,
            "num_kv_heads": case.k_heads,
            "layout": case.layout,
            "pairing": case.pairing,
        }
        if case.gradient != "none":
            counts = (case.q_heads, case.k_heads, case.k_heads)
            self.arguments["gradients"] = [
                self.tensors.random(case.heads_shape(count)) / case.magnitude for count in counts
            ]

    def invoke(self, arguments: Arguments) -> list[Tensor]:
        arguments = dict(arguments)
        gradients = arguments.pop("gradients", None)
        if gradients is None:
            return list(mrrope.qkv_rotary(**arguments))
        for name in ("x", "weight", "bias"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].detach().requires_grad_()
        out = mrrope.qkv_rotary(**arguments)
        leaves = [arguments[name] for name in ("x", "weight", "bias") if arguments[name] is not None]
        return [*out, *torch.autograd.grad(out, leaves, gradients)]

    def heads(self, packed: Tensor) -> list[Tensor]:
        case = self.case
        parts = packed.unflatten(-1, (case.q_heads + 2 * case.k_heads, case.head_dim)).split(
            [case.q_heads, case.k_heads, case.k_heads], dim=-2
        )
        return [part.transpose(1, 2) if case.layout == "bhsd" else part for part in parts]

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, by: Tensor) -> list[Tensor]:
        q, k, v = self.heads(linear(x, weight, bias))
        return [exact.rotated(q, by, self.case.pairing), exact.rotated(k, by, self.case.pairing), v]

    def expected(self, before: Arguments) -> list[Expected]:
        """Within a rounding of the product, one of the rotation, and what sums are off by in float."""
        case, tolerance, eps = self.case, TOLERANCES[self.case.torch_dtype], float32_or_more(self.case)
        given = [None if before[name] is None else before[name].double() for name in ("x", "weight", "bias")]
        by = exact.rotations(before["positions"], Steps.of(self.tables, case.device), case.layout, None)
        leaves = [None if x is None else x.requires_grad_() for x in given]
        whole = self.project(*leaves, by)
        sizes = self.heads(linear(*(None if x is None else x.detach().abs() for x in given)))
        # torch may round the product before it adds the bias.
        plain = [
            a.abs() + b.abs()
            for a, b in zip(*(self.heads(linear(*(leaf.detach() for leaf in leaves[:n] if leaf is not None)))
                              for n in (2, 3)), strict=True)
        ]  # fmt: skip
        gain = by.abs().amax().item() if by.numel() else 1.0
        found = []
        for i, value in enumerate(x.detach() for x in whole):
            dim = case.rotary_dim if i < 2 else 0
            spread, size = (exact.pair_norms(x[i], dim, case.pairing) if dim else x[i].abs() for x in (plain, sizes))
            allowed = max(1.0, gain) * (tolerance.rounding * spread + eps * (case.inputs + 20) * size)
            allowed = allowed + tolerance.rounding * value.abs() + torch.finfo(case.torch_dtype).smallest_normal
            found.append(Expected("qkv"[i], value, allowed))
        if "gradients" in before:
            found += self.expected_gradients(before, leaves, whole, by)
        return found

    def expected_gradients(
        self, before: Arguments, leaves: list[Tensor | None], whole: list[Tensor], by: Tensor
    ) -> list[Expected]:
        """Products of gradients that were rotated back and rounded once more."""
        case, eps = self.case, float32_or_more(self.case) * (self.case.components + 64)
        given = [g.double() for g in before["gradients"]]
        wanted = [x for x in leaves if x is not None]
        values = torch.autograd.grad(whole, wanted, given)
        back = [exact.pair_norms(exact.rotated(g, by.conj(), case.pairing), case.rotary_dim, case.pairing)
                for g in given[:2]]  # fmt: skip
        joined = torch.cat([g.transpose(1, 2) if case.layout == "bhsd" else g for g in (*back, given[2].abs())], dim=-2)
        joined = joined.flatten(-2).reshape(-1, leaves[1].shape[0])
        x, weight = (leaf.detach().abs() for leaf in leaves[:2])
        sizes = [(joined @ weight).view(x.shape), joined.t() @ x.reshape(-1, x.shape[-1]), joined.sum(0)]
        rounding = TOLERANCES[case.torch_dtype].rounding
        names = ("gradient of x", "gradient of weight", "gradient of bias")
        return [
            Expected(name, value, (2 * rounding + eps) * size + exact.smallest(case.torch_dtype))
            for name, value, size in zip(names, values, sizes, strict=False)
        ]
