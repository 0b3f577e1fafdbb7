"""Time and error of the fused MLA rotary + key assembly, beside a copy of the same bytes and the unfused ops.

    python benchmarks/mla_rotary.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

Heads of 128 + 64 components, bfloat16: 128 heads are DeepSeek-V3's, 16 those of DeepSeek-V2-Lite. Rows "with backward"
time the op and its gradients, beside a copy for each pass. Prints one table and writes NAME.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from op_benchmark import OpBenchmark

import mrrope
from mrrope.benchmark import baseline
from mrrope.benchmark.timing import Step

NOPE_DIM, ROPE_DIM, VALUE_DIM = 128, 64, 128
TABLE = mrrope.frequency_table(
    "yarn", rotary_dim=ROPE_DIM, base=1e4, original_max_position=4096, scale=40.0, attention_factor=1.0
)

Heads = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    heads: int
    with_backward: bool = False

    @property
    def passes(self) -> list[int]:
        """q is read and written, k_nope read, the key written; backward: q's gradient, and the key's rope part."""
        head_dim = NOPE_DIM + ROPE_DIM
        forward = self.heads * (2 * head_dim + NOPE_DIM + head_dim) + ROPE_DIM
        backward = self.heads * (2 * head_dim + ROPE_DIM) + ROPE_DIM
        components = [forward, backward] if self.with_backward else [forward]
        return [2 * self.tokens * count for count in components]

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.heads}{', with backward' if self.with_backward else ''}"


CASES = {
    "cuda": [
        Case(tokens, heads, with_backward)
        for with_backward in (False, True)
        for heads in (128, 16)
        for tokens in (1, 64, 256, 1024, 8192, 32768)
        if tokens >= 1024 or not with_backward
    ],
    "cpu": [Case(tokens, 16, with_backward) for tokens in (1, 64) for with_backward in (False, True)],
}


class Buffers:
    """q, and k_nope as a view of the up-projection that also holds the values, [1, tokens, heads, dim]."""

    def __init__(self, case: Case, device: str) -> None:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(1, case.tokens, *shape, device=device, dtype=torch.bfloat16)

        self.q = tensor(case.heads, NOPE_DIM + ROPE_DIM).requires_grad_(case.with_backward)
        self.k_nope = tensor(case.heads, NOPE_DIM + VALUE_DIM)[..., :NOPE_DIM].requires_grad_(case.with_backward)
        self.k_rope = tensor(ROPE_DIM).requires_grad_(case.with_backward)
        self.positions = 8000 + torch.arange(case.tokens, device=device)
        count = 2 if case.with_backward else 0
        self.gradients = [tensor(case.heads, NOPE_DIM + ROPE_DIM) for _ in range(count)]


def fused(buffers: Buffers) -> Heads:
    b = buffers
    return mrrope.mla_rotary(b.q, b.k_nope, b.k_rope, b.positions, TABLE, layout="bshd")


def unfused(buffers: Buffers) -> Heads:
    b = buffers
    q_rope, shared = mrrope.rotary(
        b.q[..., NOPE_DIM:], b.k_rope[:, :, None], b.positions, TABLE, layout="bshd", pairing="interleaved"
    )
    assert shared is not None
    key = torch.cat([b.k_nope, shared.expand(-1, -1, b.k_nope.shape[2], -1)], dim=-1)
    return torch.cat([b.q[..., :NOPE_DIM], q_rope], dim=-1), key


CONTENDERS: dict[str, Callable[[Buffers], Heads]] = {
    "mla_rotary": fused,
    "rotary, compiled cat": torch.compile(unfused, dynamic=False),
    "rotary, cat": unfused,
}


def timed_step(case: Case, run: Callable[[Buffers], Heads], buffers: Buffers) -> Step:
    if not case.with_backward:
        return lambda: run(buffers)
    leaves = [buffers.q, buffers.k_nope, buffers.k_rope]
    return lambda: torch.autograd.grad(run(buffers), leaves, buffers.gradients)


def relative_error(case: Case, run: Callable[[Buffers], Heads], device: str) -> float:
    """Relative error of the rotated part of q against its rotation in float64."""
    buffers = Buffers(Case(min(case.tokens, 256), case.heads), device)
    q_rope = buffers.q[..., NOPE_DIM:].double()
    exact, _ = mrrope.rotary(q_rope, None, buffers.positions, TABLE, "bshd", "interleaved")
    return baseline.relative_error(run(buffers)[0][..., NOPE_DIM:], exact)


BENCHMARK = OpBenchmark(
    name="mla_rotary",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
    step=timed_step,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
