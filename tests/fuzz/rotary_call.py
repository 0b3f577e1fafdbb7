"""Calls of rotary, rotary_, qk_norm_rotary and qk_norm_rotary_."""

from __future__ import annotations

from typing import Any

import torch
from rotary_reference import HEAD_AXIS, TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Alternative, Arguments, Expected, OpCall, Tensor, compute_eps
from fuzz.op_cases import OpCase
from mrrope.ops import decompositions
from mrrope.tables.frequency_table import packed_stack
from mrrope.tables.position_rows import packed_rows


def with_query_factors(packed: Tensor, query_factors: Tensor) -> Tensor:
    """Return head tables, ``[tables, rows, heads, words]``, with the factors of ``[tables, query heads]``."""
    tables, rows, heads, words = packed.shape
    more_rows = -(-query_factors.shape[1] // (heads * words))
    whole = packed.new_zeros(tables, 2 + more_rows, heads, words)
    whole[:, :rows] = packed
    whole[:, 2:].view(tables, -1)[:, : query_factors.shape[1]] = query_factors.view(torch.int64)
    return whole


class RotaryCall(OpCall):
    """A call through the Python function, or of torch.ops.mrrope where only the op takes the arguments."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, *k = self.tensors.heads(case.q_heads, *([case.k_heads] if case.has_k else []))
        if case.alias:
            k = [self.tensors.alias_of(q)]
        self.tables = [case.make_table(i) for i in range(self.table_count * case.table_heads)]
        self.query_factors = case.make_query_factors(self.table_count)
        index = self.tensors.table_index(0) if case.tables == "index" else None
        positions = self.tensors.positions()
        self.is_norm = case.op.startswith("qk_norm")
        self.is_raw_op = bool(
            case.position_rows or case.conjugate or case.negated or case.table_heads > 1 or case.query_factors
        )
        self.arguments = {"q": q, "k": k[0] if k else None}
        if self.is_norm:
            counts = [case.q_heads, case.k_heads if case.has_k else None]
            size = [
                c if c is None else c * case.head_dim if case.over == "all_heads" else case.head_dim for c in counts
            ]
            weights = [None if n is None else self.tensors.random((n,)) / case.magnitude for n in size]
            self.arguments |= {"q_weight": weights[0], "k_weight": weights[1]}
        self.arguments |= {"positions": positions, "table": self.table_argument()}
        if self.is_norm:
            options = {"eps": case.eps, "weight_offset": case.weight_offset, "over": case.over}
            self.arguments |= options
        self.arguments |= {"layout": case.layout, "pairing": case.pairing, "table_index": index}
        if case.gradient != "none":
            self.arguments["gradients"] = [self.tensors.output_gradient(x) for x in (q, *k)]

    @property
    def table_count(self) -> int:
        return {"one": 1, "each": self.case.batch, "index": self.case.table_count}[self.case.tables]

    def table_argument(self) -> Any:
        case = self.case
        if not self.is_raw_op:
            return self.tables[0] if case.tables == "one" else self.tables
        packed = packed_stack(self.tables, torch.device("cpu"))
        self.row_of_pair = None
        rows = case.make_rows(len(packed))
        if rows is not None:
            self.row_of_pair = rows.to(case.device)
            packed = torch.stack([packed, packed_rows(rows)], dim=1)
        elif case.tables == "one" and case.table_heads == 1:
            packed = packed[0]
        if case.table_heads > 1 or self.query_factors is not None:
            by_head = packed.view(self.table_count, case.table_heads, -1, packed.shape[-1])
            packed = by_head.transpose(1, 2).contiguous()
        if self.query_factors is not None:
            packed = with_query_factors(packed, self.query_factors)
        return (-packed if case.negated else packed).to(case.device)

    def heads_of(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"]] + ([arguments["k"]] if arguments["k"] is not None else [])

    def weights_of(self, arguments: Arguments) -> list[Tensor]:
        if not self.is_norm:
            return []
        return [arguments["q_weight"]] + ([arguments["k_weight"]] if arguments["k"] is not None else [])

    def written(self, arguments: Arguments) -> list[Tensor]:
        return self.heads_of(arguments) if self.case.op.endswith("_") and "gradients" not in arguments else []

    def run(self, arguments: Arguments) -> list[Tensor]:
        return self.call(self.case.op, arguments)

    def call(self, op: str, arguments: Arguments) -> list[Tensor]:
        arguments = dict(arguments)
        gradients = arguments.pop("gradients", None)
        if gradients is None:
            return self.call_op(op, arguments)
        leaves = {}
        for name in ("q", "k", "q_weight", "k_weight"):
            if arguments.get(name) is not None:
                leaves[name] = arguments[name].detach().requires_grad_()
                # Autograd forbids in-place writes to a leaf.
                arguments[name] = leaves[name] * 1.0 if op.endswith("_") else leaves[name]
        out = self.call_op(op, arguments)
        return out + list(torch.autograd.grad(out, list(leaves.values()), gradients))

    def call_op(self, op: str, arguments: Arguments) -> list[Tensor]:
        if self.is_raw_op:
            heads, norm = self.heads_of(arguments), []
            if self.is_norm:
                norm = [arguments["eps"], arguments["weight_offset"], arguments["over"]]
            weights = [self.weights_of(arguments)] if self.is_norm else []
            options = [arguments["layout"], arguments["pairing"], self.case.conjugate, arguments["table_index"]]
            raw = getattr(torch.ops.mrrope, op).default
            out = raw(heads, *weights, arguments["positions"], arguments["table"], *norm, *options)
            return heads if op.endswith("_") else list(out)
        out = getattr(mrrope, op)(**arguments)
        return [x for x in out if x is not None]

    def steps(self, before: Arguments, table_head: int) -> PhaseSteps:
        steps = PhaseSteps.of(self.tables[table_head :: self.case.table_heads], self.case.device)
        if before["table_index"] is not None:
            steps = steps.select(before["table_index"])
        return steps.negated() if self.case.conjugate != self.case.negated else steps

    def rotations(self, before: Arguments) -> list[Tensor]:
        """Return the complex factor of every pair, for each head table."""
        of_tables = []
        for table_head in range(self.case.table_heads):
            rows = getattr(self, "row_of_pair", None)
            if rows is not None:
                rows = rows[table_head :: self.case.table_heads]
            if rows is not None and before["table_index"] is not None:
                rows = rows[before["table_index"].long()]
            steps = self.steps(before, table_head)
            of_tables.append(float64_reference.rotations(before["positions"], steps, self.case.layout, rows))
        return of_tables

    def by_head(self, by: list[Tensor], x: Tensor, before: Arguments, is_q: bool) -> Tensor:
        of_heads = float64_reference.of_every_head(by, x, self.case.layout)
        if self.query_factors is None or not is_q:
            return of_heads
        return float64_reference.times_query_factors(
            of_heads, self.query_factors, before["table_index"], self.case.layout
        )

    def expected(self, before: Arguments) -> list[Expected]:
        case, by, heads = self.case, self.rotations(before), self.heads_of(before)
        found = []
        leaves = [x.detach().double().requires_grad_() for x in heads]
        weights = [x.detach().double().requires_grad_() for x in self.weights_of(before)]
        whole = []
        for i, x in enumerate(leaves):
            normed = self.normed(x, weights[i]) if self.is_norm else x
            whole.append(float64_reference.rotated(normed, self.by_head(by, x, before, i == 0), case.pairing))
            # The norm adds a sum of squares and an inverse square root.
            more = 16 * compute_eps(case) if self.is_norm else 0.0
            value = whole[i].detach()
            allowed = float64_reference.allowed_error(value, case.torch_dtype, case.rotary_dim, case.pairing, more)
            found.append(Expected("qk"[i], value, allowed))
        if "gradients" in before:
            found += self.expected_gradients(before, leaves, weights, whole, by)
        return found

    def expected_gradients(
        self, before: Arguments, leaves: list[Tensor], weights: list[Tensor], whole: list[Tensor], by: list[Tensor]
    ) -> list[Expected]:
        case, given = self.case, [g.double() for g in before["gradients"]]
        wanted = leaves + weights
        values = list(torch.autograd.grad(whole, wanted, given))
        names = [f"gradient of {name}" for name in (*"qk"[: len(leaves)], *("q_weight", "k_weight")[: len(weights)])]
        if not self.is_norm:
            return [
                Expected(name, g, float64_reference.allowed_error(g, case.torch_dtype, case.rotary_dim, case.pairing))
                for name, g in zip(names, values, strict=True)
            ]
        back = [
            float64_reference.pair_norms(
                float64_reference.rotated(g, self.by_head(by, g, before, i == 0).conj(), case.pairing),
                case.rotary_dim,
                case.pairing,
            )
            for i, g in enumerate(given)
        ]
        tolerance, eps = TOLERANCES[case.torch_dtype], compute_eps(case)
        head_bounds, weight_bounds = [], []
        for x, weight, g in zip(leaves, weights, back, strict=True):
            dims = self.norm_dims
            root = (x.detach().square().mean(dims, keepdim=True) + case.eps).rsqrt()
            gain = self.weight_by_head(weight.detach(), x)
            pulled, unit = (g * gain).abs(), (x.detach() * root).abs()
            head_bounds.append(root * (pulled + unit * (pulled * unit).mean(dims, keepdim=True)))
            products = (g * unit).sum([d for d in range(x.dim() - 1) if d != self.head_axis(x)])
            products = products if case.over == "all_heads" else products.sum(0)
            weight_bounds.append(products.flatten())
        found = []
        for name, value, bound in zip(names, values, head_bounds + weight_bounds, strict=True):
            terms = 64.0 + case.tokens
            allowed = (
                tolerance.rounding * value.abs()
                + terms * eps * bound
                + float64_reference.smallest_subnormal(case.torch_dtype)
            )
            found.append(Expected(name, value, allowed))
        return found

    @property
    def norm_dims(self) -> list[int]:
        return [-1] if self.case.over == "head" else [HEAD_AXIS[self.case.layout], -1]

    def head_axis(self, x: Tensor) -> int:
        return x.dim() + HEAD_AXIS[self.case.layout]

    def weight_by_head(self, weight: Tensor, x: Tensor) -> Tensor:
        weight = weight + self.case.weight_offset
        if self.case.over == "head":
            return weight
        heads = x.shape[HEAD_AXIS[self.case.layout]]
        dim = self.case.head_dim
        return weight.view(heads, 1, dim) if self.case.layout == "bhsd" else weight.view(heads, dim)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(self.norm_dims, keepdim=True) + self.case.eps).rsqrt()
        return x * scale * self.weight_by_head(weight, x)

    def alternatives(self) -> list[Alternative]:
        case, found = self.case, []
        if case.memory != "expanded":
            other = case.op.removesuffix("_") if case.op.endswith("_") else f"{case.op}_"
            if other != "qk_norm_rotary_" or case.gradient == "none":
                found.append(Alternative(other, lambda arguments: self.call(other, arguments), is_bitwise=True))
        if not self.is_norm and case.dtype != "float64" and case.layout != "thd" and case.gradient == "none":
            found.append(Alternative("the decomposition", self.decomposed, is_bitwise=False))
        return found

    def decomposed(self, arguments: Arguments) -> list[Tensor]:
        """Run the decomposition that torch.compile gets."""
        table, positions, index = arguments["table"], arguments["positions"], arguments["table_index"]
        if not self.is_raw_op:
            table = packed_stack(self.tables, arguments["q"].device)
        if index is not None:
            table = table[index.long()]
        if positions.dim() == 1:
            positions = positions[None]
        heads, options = self.heads_of(arguments), (self.case.layout, self.case.pairing, self.case.conjugate)
        return decompositions.rotary(heads, positions, table, *options)
