"""Time and error of the fused MLA rotary + cache write, beside a copy of the same bytes and the unfused ops.

    python benchmarks/mla_rotary_and_cache.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

128 query heads are DeepSeek-V3's, 16 those of DeepSeek-V2-Lite; bfloat16. q_rope is the last 64 of 192 components of
every head, a cache row has 512 latent components and 64 of the key. Up to 256 tokens are a decode step, one token per
sequence; more are the prefill of one sequence. Prints one table and writes NAME.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from op_benchmark import OpBenchmark

import mrrope
from mrrope.benchmark import baseline

NOPE_DIM, ROPE_DIM, LATENT_DIM = 128, 64, 512
ROW_DIM = LATENT_DIM + ROPE_DIM
BLOCK_SIZE = 64
MAX_DECODE_TOKENS = 256
# Attention factor 1, as in DeepSeek-V3: q is rotated in place over and over and must not grow.
TABLE = mrrope.frequency_table(
    "yarn", rotary_dim=ROPE_DIM, base=1e4, original_max_position=4096, scale=40.0, attention_factor=1.0
)
ALL_TOKENS = (1, 16, 64, 256, 1024, 8192, 131072)


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    q_heads: int
    dtype: str = "bfloat16"
    """Of the cache."""

    with_backward = False

    @property
    def float8(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def passes(self) -> list[int]:
        """q's rope parts are read and written, latent and key are read, and their row is written."""
        queries = 2 * self.tokens * self.q_heads * ROPE_DIM * 2
        return [queries + self.tokens * ROW_DIM * (2 + (1 if self.float8 else 2))]

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.q_heads}, {self.dtype}"


CASES = {
    "cuda": [
        *(Case(tokens, q_heads) for q_heads in (128, 16) for tokens in ALL_TOKENS),
        *(Case(tokens, 128, "float8_e4m3fn") for tokens in ALL_TOKENS),
    ],
    "cpu": [Case(tokens, 16, dtype) for tokens in (1, 64) for dtype in ("bfloat16", "float8_e4m3fn")],
}


class Buffers:
    """The query's heads, latent and key of one down-projection, the cache, and the slot of every token."""

    def __init__(self, case: Case, device: str) -> None:
        tokens = case.tokens
        query = torch.randn(tokens, case.q_heads, NOPE_DIM + ROPE_DIM, device=device, dtype=torch.bfloat16)
        self.q_rope = query[..., NOPE_DIM:]
        down = torch.randn(tokens, ROW_DIM, device=device, dtype=torch.bfloat16)
        self.latent, self.k_rope = down[:, :LATENT_DIM], down[:, LATENT_DIM:]
        self.positions = 8000 + torch.arange(tokens, device=device)
        # Decode: one block per sequence. Prefill: consecutive tokens fill blocks in random order.
        is_decoding = tokens <= MAX_DECODE_TOKENS
        blocks = 2 * (tokens if is_decoding else -(-tokens // BLOCK_SIZE))
        numbers = torch.arange(tokens, device=device)
        block = torch.randperm(blocks, device=device)[numbers if is_decoding else numbers // BLOCK_SIZE]
        self.slots = block * BLOCK_SIZE + numbers % BLOCK_SIZE
        self.cache = torch.zeros(blocks, BLOCK_SIZE, ROW_DIM, device=device, dtype=getattr(torch, case.dtype))
        self.scale = torch.full((1,), 0.01, device=device) if case.float8 else None


def fused(buffers: Buffers) -> object:
    b = buffers
    return mrrope.mla_rotary_and_cache_(
        b.q_rope, b.k_rope, b.latent, b.positions, TABLE, b.cache, b.slots, layout="thd", scale=b.scale
    )


def scatter(buffers: Buffers) -> None:
    """Join latent and key, and write the rows to their slots."""
    rows, cache = torch.cat([buffers.latent, buffers.k_rope], dim=-1), buffers.cache.view(-1, ROW_DIM)
    if buffers.scale is not None:
        rows = (rows.float() / buffers.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[buffers.slots] = rows


compiled_scatter: Callable[[Buffers], None] = torch.compile(scatter, dynamic=False)


def rotate(buffers: Buffers) -> None:
    mrrope.rotary_(buffers.q_rope, buffers.k_rope[:, None], buffers.positions, TABLE, "thd", "interleaved")


def unfused(buffers: Buffers) -> None:
    rotate(buffers)
    scatter(buffers)


def unfused_compiled(buffers: Buffers) -> None:
    rotate(buffers)
    compiled_scatter(buffers)


CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    "mla_rotary_and_cache_": fused,
    "rotary_, compiled scatter": unfused_compiled,
    "rotary_, scatter": unfused,
}


def relative_error(case: Case, run: Callable[[Buffers], object], device: str) -> float:
    """Relative error of the cached keys against their rotation in float64."""
    buffers = Buffers(Case(min(case.tokens, 1024), case.q_heads, case.dtype), device)
    keys = buffers.k_rope[:, None].double()
    exact, _ = mrrope.rotary(keys, None, buffers.positions, TABLE, "thd", "interleaved")
    run(buffers)
    rows = buffers.cache.view(-1, ROW_DIM).to(torch.float32)[buffers.slots, LATENT_DIM:].double()
    return baseline.relative_error(rows * (1.0 if buffers.scale is None else buffers.scale.double()), exact[:, 0])


BENCHMARK = OpBenchmark(
    name="mla_rotary_and_cache",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
