"""Time and error of the rotation by learned frequencies, beside a copy of the same bytes and eager PyTorch.

    python benchmarks/learnable_rotary.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json. Rows "with backward" time the op and its gradients for q, k, frequencies and
attention factors. Beside them are two copies, since the passes cannot be one launch: of the bytes of the forward pass,
twice q and k, and of those of the backward pass, three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from op_benchmark import OpBenchmark

import mrrope
from mrrope.benchmark import baseline
from mrrope.benchmark.timing import Step

Heads = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    tables: int
    dtype: str = "bfloat16"
    with_backward: bool = True

    @property
    def passes(self) -> list[int]:
        """Forward reads and writes q and k; backward reads q, k and the gradients and writes theirs."""
        size: int = getattr(torch, self.dtype).itemsize
        heads = self.tokens * (self.q_heads + self.k_heads) * self.head_dim * size
        return [2 * heads, 3 * heads] if self.with_backward else [2 * heads]

    @property
    def name(self) -> str:
        shape = f"{self.tokens} x {self.q_heads}/{self.k_heads} x {self.head_dim}"
        tables = f"{self.tables} table{'s' if self.tables > 1 else ''}"
        return f"{shape}, {tables}, {self.dtype}{', with backward' if self.with_backward else ''}"


LLAMA_8B, SMOLLM2 = (32, 8, 128), (9, 3, 64)
CASES = {
    "cuda": [
        *(
            Case(tokens, *shape, tables=shape[1], with_backward=with_backward)
            for shape in (LLAMA_8B, SMOLLM2)
            for with_backward in (False, True)
            for tokens in (1024, 8192, 32768, 131072)
        ),
        *(Case(8192, *shape, tables=1) for shape in (LLAMA_8B, SMOLLM2)),
        *(Case(8192, *LLAMA_8B, tables=8, dtype=dtype) for dtype in ("float16", "float32")),
    ],
    "cpu": [
        Case(tokens, *SMOLLM2, tables=3, dtype=dtype, with_backward=with_backward)
        for tokens in (64, 1024)
        for dtype in ("float32", "bfloat16")
        for with_backward in (False, True)
    ],
}


class Buffers:
    """q and k as a model's projections give them, [1, tokens, heads, head_dim], and a table for each key head."""

    def __init__(self, case: Case, device: str) -> None:
        dtype = getattr(torch, case.dtype)

        def heads(count: int) -> torch.Tensor:
            return torch.randn((1, case.tokens, count, case.head_dim), device=device, dtype=dtype)

        self.q, self.k = heads(case.q_heads), heads(case.k_heads)
        exponents = torch.linspace(0.0, 1.0, case.head_dim // 2 + 1, device=device)[:-1]
        slowed = torch.linspace(1.0, 16.0, case.tables, device=device)
        self.frequencies = 1e4**-exponents / slowed[:, None] ** exponents
        self.attention_factor = torch.linspace(1.0, 1.3, case.tables, device=device)
        for leaf in self.leaves:
            leaf.requires_grad_(case.with_backward)
        self.gradients = tuple(torch.randn_like(x).transpose(1, 2) for x in (self.q, self.k))
        self.positions = torch.arange(case.tokens, device=device)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.frequencies, self.attention_factor]


def fused(buffers: Buffers) -> Heads:
    q, k = buffers.q.transpose(1, 2), buffers.k.transpose(1, 2)
    found = mrrope.learnable_rotary(q, k, buffers.positions, buffers.frequencies, buffers.attention_factor)
    assert found[1] is not None
    return found[0], found[1]


def eager(buffers: Buffers) -> Heads:
    """The rotation in PyTorch as a training script has it: float32 angles, cosines and sines of the heads' dtype."""
    angles = buffers.positions.float()[:, None] * buffers.frequencies[:, None, :]
    angles = torch.cat([angles, angles], dim=-1)  # [tables, tokens, head_dim]
    gain = buffers.attention_factor[:, None, None]
    cos, sin = (angles.cos() * gain).to(buffers.q.dtype), (angles.sin() * gain).to(buffers.q.dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        by_table = x.transpose(1, 2).reshape(1, len(cos), -1, *x.shape[1::2])  # heads by table
        return baseline.apply(by_table, cos[:, None], sin[:, None]).flatten(1, 2)

    return rotated(buffers.q), rotated(buffers.k)


CONTENDERS: dict[str, Callable[[Buffers], Heads]] = {
    "mrrope": fused,
    "eager": eager,
    "compiled": torch.compile(eager, dynamic=False),
}


def timed_step(case: Case, run: Callable[[Buffers], Heads], buffers: Buffers) -> Step:
    if not case.with_backward:
        return lambda: run(buffers)
    return lambda: torch.autograd.grad(run(buffers), buffers.leaves, buffers.gradients)


def relative_error(case: Case, run: Callable[[Buffers], Heads], device: str) -> float:
    """Relative error of q against float64, over the last 256 tokens."""
    buffers = Buffers(replace(case, tokens=min(case.tokens, 256)), device)
    buffers.positions += case.tokens - buffers.positions.numel()
    angles = buffers.positions.double()[:, None] * buffers.frequencies.double()[:, None, :]  # of 2^17, to 2^-36
    of_heads = [x.repeat_interleave(case.q_heads // case.tables, dim=0) for x in (angles, buffers.attention_factor)]
    cos, sin = of_heads[0].cos(), of_heads[0].sin()
    want = baseline.exact_rotary(buffers.q.double().transpose(1, 2), cos, sin) * of_heads[1].double()[:, None, None]
    return baseline.relative_error(run(buffers)[0], want)


BENCHMARK = OpBenchmark(
    name="learnable_rotary",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
    step=timed_step,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
