"""Calls of mla_rotary."""

from __future__ import annotations

import torch
from rotary_reference import HEAD_AXIS, TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor, compute_eps
from fuzz.op_cases import OpCase

INPUTS = ("q", "k_nope", "k_rope")


class MlaRotaryCall(OpCall):
    """A call whose heads are ``[nope | rope]``: the last ``rotary_dim`` components are the rope part."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, k = self.tensors.heads(case.q_heads, case.k_heads)
        count = {"one": 1, "each": case.batch, "index": case.table_count}[case.tables]
        self.tables = [case.make_table(i) for i in range(count)]
        self.nope = case.head_dim - case.rotary_dim
        self.arguments = {
            "q": q,
            "k_nope": k[..., : self.nope],
            "k_rope": self.tensors.token_rows(case.rotary_dim),
            "positions": self.tensors.positions(),
            "table": self.tables[0] if case.tables == "one" else self.tables,
            "layout": case.layout,
            "pairing": case.pairing,
            "table_index": self.tensors.table_index(0) if case.tables == "index" else None,
        }
        if case.gradient != "none":
            self.arguments["gradients"] = [self.tensors.output_gradient(x) for x in (q, k)]

    def run(self, arguments: Arguments) -> list[Tensor]:
        return self.with_gradients(arguments, lambda given: list(mrrope.mla_rotary(**given)))

    def with_gradients(self, arguments: Arguments, call) -> list[Tensor]:
        arguments = dict(arguments)
        gradients = arguments.pop("gradients", None)
        if gradients is None:
            return call(arguments)
        leaves = [arguments[name].detach().requires_grad_() for name in INPUTS]
        out = call(arguments | dict(zip(INPUTS, leaves, strict=True)))
        return out + list(torch.autograd.grad(out, leaves, gradients))

    def rotations(self, before: Arguments) -> Tensor:
        steps = PhaseSteps.of(self.tables, self.case.device)
        if before["table_index"] is not None:
            steps = steps.select(before["table_index"])
        return float64_reference.rotations(before["positions"], steps, self.case.layout, None)

    def expected(self, before: Arguments) -> list[Expected]:
        case, by, axis = self.case, self.rotations(before), HEAD_AXIS[self.case.layout]
        shared = before["k_rope"].unsqueeze(axis + 1 + before["k_rope"].dim())
        rope = (*before["k_nope"].shape[:-1], case.rotary_dim)
        found = []
        for name, nope, rotated in (
            ("q", before["q"][..., : self.nope], before["q"][..., self.nope :]),
            ("key", before["k_nope"], shared.expand(rope)),
        ):
            value = float64_reference.rotated(rotated, by, case.pairing)
            found.append(self.joined(name, nope.double(), value))
        if "gradients" not in before:
            return found
        q_gradient, key_gradient = before["gradients"]
        back = float64_reference.rotated(q_gradient[..., self.nope :], by.conj(), case.pairing)
        found.append(self.joined("gradient of q", q_gradient[..., : self.nope].double(), back))
        found.append(Expected("gradient of k_nope", key_gradient[..., : self.nope].double(), 0.0))
        of_heads = key_gradient[..., self.nope :].double()
        total = float64_reference.rotated(of_heads.sum(axis, keepdim=True), by.conj(), case.pairing).squeeze(axis)
        by_pair = float64_reference.pair_norms(of_heads.abs().sum(axis, keepdim=True), case.rotary_dim, case.pairing)
        magnitude = (by_pair * by.abs().amax(-1, keepdim=True)).squeeze(axis)
        tolerance = TOLERANCES[case.torch_dtype]
        allowed = (tolerance.arithmetic + case.k_heads * compute_eps(case)) * magnitude
        allowed += tolerance.rounding * total.abs() + float64_reference.smallest_subnormal(case.torch_dtype)
        return [*found, Expected("gradient of k_rope", total, allowed)]

    def joined(self, name: str, nope: Tensor, rope: Tensor) -> Expected:
        case = self.case
        allowed = float64_reference.allowed_error(rope, case.torch_dtype, case.rotary_dim, case.pairing)
        return Expected(name, torch.cat([nope, rope], dim=-1), torch.cat([torch.zeros_like(nope), allowed], dim=-1))

    def alternatives(self) -> list[Alternative]:
        return [Alternative("the ops apart", lambda given: self.with_gradients(given, self.unfused), is_bitwise=True)]

    def unfused(self, arguments: Arguments) -> list[Tensor]:
        q, k_nope, k_rope = (arguments[name] for name in INPUTS)
        shared = k_rope.unsqueeze(HEAD_AXIS[self.case.layout] + 1 + k_rope.dim())
        options = {name: arguments[name] for name in ("positions", "table", "layout", "pairing", "table_index")}
        q_rope, shared = mrrope.rotary(q[..., self.nope :], shared, **options)
        key = torch.cat([k_nope, shared.expand(*k_nope.shape[:-1], self.case.rotary_dim)], dim=-1)
        return [torch.cat([q[..., : self.nope], q_rope], dim=-1), key]
