"""Calls of qkv_rotary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from rotary_reference import TOLERANCES
from torch.nn.functional import linear

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Arguments, Expected, OpCall, Tensor, compute_eps
from fuzz.op_cases import OpCase, by_heads


@contextlib.contextmanager
def sums_of_full_precision() -> Iterator[None]:
    """Keep cuBLAS from adding parts of a product in the dtype of the heads, as torch allows it to by default.

    Calls that do not fuse use cuBLAS. Sums of two such parts are off by up to 18 times the error that is allowed here.
    """
    options = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(options, name) for name in names}
    for name in names:
        setattr(options, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(options, name, value)


class QkvRotaryCall(OpCall):
    """A projection to q, k and v with q and k rotated."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        rows = (case.tokens,) if case.layout == "thd" else (case.batch, case.tokens)
        outputs = (case.q_heads + 2 * case.k_heads) * case.head_dim
        weight = self.tensors.random((outputs, case.inputs)) / case.magnitude
        self.tables = case.make_tables(1 if case.tables == "one" else case.batch, case.table_heads)
        count = len(self.tables) // case.table_heads
        self.query_factors = case.make_query_factors(count)
        given = by_heads(self.tables, case.table_heads, query_factors=self.query_factors)
        x = self.tensors.random((*rows, case.inputs + 8))[..., : case.inputs]
        self.arguments = {
            "x": x if case.memory == "padded" else x.contiguous(),
            "weight": weight,
            "bias": self.tensors.random((outputs,)) if case.bias else None,
            "positions": self.tensors.positions(),
            "table": given[0] if case.tables == "one" else given,
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

    @sums_of_full_precision()
    def run(self, arguments: Arguments) -> list[Tensor]:
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

    def by_head(self, by: list[Tensor], x: Tensor, is_q: bool) -> Tensor:
        of_heads = float64_reference.of_every_head(by, x, self.case.layout)
        if self.query_factors is None or not is_q:
            return of_heads
        return float64_reference.times_query_factors(of_heads, self.query_factors, None, self.case.layout)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, by: list[Tensor]) -> list[Tensor]:
        q, k, v = self.heads(linear(x, weight, bias))
        rotated_q = float64_reference.rotated(q, self.by_head(by, q, is_q=True), self.case.pairing)
        return [rotated_q, float64_reference.rotated(k, self.by_head(by, k, is_q=False), self.case.pairing), v]

    def expected(self, before: Arguments) -> list[Expected]:
        """Return q, k and v, with a rounding of the product, one of the rotation, and the error of sums allowed."""
        case, tolerance, eps = self.case, TOLERANCES[self.case.torch_dtype], compute_eps(self.case)
        given = [None if before[name] is None else before[name].double() for name in ("x", "weight", "bias")]
        steps = PhaseSteps.of_heads(self.tables, case.table_heads, case.device)
        by = [float64_reference.rotations(before["positions"], one, case.layout, None) for one in steps]
        leaves = [None if x is None else x.requires_grad_() for x in given]
        whole = self.project(*leaves, by)
        sizes = self.heads(linear(*(None if x is None else x.detach().abs() for x in given)))
        # torch may round the product before adding the bias.
        plain = [
            a.abs() + b.abs()
            for a, b in zip(*(self.heads(linear(*(leaf.detach() for leaf in leaves[:n] if leaf is not None)))
                              for n in (2, 3)), strict=True)
        ]  # fmt: skip
        gain = max(table.attention_factor for table in self.tables)
        if self.query_factors is not None:
            gain *= max(1.0, float(self.query_factors.max()) if self.query_factors.numel() else 1.0)
        found = []
        for i, value in enumerate(x.detach() for x in whole):
            dim = case.rotary_dim if i < 2 else 0
            spread, size = (
                float64_reference.pair_norms(x[i], dim, case.pairing) if dim else x[i].abs() for x in (plain, sizes)
            )
            allowed = max(1.0, gain) * (tolerance.rounding * spread + eps * (case.inputs + 20) * size)
            allowed = allowed + tolerance.rounding * value.abs() + torch.finfo(case.torch_dtype).smallest_normal
            found.append(Expected("qkv"[i], value, allowed))
        if "gradients" in before:
            found += self.expected_gradients(before, leaves, whole, by)
        return found

    def expected_gradients(
        self, before: Arguments, leaves: list[Tensor | None], whole: list[Tensor], by: list[Tensor]
    ) -> list[Expected]:
        """Return the gradients; those of q and k are rotated back and rounded before the products."""
        case, eps = self.case, compute_eps(self.case) * (self.case.components + 64)
        given = [g.double() for g in before["gradients"]]
        wanted = [x for x in leaves if x is not None]
        values = torch.autograd.grad(whole, wanted, given)
        rotated_back = [
            float64_reference.rotated(g, self.by_head(by, g, is_q).conj(), case.pairing)
            for g, is_q in zip(given[:2], (True, False), strict=True)
        ]
        back = [float64_reference.pair_norms(g, case.rotary_dim, case.pairing) for g in rotated_back]
        joined = torch.cat([g.transpose(1, 2) if case.layout == "bhsd" else g for g in (*back, given[2].abs())], dim=-2)
        joined = joined.flatten(-2).reshape(-1, leaves[1].shape[0])
        x, weight = (leaf.detach().abs() for leaf in leaves[:2])
        sizes = [(joined @ weight).view(x.shape), joined.t() @ x.reshape(-1, x.shape[-1]), joined.sum(0)]
        rounding = TOLERANCES[case.torch_dtype].rounding
        names = ("gradient of x", "gradient of weight", "gradient of bias")
        return [
            Expected(name, value, (2 * rounding + eps) * size + float64_reference.smallest_subnormal(case.torch_dtype))
            for name, value, size in zip(names, values, sizes, strict=False)
        ]
