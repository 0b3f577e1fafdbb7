"""Calls of learnable_rotary."""

from __future__ import annotations

import torch
from learnable_rotary_reference import exact_turns
from rotary_reference import HEAD_AXIS, TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor, compute_eps
from fuzz.op_cases import OpCase

TABLE = ("frequencies", "attention_factor")


class LearnableRotaryCall(OpCall):
    """A rotation by a table in floating point, one for all heads or one for each of ``table_heads`` groups."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, *k = self.tensors.heads(case.q_heads, *([case.k_heads] if case.has_k else []))
        random = case.numpy_random(4)
        shape = (case.table_heads, case.rotary_dim // 2)
        frequencies = 1e-5 ** random.random(shape) * random.choice([1.0, 1.0, 1.0, -1.0], shape)
        factors = random.uniform(0.5, 1.5, case.table_heads)
        dtype = getattr(torch, case.table_dtype)
        table = [torch.from_numpy(x).to(dtype) for x in (frequencies, factors)]
        self.turns = exact_turns(table[0]).to(case.device)
        self.arguments = {
            "q": q,
            "k": k[0] if k else None,
            "positions": self.tensors.positions(),
            **{name: x.to(case.device) for name, x in zip(TABLE, table, strict=True)},
            "layout": case.layout,
            "pairing": case.pairing,
        }
        if case.gradient != "none":
            self.arguments["gradients"] = [self.tensors.output_gradient(x) for x in (q, *k)]

    def heads_of(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"]] + ([arguments["k"]] if arguments["k"] is not None else [])

    def run(self, arguments: Arguments) -> list[Tensor]:
        arguments = dict(arguments)
        gradients = arguments.pop("gradients", None)
        leaves = {}
        if gradients is not None:
            names = [name for name in ("q", "k", *TABLE) if arguments[name] is not None]
            leaves = {name: arguments[name].detach().requires_grad_() for name in names}
        out = [x for x in mrrope.learnable_rotary(**arguments | leaves) if x is not None]
        return out if gradients is None else out + list(torch.autograd.grad(out, list(leaves.values()), gradients))

    def by_head(self, of_tables: list[Tensor], x: Tensor) -> Tensor:
        return float64_reference.of_every_head(of_tables, x, self.case.layout)

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        factors = before["attention_factor"].double()[:, None]
        steps = [PhaseSteps(self.turns[i : i + 1], torch.ones_like(factors[i : i + 1])) for i in range(len(factors))]
        turned = [float64_reference.rotations(before["positions"], one, case.layout, None) for one in steps]
        rotations = [a * one for a, one in zip(factors, turned, strict=True)]
        heads = self.heads_of(before)
        found = [self.rotation(name, x, self.by_head(rotations, x)) for name, x in zip("qk", heads, strict=False)]
        if "gradients" not in before:
            return found
        given = before["gradients"]
        for name, g in zip("qk", given, strict=False):
            found.append(self.rotation(f"gradient of {name}", g, self.by_head(rotations, g).conj()))
        return found + self.expected_table_gradients(before, turned)

    def rotation(self, name: str, x: Tensor, by: Tensor) -> Expected:
        value = float64_reference.rotated(x, by, self.case.pairing)
        options = (self.case.torch_dtype, self.case.rotary_dim, self.case.pairing)
        return Expected(name, value, float64_reference.allowed_error(value, *options))

    def expected_table_gradients(self, before: Arguments, turned: list[Tensor]) -> list[Expected]:
        """Return the sums over tokens and heads of x's cross and dot products with the gradient rotated back."""
        case, axis = self.case, HEAD_AXIS[self.case.layout]
        dim, tables = case.rotary_dim, case.table_heads
        at = before["positions"].double()
        at = at[:, None] if case.layout == "thd" else (at[None] if at.dim() == 1 else at)[..., None]
        at = at[..., None] if case.layout != "bhsd" else at[:, None]  # beside heads and pairs
        sums: list[Tensor] = []
        for x, g in zip(self.heads_of(before), before["gradients"], strict=True):
            x, g = (float64_reference.pairs_of(y[..., :dim].double(), case.pairing) for y in (x, g))
            back = g * self.by_head(turned, g).conj()
            products, sizes = x.conj() * back, x.abs() * g.abs()
            terms = torch.stack([at * products.imag, at.abs() * sizes, products.real, sizes])
            by_table = terms.unflatten(axis, (tables, -1)).movedim(axis - 1, 1)  # [4, tables, ...]
            sums.append(by_table.flatten(2, -2).sum(2))  # [4, tables, pairs]
        of_frequencies, its_size, of_factors, their_size = torch.stack(sums).sum(0)
        factors = before["attention_factor"].double()[:, None]
        error_of_sum = max(1, case.components) * 2.0**-53
        error = TOLERANCES[case.torch_dtype].arithmetic + 16 * compute_eps(case) + error_of_sum
        dtype = before["frequencies"].dtype

        def sum_of(name: str, value: Tensor, size: Tensor) -> Expected:
            tiny = torch.finfo(dtype).smallest_normal
            allowed = error * size + torch.finfo(dtype).eps / 2 * value.abs() + tiny
            return Expected(f"gradient of {name}", value, allowed, dtype)

        return [
            sum_of("frequencies", factors * of_frequencies, factors * its_size),
            sum_of("attention_factor", of_factors.sum(-1), their_size.sum(-1)),
        ]

    def alternatives(self) -> list[Alternative]:
        if self.case.gradient != "none":
            return []
        return [Alternative("rotary by the packed tables", self.by_packed_tables, is_bitwise=True)]

    def by_packed_tables(self, arguments: Arguments) -> list[Tensor]:
        heads, rest = self.heads_of(arguments), (arguments["layout"], arguments["pairing"])
        table = [arguments[name] for name in TABLE]
        packed = torch.ops.mrrope.learnable_rotary.default(heads, arguments["positions"], *table, *rest)[-1]
        return torch.ops.mrrope.rotary.default(heads, arguments["positions"], packed[None, None], *rest)
