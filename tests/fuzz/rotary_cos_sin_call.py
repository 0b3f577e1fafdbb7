"""Calls of rotary_cos_sin."""

from __future__ import annotations

import numpy as np
import torch
from rotary_cases import storage_of
from rotary_reference import HEAD_AXIS

import mrrope
from fuzz import float64_reference
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase

# Bits of NaNs with all and with few bits of the mantissa set, of both signs, and of the infinities.
SPECIAL_BITS = {
    torch.float64: ("int64", [2**63 - 1, -1, 0x7FF8 << 48, 0x7FF0 << 48, -(0x0010 << 48)]),
    torch.float32: ("int32", [2**31 - 1, -1, 0x7FC0 << 16, 0x7F80 << 16, -(0x0080 << 16)]),
    torch.float16: ("int16", [2**15 - 1, -1, 0x7E00, 0x7C00, -0x0400]),
    torch.bfloat16: ("int16", [2**15 - 1, -1, 0x7FC0, 0x7F80, -0x0080]),
}
SPECIAL_SHARE = 0.02


class RotaryCosSinCall(OpCall):
    """A call with any numbers as cosines and sines; the second column of a pair differs, and must not be read."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, *k = self.tensors.heads(case.q_heads, *([case.k_heads] if case.has_k else []))
        if case.alias:
            k = [self.tensors.alias_of(q)]
        if case.special in ("heads", "both"):
            for stream, x in enumerate([q, *k]):
                self.add_specials(x, stream)
        self.width = case.rotary_dim if case.columns == "component" else case.rotary_dim // 2
        cos, sin = (self.make_columns(stream) for stream in (2, 3))
        # rotary_dim is the number of columns by default.
        rotary_dim = None if case.columns == "component" and case.seed % 2 else case.rotary_dim
        self.arguments = {"q": q, "k": k[0] if k else None, "cos": cos, "sin": sin}
        self.arguments |= {"layout": case.layout, "pairing": case.pairing, "rotary_dim": rotary_dim}
        if case.gradient != "none":
            self.arguments["gradients"] = [self.tensors.output_gradient(x) for x in (q, *k)]

    def make_columns(self, stream: int) -> Tensor:
        """Return random cosines or sines, of the sequences that positions would have."""
        case = self.case
        dtype = torch.float32 if case.columns_dtype == "float32" else case.torch_dtype
        rows = {"row": (), "broadcast": (1,), "matrix": (case.batch,), "strided": (case.batch,)}[case.positions]
        shape = (*(() if case.layout == "thd" else rows), case.tokens, self.width)
        with torch.device(case.device):
            view = storage_of(shape, case.columns_memory, dtype)
        distinct = view[:1] if case.columns_memory == "expanded" else view
        distinct.copy_(self.tensors.random(tuple(distinct.shape), torch.float64) / case.magnitude)
        if case.special in ("columns", "both"):
            self.add_specials(distinct, stream)
        return view

    def add_specials(self, x: Tensor, stream: int) -> None:
        """Replace some components by NaNs and infinities, one of them at least."""
        distinct = x[:1] if self.case.memory == "expanded" and stream < 2 else x
        if distinct.numel() == 0:
            return
        random = self.case.numpy_random(11, stream)
        is_special = random.random(distinct.shape) < SPECIAL_SHARE
        is_special.reshape(-1)[random.integers(distinct.numel())] = True
        name, bits = SPECIAL_BITS[x.dtype]
        values = torch.from_numpy(random.choice(np.array(bits, name), distinct.shape)).to(self.case.device)
        where = torch.from_numpy(is_special).to(self.case.device)
        as_integers = float64_reference.as_integers(distinct)
        as_integers.copy_(torch.where(where, values, as_integers))

    def heads_of(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"]] + ([arguments["k"]] if arguments["k"] is not None else [])

    def run(self, arguments: Arguments) -> list[Tensor]:
        return self.call(arguments, lambda given: mrrope.rotary_cos_sin(**given))

    def call(self, arguments: Arguments, op) -> list[Tensor]:
        arguments = dict(arguments)
        gradients = arguments.pop("gradients", None)
        if gradients is None:
            return [x for x in op(arguments) if x is not None]
        leaves = {name: arguments[name].detach().requires_grad_() for name in "qk" if arguments[name] is not None}
        out = [x for x in op(arguments | leaves) if x is not None]
        return out + list(torch.autograd.grad(out, list(leaves.values()), gradients))

    def of_pairs(self, columns: Tensor) -> Tensor:
        """Return the column of every pair, in float64, with a dimension for the heads."""
        if self.case.columns == "component":
            is_halves = self.case.pairing == "halves"
            columns = columns[..., : self.width // 2] if is_halves else columns[..., ::2]
        if self.case.layout != "thd" and columns.dim() == 2:
            columns = columns[None]
        return columns.double().unsqueeze(HEAD_AXIS[self.case.layout])

    def expected(self, before: Arguments) -> list[Expected]:
        cos, sin = (self.of_pairs(before[name]) for name in ("cos", "sin"))
        heads = self.heads_of(before)
        found = [self.rotation("qk"[i], x, cos, sin) for i, x in enumerate(heads)]
        gradients = before.get("gradients", [])
        return found + [self.rotation(f"gradient of {'qk'[i]}", g, cos, -sin) for i, g in enumerate(gradients)]

    def rotation(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Expected:
        case = self.case
        pairs = float64_reference.pairs_of(x[..., : case.rotary_dim].double(), case.pairing)
        # Written in real numbers: products of complex ones are not defined for infinities.
        real = pairs.real * cos - pairs.imag * sin
        imaginary = pairs.imag * cos + pairs.real * sin
        rotated = float64_reference.components_of(torch.complex(real, imaginary), case.pairing)
        value = torch.cat([rotated, x[..., case.rotary_dim :].double()], dim=-1)
        # Without a table's factor the rounding of 16-bit and float32 results is the same as in rotary.
        finite = torch.nan_to_num(value, 0.0, 0.0, 0.0)
        allowed = float64_reference.allowed_error(finite, case.torch_dtype, case.rotary_dim, case.pairing)
        return Expected(name, value, allowed)

    def alternatives(self) -> list[Alternative]:
        if self.case.special != "none":
            return []  # the bits of a NaN are not defined
        return [
            Alternative("the conjugate by negated sines", self.conjugated, is_bitwise=True),
            Alternative("the call with the other columns", self.with_other_columns, is_bitwise=True),
        ]

    def conjugated(self, arguments: Arguments) -> list[Tensor]:
        def op(given: Arguments) -> list[Tensor]:
            options = [given[name] for name in ("layout", "pairing", "rotary_dim")]
            heads = self.heads_of(given)
            return torch.ops.mrrope.rotary_cos_sin.default(heads, given["cos"], -given["sin"], *options, True)

        return self.call(arguments, op)

    def with_other_columns(self, arguments: Arguments) -> list[Tensor]:
        """Run with a column per pair instead of one per component, or the other way round."""
        case = self.case

        def other(columns: Tensor) -> Tensor:
            is_halves = case.pairing == "halves"
            if case.columns == "component":
                return (columns[..., : self.width // 2] if is_halves else columns[..., ::2]).contiguous()
            return columns.repeat(*[1] * (columns.dim() - 1), 2) if is_halves else columns.repeat_interleave(2, -1)

        columns = {name: other(arguments[name]) for name in ("cos", "sin")}
        return self.run(arguments | columns | {"rotary_dim": case.rotary_dim})
