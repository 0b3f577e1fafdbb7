"""Time and error of the fused rotary + KV-cache write, beside a copy of the same bytes and the unfused ops.

    python benchmarks/rotary_and_cache.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

q, k and v are views of one packed projection, bfloat16. Up to 256 tokens are a decode step, one token per sequence;
more are the prefill of one sequence. Prints one table and writes NAME.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from op_benchmark import HEAD_DIM, OpBenchmark, llama_table

import mrrope
from mrrope.benchmark import baseline

# Attention factor 1: q is rotated in place over and over and must not grow.
TABLE = llama_table(attention_factor=1.0)
Q_HEADS, KV_HEADS = 32, 8
BLOCK_SIZE = 16
MAX_DECODE_TOKENS = 256
TOKENS = {"cuda": (1, 64, 256, 1024, 8192), "cpu": (1, 64)}


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    cache: str
    """``paged nhd``, ``paged hnd`` or ``static``."""
    dtype: str
    """Of the cache."""

    with_backward = False

    @property
    def float8(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def passes(self) -> list[int]:
        """q is read and written, k and v are read and their cache entries written."""
        components = self.tokens * HEAD_DIM
        cached = components * 2 * KV_HEADS * (1 if self.float8 else 2)
        return [2 * components * (2 * Q_HEADS + 2 * KV_HEADS) + cached]

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {self.cache}, {self.dtype}"


CASES = {
    device: [
        Case(tokens, cache, dtype)
        for cache, dtype in (
            ("paged nhd", "bfloat16"),
            ("paged hnd", "bfloat16"),
            ("static", "bfloat16"),
            ("paged nhd", "float8_e4m3fn"),
        )
        for tokens in TOKENS[device]
    ]
    for device in TOKENS
}


class Buffers:
    """q, k and v as views of a packed projection, the caches, and the slot of every token."""

    def __init__(self, case: Case, device: str) -> None:
        tokens = case.tokens
        packed = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v = packed[:, :Q_HEADS], packed[:, Q_HEADS:-KV_HEADS], packed[:, -KV_HEADS:]
        is_decoding = tokens <= MAX_DECODE_TOKENS
        self.positions = 8000 + torch.arange(tokens, device=device)
        self.heads_first = case.cache != "paged nhd"
        if case.cache == "static":
            blocks, block_size = (tokens, 64) if is_decoding else (1, tokens + 64)
            numbers = torch.arange(tokens, device=device)
            self.block, self.offset = (numbers, numbers % block_size) if is_decoding else (numbers * 0, numbers)
        else:
            # Decode: one block per sequence. Prefill: consecutive tokens fill blocks in random order.
            blocks, block_size = 2 * (tokens if is_decoding else -(-tokens // BLOCK_SIZE)), BLOCK_SIZE
            order = torch.randperm(blocks, device=device)
            numbers = torch.arange(tokens, device=device)
            self.block = order[numbers if is_decoding else numbers // block_size]
            self.offset = numbers % block_size
        self.slots = self.block * block_size + self.offset if case.cache != "static" else None
        self.sequences = tokens if is_decoding else 1
        shape = (blocks, KV_HEADS, block_size) if self.heads_first else (blocks, block_size, KV_HEADS)
        dtype = getattr(torch, case.dtype)
        self.caches = [torch.zeros(*shape, HEAD_DIM, device=device).to(dtype) for _ in range(2)]
        self.scale = torch.full((1,), 0.01, device=device) if case.float8 else None

    def by_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """A view [batch, heads, tokens, head_dim]."""
        return x.view(self.sequences, -1, *x.shape[1:]).transpose(1, 2)


def fused(buffers: Buffers) -> object:
    b = buffers
    q, k, v, positions = b.q, b.k, b.v, b.positions
    key_cache, value_cache = b.caches
    if b.slots is not None:
        cache_layout = "hnd" if b.heads_first else "nhd"
        return mrrope.rotary_and_cache_(
            q, k, v, positions, TABLE, key_cache, value_cache, b.slots,
            layout="thd", cache_layout=cache_layout, key_scale=b.scale, value_scale=b.scale,
        )  # fmt: skip
    q, k, v = b.by_sequence(q), b.by_sequence(k), b.by_sequence(v)
    positions, places = positions.view(b.sequences, -1), b.offset.view(b.sequences, -1)
    return mrrope.rotary_and_cache_(q, k, v, positions, TABLE, key_cache, value_cache, cache_positions=places)


def scatter(buffers: Buffers) -> None:
    """Write k and v to their slots."""
    b = buffers
    for cache, heads in zip(b.caches, (b.k, b.v), strict=True):
        if b.scale is not None:
            rounded = (heads.float() / b.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            cache, heads = cache.view(torch.uint8), rounded.view(torch.uint8)
        if b.heads_first:
            cache[b.block, :, b.offset] = heads
        else:
            cache[b.block, b.offset] = heads


compiled_scatter: Callable[[Buffers], None] = torch.compile(scatter, dynamic=False)


def unfused(buffers: Buffers) -> None:
    mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLE, "thd")
    scatter(buffers)


def unfused_compiled(buffers: Buffers) -> None:
    mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLE, "thd")
    compiled_scatter(buffers)


CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    "rotary_and_cache_": fused,
    "rotary_, compiled scatter": unfused_compiled,
    "rotary_, scatter": unfused,
}


def relative_error(case: Case, run: Callable[[Buffers], object], device: str) -> float:
    """Relative error of the cached keys against their rotation in float64."""
    buffers = Buffers(case, device)
    exact, _ = mrrope.rotary(buffers.k.double(), None, buffers.positions, TABLE, "thd")
    run(buffers)
    cache = buffers.caches[0].to(torch.float32).double() * (1.0 if buffers.scale is None else buffers.scale.double())
    cache = cache.transpose(1, 2) if buffers.heads_first else cache
    return baseline.relative_error(cache[buffers.block, buffers.offset], exact)


BENCHMARK = OpBenchmark(
    name="rotary_and_cache",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
