"""Time and error of the fused QK-norm + rotary op, beside a copy of the same bytes and the unfused ops.

    python benchmarks/qk_norm_rotary.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json. Rows "with backward" time the op and its gradient for q, k and the weights.
Beside them are two copies, since the passes cannot be one launch: of the bytes of the forward pass, twice q and k, and
of those of the backward pass, three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from op_benchmark import HEAD_DIM, OpBenchmark, llama_table
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import mrrope
from mrrope.benchmark import baseline
from mrrope.benchmark.timing import Step

TABLE = llama_table()
EPS = 1e-6

Heads = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    q_heads: int
    k_heads: int
    over: str
    dtype: str = "bfloat16"
    with_backward: bool = False

    @property
    def passes(self) -> list[int]:
        """Forward reads and writes q and k; backward reads q, k and the gradients and writes theirs."""
        size: int = getattr(torch, self.dtype).itemsize
        heads = self.tokens * (self.q_heads + self.k_heads) * HEAD_DIM * size
        return [2 * heads, 3 * heads] if self.with_backward else [2 * heads]

    @property
    def name(self) -> str:
        backward = ", with backward" if self.with_backward else ""
        return f"{self.tokens} x {self.q_heads}/{self.k_heads} {self.over} {self.dtype}{backward}"


CASES = {
    "cuda": [
        *(Case(tokens, 32, 8, "head") for tokens in (1, 64, 256, 1024, 8192, 131072)),  # Qwen3 8B
        *(Case(tokens, 32, 32, "all_heads") for tokens in (1, 64, 256, 1024, 8192, 131072)),  # OLMo 2 7B
        *(Case(tokens, 32, 8, "head", with_backward=True) for tokens in (1024, 8192)),
        *(Case(tokens, 32, 32, "all_heads", with_backward=True) for tokens in (1024, 8192)),
        Case(8192, 32, 8, "head", "float32"),
    ],
    "cpu": [
        Case(tokens, 8, 2, over, dtype, with_backward)
        for tokens in (1, 256)
        for over in ("head", "all_heads")
        for dtype in ("float32", "bfloat16")
        for with_backward in (False, True)
    ],
}


class Buffers:
    """q and k as a model's projections give them, [1, tokens, heads, head_dim], and the norms."""

    def __init__(self, case: Case, device: str) -> None:
        dtype = getattr(torch, case.dtype)

        def heads(count: int) -> torch.Tensor:
            return torch.randn((1, case.tokens, count, HEAD_DIM), device=device, dtype=dtype)

        def norm(count: int) -> torch.nn.Module:
            size = HEAD_DIM if case.over == "head" else count * HEAD_DIM
            kind: Any = Qwen3RMSNorm if case.over == "head" else Olmo2RMSNorm
            module: torch.nn.Module = kind(size, eps=EPS).to(device, dtype)
            torch.nn.init.normal_(module.weight, 1.0, 0.2)  # type: ignore[arg-type]
            return module.requires_grad_(case.with_backward)

        self.over = case.over
        self.q, self.k = (heads(n).requires_grad_(case.with_backward) for n in (case.q_heads, case.k_heads))
        self.q_norm, self.k_norm = norm(case.q_heads), norm(case.k_heads)
        self.gradients = tuple(torch.randn_like(x).transpose(1, 2) for x in (self.q, self.k))
        self.positions = torch.arange(case.tokens, device=device)
        self.place_at(0)

    def place_at(self, first: int) -> None:
        """Number the tokens from ``first`` on."""
        self.positions += first - self.positions[0].clone()
        self.cos, self.sin = (x[None] for x in baseline.cos_sin(self.positions, TABLE, self.q.dtype))

    @property
    def leaves(self) -> list[torch.Tensor]:
        weights = (norm.weight for norm in (self.q_norm, self.k_norm))
        return [self.q, self.k, *weights]  # type: ignore[list-item]

    def in_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A view whose last dimension is what the norm averages over."""
        return x if self.over == "head" else x.flatten(-2)


def fused(buffers: Buffers) -> Heads:
    q, k, q_weight, k_weight = buffers.leaves
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    found = mrrope.qk_norm_rotary(q, k, q_weight, k_weight, buffers.positions, TABLE, eps=EPS, over=buffers.over)
    assert found[1] is not None
    return found[0], found[1]


def fused_in_place(buffers: Buffers) -> Heads:
    q, k, q_weight, k_weight = buffers.leaves
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    mrrope.qk_norm_rotary_(q, k, q_weight, k_weight, buffers.positions, TABLE, eps=EPS, over=buffers.over)
    return q, k


def unfused(buffers: Buffers) -> Heads:
    """torch's rms_norm, then mrrope's rotary op."""
    q, k = (
        rms_norm(buffers.in_rows(x), weight.shape, weight, EPS).view_as(x).transpose(1, 2)
        for x, weight in zip(buffers.leaves[:2], buffers.leaves[2:], strict=True)
    )
    # With autograd, rotary_ is rotary plus a copy.
    rotate = mrrope.rotary if torch.is_grad_enabled() else mrrope.rotary_
    found = rotate(q, k, buffers.positions, TABLE)
    assert found[1] is not None
    return found[0], found[1]


def transformers_eager(buffers: Buffers) -> Heads:
    q, k = (
        norm(buffers.in_rows(x)).view_as(x).transpose(1, 2)
        for x, norm in ((buffers.q, buffers.q_norm), (buffers.k, buffers.k_norm))
    )
    q, k = apply_rotary_pos_emb(q, k, buffers.cos, buffers.sin)
    return q, k


IN_PLACE = "mrrope in place"
CONTENDERS: dict[str, Callable[[Buffers], Heads]] = {
    "mrrope": fused,
    IN_PLACE: fused_in_place,
    "apart": unfused,
    "apart, compiled": torch.compile(unfused, dynamic=False),
    "transformers": transformers_eager,
    "transformers, compiled": torch.compile(transformers_eager, dynamic=False),
}
"""The names are keys of the results file; "apart" is the unfused ops."""


def timed_step(case: Case, run: Callable[[Buffers], Heads], buffers: Buffers) -> Step:
    if not case.with_backward:
        return lambda: run(buffers)
    return lambda: torch.autograd.grad(run(buffers), buffers.leaves, buffers.gradients)


def relative_error(case: Case, run: Callable[[Buffers], Heads], device: str) -> float:
    """Relative error of q against float64 with exact phases, over the last 256 tokens."""
    buffers = Buffers(Case(min(case.tokens, 256), case.q_heads, case.k_heads, case.over, case.dtype), device)
    buffers.place_at(case.tokens - buffers.positions.numel())
    rows, weight = buffers.in_rows(buffers.q.double()), buffers.q_norm.weight
    assert isinstance(weight, torch.Tensor)
    normed = rms_norm(rows, weight.shape, weight.double(), EPS).view_as(buffers.q).transpose(1, 2)
    phases = baseline.exact_phases(buffers.positions, TABLE)
    want = baseline.exact_rotary(normed, phases.cos(), phases.sin()) * TABLE.attention_factor
    return baseline.relative_error(run(buffers)[0], want)


BENCHMARK = OpBenchmark(
    name="qk_norm_rotary",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
    step=timed_step,
    takes=lambda case, name: not (case.with_backward and name == IN_PLACE),
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
