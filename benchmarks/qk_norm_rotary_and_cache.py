"""Time and error of norms, rotation and cache write in one launch, beside a copy of the same bytes and the unfused ops.

    python benchmarks/qk_norm_rotary_and_cache.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

q, k and v, and the gate where there is one, are views of one packed projection, bfloat16. Up to 256 tokens are a decode
step, one token per sequence; more are the prefill of one sequence. Prints one table and writes NAME.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from op_benchmark import OpBenchmark
from torch.nn.functional import rms_norm

import mrrope
from mrrope.benchmark import baseline

EPS = 1e-6
BLOCK_SIZE = 16
MAX_DECODE_TOKENS = 256
TOKENS = {"cuda": (1, 16, 64, 256, 1024, 8192, 131072), "cpu": (1, 64)}


@dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    weight_offset: float
    has_gate: bool

    def __str__(self) -> str:
        gate = " gate" if self.has_gate else ""
        return f"{self.q_heads}/{self.kv_heads} x {self.head_dim}{gate}"


QWEN3 = Shape(32, 8, 128, 128, 0.0, has_gate=False)  # Qwen3-8B
QWEN3_NEXT = Shape(16, 2, 256, 64, 1.0, has_gate=True)  # Qwen3-Next-80B-A3B


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    shape: Shape
    cache: str
    """Dtype of the cache."""
    q: str
    """Dtype of the rotated q; float8 with a computed scale per token and head."""

    with_backward = False

    @property
    def bytes(self) -> int:
        """q and gate are read and written, k and v are read and their cache entries written."""
        s = self.shape
        q_size, cache_size = (getattr(torch, name).itemsize for name in (self.q, self.cache))
        per_component: int = (2 + q_size) * s.q_heads + 2 * (2 + cache_size) * s.kv_heads + 4 * s.q_heads * s.has_gate
        return self.tokens * s.head_dim * per_component + 4 * self.tokens * s.q_heads * self.float8_q

    @property
    def float8_q(self) -> bool:
        return self.q != "bfloat16"

    @property
    def name(self) -> str:
        q = f", q {self.q}" if self.float8_q else ""
        return f"{self.tokens} x {self.shape}, {self.cache}{q}"


CASES = {
    device: [
        Case(tokens, shape, cache, q)
        for shape, cache, q in (
            (QWEN3, "bfloat16", "bfloat16"),
            (QWEN3, "float8_e4m3fn", "bfloat16"),
            (QWEN3, "float8_e4m3fn", "float8_e4m3fn"),
            (QWEN3_NEXT, "bfloat16", "bfloat16"),
        )
        for tokens in TOKENS[device]
    ]
    for device in TOKENS
}


class Buffers:
    """The heads as views of a packed projection, weights, caches, and the slot of every token."""

    def __init__(self, case: Case, device: str) -> None:
        tokens, s = case.tokens, case.shape
        parts = 2 if s.has_gate else 1
        packed = torch.randn(
            tokens, (parts * s.q_heads + 2 * s.kv_heads) * s.head_dim, device=device, dtype=torch.bfloat16
        )
        q_size, kv_size = parts * s.q_heads * s.head_dim, s.kv_heads * s.head_dim
        # The projection yields [q | gate] for each head.
        q_and_gate = packed[:, :q_size].view(tokens, s.q_heads, -1)
        k, v = packed[:, q_size : q_size + kv_size], packed[:, q_size + kv_size :]
        self.shape, self.q = s, q_and_gate[..., : s.head_dim]
        self.gate = q_and_gate[..., s.head_dim :] if s.has_gate else None
        self.k, self.v = (x.view(tokens, s.kv_heads, -1) for x in (k, v))
        weights = 1.0 - s.weight_offset + 0.1 * torch.randn(2, s.head_dim, device=device)
        self.q_weight, self.k_weight = weights.bfloat16()
        # Attention factor 1: q is rotated in place over and over and must not grow.
        self.table = mrrope.frequency_table(
            "mrrope_pro",
            rotary_dim=s.rotary_dim,
            base=1e6,
            original_max_position=32768,
            scale=4.0,
            attention_factor=1.0,
        ).to(device)  # a first use would copy it, which no capture takes
        is_decoding = tokens <= MAX_DECODE_TOKENS
        numbers = torch.arange(tokens, device=device)
        self.positions = 8000 + numbers
        # Decode: one block per sequence. Prefill: consecutive tokens fill blocks in random order.
        blocks = 2 * (tokens if is_decoding else -(-tokens // BLOCK_SIZE))
        order = torch.randperm(blocks, device=device)
        self.block = order[numbers if is_decoding else numbers // BLOCK_SIZE]
        self.offset = numbers % BLOCK_SIZE
        self.slots = self.block * BLOCK_SIZE + self.offset
        dtype = getattr(torch, case.cache)
        shape = (blocks, BLOCK_SIZE, s.kv_heads, s.head_dim)
        self.key_cache, self.value_cache = (torch.zeros(shape, device=device).to(dtype) for _ in range(2))
        self.scale = torch.full((1,), 0.02, device=device) if case.cache != "bfloat16" else None
        self.q_out, self.q_scale_out = None, None
        if case.float8_q:
            self.q_out = torch.empty(self.q.shape, device=device, dtype=getattr(torch, case.q))
            self.q_scale_out = torch.empty(self.q.shape[:-1], device=device)

    @property
    def norm(self) -> dict[str, Any]:
        return {"eps": EPS, "weight_offset": self.shape.weight_offset}


def fused(buffers: Buffers) -> object:
    b = buffers
    return mrrope.qk_norm_rotary_and_cache_(
        b.q, b.k, b.v, b.q_weight, b.k_weight, b.positions, b.table, b.key_cache, b.value_cache, b.slots,
        **b.norm, layout="thd", key_scale=b.scale, value_scale=b.scale,
        q_out=b.q_out, q_scale_out=b.q_scale_out, gate=b.gate,
    )  # fmt: skip


def finish(buffers: Buffers) -> None:
    """Write k and v to their slots, quantize q, and take the sigmoid of the gate."""
    b = buffers
    for cache, heads in ((b.key_cache, b.k), (b.value_cache, b.v)):
        if b.scale is not None:
            rounded = (heads.float() / b.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            cache, heads = cache.view(torch.uint8), rounded.view(torch.uint8)
        cache[b.block, b.offset] = heads
    if b.q_out is not None and b.q_scale_out is not None:
        scale = (b.q.float().abs().amax(-1) / 448.0).clamp(min=2.0**-126)
        b.q_scale_out.copy_(scale)
        b.q_out.copy_((b.q.float() / scale[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn))
    if b.gate is not None:
        b.gate.sigmoid_()


compiled_finish: Callable[[Buffers], None] = torch.compile(finish, dynamic=False)


def norm_then_finish(buffers: Buffers) -> None:
    b = buffers
    mrrope.qk_norm_rotary_(b.q, b.k, b.q_weight, b.k_weight, b.positions, b.table, **b.norm, layout="thd")
    compiled_finish(b)


def norms(buffers: Buffers) -> list[torch.Tensor]:
    b = buffers
    pairs = ((b.q, b.q_weight), (b.k, b.k_weight))
    return [rms_norm(x, weight.shape, weight + b.shape.weight_offset, EPS) for x, weight in pairs]


compiled_norms: Callable[[Buffers], list[torch.Tensor]] = torch.compile(norms, dynamic=False)


def norms_then_rotary_and_cache(buffers: Buffers) -> None:
    b = buffers
    q, k = compiled_norms(b)
    mrrope.rotary_and_cache_(
        q, k, b.v, b.positions, b.table, b.key_cache, b.value_cache, b.slots,
        layout="thd", key_scale=b.scale, value_scale=b.scale,
    )  # fmt: skip
    if b.gate is not None:
        b.gate.sigmoid_()


NORMS_THEN_CACHE = "compiled norms, rotary_and_cache_"
CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    "qk_norm_rotary_and_cache_": fused,
    "qk_norm_rotary_, compiled rest": norm_then_finish,
    NORMS_THEN_CACHE: norms_then_rotary_and_cache,
}


def relative_error(case: Case, run: Callable[[Buffers], object], device: str) -> float:
    """Relative error of the cached keys against their norm and rotation in float64, over the last 256 tokens."""
    buffers = Buffers(case, device)
    last = slice(-256, None)
    exact, _ = mrrope.qk_norm_rotary(
        buffers.k[last].double(), None, buffers.k_weight.double(), None, buffers.positions[last], buffers.table,
        **buffers.norm, layout="thd",
    )  # fmt: skip
    run(buffers)
    rows = buffers.key_cache[buffers.block[last], buffers.offset[last]].to(torch.float32).double()
    return baseline.relative_error(rows * (1.0 if buffers.scale is None else buffers.scale.double()), exact)


BENCHMARK = OpBenchmark(
    name="qk_norm_rotary_and_cache",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
    # Only the other two quantize q.
    takes=lambda case, name: not (case.float8_q and name == NORMS_THEN_CACHE),
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
