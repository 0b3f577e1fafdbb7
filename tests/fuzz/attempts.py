"""What a case calls, with what, and what it should give: the ops that rotate heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from reference import HEAD_AXIS, TOLERANCES

import mrrope
from fuzz import exact
from fuzz.exact import Steps
from fuzz.op_cases import OpCase, Tensors
from mrrope.ops import decompositions
from mrrope.tables import packed_stack

Arguments = dict[str, Any]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What a tensor should hold, in float64, and what it may be off by."""

    name: str
    value: Tensor
    allowed: Tensor | float


class Attempt:
    """A call that can be made on any copy of its arguments."""

    def __init__(self, case: OpCase) -> None:
        self.case = case
        self.tensors = Tensors(case)
        self.arguments: Arguments = {}

    def invoke(self, arguments: Arguments) -> list[Tensor]:
        """Makes the call; what it returned or wrote, gradients last."""
        raise NotImplementedError

    def expected(self, before: Arguments) -> list[Expected]:
        """Of each tensor that :meth:`invoke` gives, from the arguments as they were."""
        raise NotImplementedError

    def written(self, arguments: Arguments) -> list[Tensor]:
        """The arguments that may change."""
        return []

    def other_ways(self) -> dict[str, Any]:
        """Other functions of the arguments that should give the same; to the bit where the name says so."""
        return {}


class RotaryAttempt(Attempt):
    """rotary, rotary_, qk_norm_rotary and qk_norm_rotary_, through Python or, with rows, as plain ops."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, *k = self.tensors.heads(case.q_heads, *([case.k_heads] if case.has_k else []))
        self.tables = [case.make_table(i) for i in range(self.table_count)]
        index = self.tensors.table_numbers(0) if case.tables == "index" else None
        positions = self.tensors.positions()
        self.is_norm = case.op.startswith("qk_norm")
        self.is_raw = bool(case.position_rows or case.conjugate or case.negated)
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
            self.arguments["gradients"] = [self.gradient_like(x) for x in (q, *k)]

    @property
    def table_count(self) -> int:
        return {"one": 1, "each": self.case.batch, "index": self.case.table_count}[self.case.tables]

    def table_argument(self) -> Any:
        case = self.case
        if not self.is_raw:
            return self.tables[0] if case.tables == "one" else self.tables
        packed = packed_stack(self.tables, torch.device("cpu"))
        self.row_of_pair = None
        if case.position_rows:
            rows = case.numpy_random(3).integers(0, case.position_rows, size=(len(packed), packed.shape[1]))
            rows = torch.from_numpy(rows)
            rows[:, -1] = 0
            self.row_of_pair = rows[:, :-1].to(case.device)
            packed = torch.stack([packed, rows], dim=1)
        elif case.tables == "one":
            packed = packed[0]
        return (-packed if case.negated else packed).to(case.device)

    def gradient_like(self, x: Tensor) -> Tensor:
        if self.case.gradient == "expanded":
            return self.tensors.random((1,) * x.dim()).expand(x.shape)
        gradient = self.tensors.random(tuple(x.shape))
        return (
            gradient.transpose(-1, -2).contiguous().transpose(-1, -2)
            if self.case.gradient == "transposed"
            else gradient
        )

    def heads_of(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"]] + ([arguments["k"]] if arguments["k"] is not None else [])

    def weights_of(self, arguments: Arguments) -> list[Tensor]:
        if not self.is_norm:
            return []
        return [arguments["q_weight"]] + ([arguments["k_weight"]] if arguments["k"] is not None else [])

    def written(self, arguments: Arguments) -> list[Tensor]:
        return self.heads_of(arguments) if self.case.op.endswith("_") and "gradients" not in arguments else []

    def invoke(self, arguments: Arguments) -> list[Tensor]:
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
                # A leaf cannot be written in place.
                arguments[name] = leaves[name] * 1.0 if op.endswith("_") else leaves[name]
        out = self.call_op(op, arguments)
        return out + list(torch.autograd.grad(out, list(leaves.values()), gradients))

    def call_op(self, op: str, arguments: Arguments) -> list[Tensor]:
        if self.is_raw:
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

    def steps(self, before: Arguments) -> Steps:
        steps = Steps.of(self.tables, self.case.device)
        if before["table_index"] is not None:
            steps = steps.picked(before["table_index"])
        return steps.backwards() if self.case.conjugate != self.case.negated else steps

    def rotations(self, before: Arguments) -> Tensor:
        rows = getattr(self, "row_of_pair", None)
        if rows is not None and before["table_index"] is not None:
            rows = rows[before["table_index"].long()]
        return exact.rotations(before["positions"], self.steps(before), self.case.layout, rows)

    def expected(self, before: Arguments) -> list[Expected]:
        case, by, heads = self.case, self.rotations(before), self.heads_of(before)
        found = []
        leaves = [x.detach().double().requires_grad_() for x in heads]
        weights = [x.detach().double().requires_grad_() for x in self.weights_of(before)]
        whole = []
        for i, x in enumerate(leaves):
            normed = self.normed(x, weights[i]) if self.is_norm else x
            whole.append(exact.rotated(normed, by, case.pairing))
            # Sums of squares and an inverse root beside the rotation.
            more = 16 * float32_or_more(case) if self.is_norm else 0.0
            value = whole[i].detach()
            allowed = exact.allowed_error(value, case.torch_dtype, case.rotary_dim, case.pairing, more)
            found.append(Expected("qk"[i], value, allowed))
        if "gradients" in before:
            found += self.expected_gradients(before, leaves, weights, whole, by)
        return found

    def expected_gradients(
        self, before: Arguments, leaves: list[Tensor], weights: list[Tensor], whole: list[Tensor], by: Tensor
    ) -> list[Expected]:
        case, given = self.case, [g.double() for g in before["gradients"]]
        wanted = leaves + weights
        values = list(torch.autograd.grad(whole, wanted, given))
        names = [f"gradient of {name}" for name in (*"qk"[: len(leaves)], *("q_weight", "k_weight")[: len(weights)])]
        if not self.is_norm:
            return [
                Expected(name, g, exact.allowed_error(g, case.torch_dtype, case.rotary_dim, case.pairing))
                for name, g in zip(names, values, strict=True)
            ]
        back = [
            exact.pair_norms(exact.rotated(g, by.conj(), case.pairing), case.rotary_dim, case.pairing) for g in given
        ]
        tolerance, eps = TOLERANCES[case.torch_dtype], float32_or_more(case)
        head_bounds, weight_bounds = [], []
        for x, weight, g in zip(leaves, weights, back, strict=True):
            dims = self.norm_dims
            root = (x.detach().square().mean(dims, keepdim=True) + case.eps).rsqrt()
            shaped = self.shaped(weight.detach(), x)
            pulled, unit = (g * shaped).abs(), (x.detach() * root).abs()
            head_bounds.append(root * (pulled + unit * (pulled * unit).mean(dims, keepdim=True)))
            products = (g * unit).sum([d for d in range(x.dim() - 1) if d != self.head_dim_of(x)])
            products = products if case.over == "all_heads" else products.sum(0)
            weight_bounds.append(products.flatten())
        found = []
        for name, value, bound in zip(names, values, head_bounds + weight_bounds, strict=True):
            terms = 64.0 + case.tokens
            allowed = tolerance.rounding * value.abs() + terms * eps * bound + exact.smallest(case.torch_dtype)
            found.append(Expected(name, value, allowed))
        return found

    @property
    def norm_dims(self) -> list[int]:
        return [-1] if self.case.over == "head" else [HEAD_AXIS[self.case.layout], -1]

    def head_dim_of(self, x: Tensor) -> int:
        return x.dim() + HEAD_AXIS[self.case.layout]

    def shaped(self, weight: Tensor, x: Tensor) -> Tensor:
        weight = weight + self.case.weight_offset
        if self.case.over == "head":
            return weight
        heads = x.shape[HEAD_AXIS[self.case.layout]]
        dim = self.case.head_dim
        return weight.view(heads, 1, dim) if self.case.layout == "bhsd" else weight.view(heads, dim)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(self.norm_dims, keepdim=True) + self.case.eps).rsqrt()
        return x * scale * self.shaped(weight, x)

    def other_ways(self) -> dict[str, Any]:
        op = self.case.op
        ways: dict[str, Any] = {}
        if self.case.memory != "expanded":
            other = op.removesuffix("_") if op.endswith("_") else f"{op}_"
            if other != "qk_norm_rotary_" or self.case.gradient == "none":
                ways[f"bits of {other}"] = lambda arguments: self.call(other, arguments)
        if self.case.dtype != "float64" and self.case.layout != "thd" and self.case.gradient == "none":
            ways["decomposition"] = self.decomposed
        return ways

    def decomposed(self, arguments: Arguments) -> list[Tensor]:
        """As the compiler gets it."""
        table, positions, index = arguments["table"], arguments["positions"], arguments["table_index"]
        if not self.is_raw:
            table = packed_stack(self.tables, arguments["q"].device)
        if index is not None:
            table = table[index.long()]
        if positions.dim() == 1:
            positions = positions[None]
        heads, options = self.heads_of(arguments), (self.case.layout, self.case.pairing, self.case.conjugate)
        if not self.is_norm:
            return decompositions.rotary(heads, positions, table, *options)
        norm = (arguments["eps"], arguments["weight_offset"], arguments["over"])
        return decompositions.qk_norm_rotary(heads, self.weights_of(arguments), positions, table, *norm, *options)


def float32_or_more(case: OpCase) -> float:
    """The eps that the op computes with."""
    return torch.finfo(torch.promote_types(case.torch_dtype, torch.float32)).eps
