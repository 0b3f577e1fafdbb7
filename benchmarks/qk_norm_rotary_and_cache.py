"""Time and error of norms, rotation and cache write in one launch, beside a copy of the same bytes and the unfused ops.

    python benchmarks/qk_norm_rotary_and_cache.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

q, k and v, and the gate where there is one, are views of one packed projection, bfloat16. Up to 256 tokens are a decode
step, one token per sequence; more are the prefill of one sequence. FlashInfer, where it is installed, takes part in the
rows of shapes that it has kernels for. Prints one table and writes NAME.json.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer_pages import Pages, flashinfer_rope
from op_benchmark import OpBenchmark
from torch.nn.functional import rms_norm

import mrrope
from mrrope.benchmark import baseline

EPS = 1e-6
BLOCK_SIZE = 16
MAX_DECODE_TOKENS = 256
FIRST_POSITION = 8000
TOKENS = {"cuda": (1, 16, 64, 256, 1024, 8192, 131072), "cpu": (1, 64)}


@dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    weight_offset: float = 0.0
    has_gate: bool = False
    has_norms: bool = True
    over: str = "head"
    """What a norm is over."""

    @property
    def weight_sizes(self) -> tuple[int, int]:
        """Of q's and k's weights."""
        if self.over == "head":
            return self.head_dim, self.head_dim
        return self.q_heads * self.head_dim, self.kv_heads * self.head_dim

    def __str__(self) -> str:
        gate = " gate" if self.has_gate else ""
        norms = (" all heads" if self.over == "all_heads" else "") if self.has_norms else " no norms"
        return f"{self.q_heads}/{self.kv_heads} x {self.head_dim}{gate}{norms}"


QWEN3 = Shape(32, 8, 128, 128)  # Qwen3-8B
QWEN3_NEXT = Shape(16, 2, 256, 64, weight_offset=1.0, has_gate=True)  # Qwen3-Next-80B-A3B
QWEN3_32B = Shape(64, 8, 128, 128)
OLMO2 = Shape(32, 32, 128, 128, over="all_heads")  # OLMo-2-7B
LLAMA = Shape(32, 8, 128, 128, has_norms=False)  # Llama-3-8B


@dataclass(frozen=True)
class Case:
    """One row."""

    tokens: int
    shape: Shape
    cache: str
    """Dtype of the cache."""
    q: str
    """Dtype of the rotated q; float8 with a computed scale per token and head, without norms with a given one."""

    with_backward = False

    @property
    def passes(self) -> list[int]:
        """q and gate are read and written, k and v are read and their cache entries written."""
        s = self.shape
        q_size, cache_size = (getattr(torch, name).itemsize for name in (self.q, self.cache))
        per_component: int = (2 + q_size) * s.q_heads + 2 * (2 + cache_size) * s.kv_heads + 4 * s.q_heads * s.has_gate
        scales = 4 * self.tokens * s.q_heads * (self.float8_q and s.has_norms)
        return [self.tokens * s.head_dim * per_component + scales]

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
            (OLMO2, "bfloat16", "bfloat16"),
        )
        for tokens in TOKENS[device]
    ]
    for device in TOKENS
}
CASES["cuda"] += [
    *(Case(tokens, QWEN3, "float8_e5m2", "bfloat16") for tokens in (1, 64, 8192)),
    *(Case(tokens, OLMO2, "float8_e4m3fn", "bfloat16") for tokens in (1, 64, 8192)),
]
CASES["cuda"] += [
    Case(tokens, shape, cache, cache)
    for shape, cache in (
        (QWEN3_32B, "bfloat16"),
        (QWEN3_32B, "float8_e4m3fn"),
        (LLAMA, "float8_e4m3fn"),
    )
    for tokens in (1, 64, 256, 8192)
]


@functools.cache
def table_of(rotary_dim: int, device: str) -> mrrope.FrequencyTable:
    """One for all buffers, on the device: a first use would copy it, which no capture takes."""
    # Attention factor 1: q is rotated in place over and over and must not grow.
    return mrrope.frequency_table(
        "mrrope_pro", rotary_dim=rotary_dim, base=1e6, original_max_position=32768, scale=4.0, attention_factor=1.0
    ).to(device)


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
        self.case, self.shape, self.packed, self.q = case, s, packed, q_and_gate[..., : s.head_dim]
        self.gate = q_and_gate[..., s.head_dim :] if s.has_gate else None
        self.k, self.v = (x.view(tokens, s.kv_heads, -1) for x in (k, v))
        self.q_weight, self.k_weight = (
            (1.0 - s.weight_offset + 0.1 * torch.randn(size, device=device)).bfloat16() for size in s.weight_sizes
        )
        self.table = table_of(s.rotary_dim, device)
        is_decoding = tokens <= MAX_DECODE_TOKENS
        numbers = torch.arange(tokens, device=device)
        self.positions = FIRST_POSITION + numbers
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
        self.q_out, self.q_scale, self.q_scale_out = None, None, None
        if case.float8_q:
            self.q_out = torch.empty(self.q.shape, device=device, dtype=getattr(torch, case.q))
            if s.has_norms:
                self.q_scale_out = torch.empty(self.q.shape[:-1], device=device)
            else:
                self.q_scale = self.scale
        self.pages: Pages | None = None
        if takes(case, FLASHINFER):
            self.pages = Pages(self.table, self.positions, self.block, BLOCK_SIZE, is_decoding=is_decoding)
            # Its norm kernels take weights in float32.
            self.float_weights = {"q_norm_weight": self.q_weight.float(), "k_norm_weight": self.k_weight.float()}
            self.inverse_scale = 1.0 if self.scale is None else 1.0 / float(self.scale)

    @property
    def norm(self) -> dict[str, Any]:
        return {"eps": EPS, "weight_offset": self.shape.weight_offset, "over": self.shape.over}


def fused(buffers: Buffers) -> object:
    b = buffers
    q_weight, k_weight = (b.q_weight, b.k_weight) if b.shape.has_norms else (None, None)
    return mrrope.qk_norm_rotary_and_cache_(
        b.q, b.k, b.v, q_weight, k_weight, b.positions, b.table, b.key_cache, b.value_cache, b.slots,
        **b.norm, layout="thd", key_scale=b.scale, value_scale=b.scale,
        q_out=b.q_out, q_scale=b.q_scale, q_scale_out=b.q_scale_out, gate=b.gate,
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


FLASHINFER_OPS = (
    "rope_quantize_fp8_append_paged_kv_cache",
    "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache",
    "cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache",
)


def flashinfer(buffers: Buffers) -> object:
    ops, b, p = flashinfer_rope(FLASHINFER_OPS), buffers, buffers.pages
    assert p is not None
    caches = (b.key_cache, b.value_cache)
    if not b.shape.has_norms:
        return ops.rope_quantize_fp8_append_paged_kv_cache(
            b.q, b.k, None, None, b.v, p.cos_sin, p.positions, caches, p.flat_table, p.flat_starts, p.sequence,
            p.positions, page_size=BLOCK_SIZE, quant_scale_q=b.inverse_scale, quant_scale_kv=b.inverse_scale,
            q_rope_out=b.q_out, enable_pdl=True,
        )  # fmt: skip
    common = (b.packed, p.cos_sin, p.lengths, p.starts, p.table)
    norm_before_rotation = 2
    if b.q_out is None:
        return ops.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache(
            *common, *caches, num_q_heads=b.shape.q_heads, num_kv_heads=b.shape.kv_heads, eps=EPS,
            qk_norm_policy=norm_before_rotation, **b.float_weights, clear_unused_last_page_rows=False,
        )  # fmt: skip
    computed_q_scale, is_prefill = 1, False  # which is about the order of the scales only
    return ops.cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache(
        *common, caches, is_prefill, b.scale, b.scale, computed_q_scale,
        qk_norm_policy=norm_before_rotation, **b.float_weights, out_q=b.q_out, q_scale=b.q_scale_out,
    )  # fmt: skip


OURS = "qk_norm_rotary_and_cache_"
NORMS_THEN_CACHE = "compiled norms, rotary_and_cache_"
FLASHINFER = "flashinfer"
CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    OURS: fused,
    "qk_norm_rotary_, compiled rest": norm_then_finish,
    NORMS_THEN_CACHE: norms_then_rotary_and_cache,
    FLASHINFER: flashinfer,
}


def takes(case: Case, name: str) -> bool:
    if name == FLASHINFER:
        return case.shape in (QWEN3_32B, LLAMA) and flashinfer_rope(FLASHINFER_OPS) is not None
    if name == OURS:
        return True
    # The unfused ops, which are compiled for every row, in some rows. NORMS_THEN_CACHE has norms per head only and does
    # not quantize q.
    is_shown = case.shape in (QWEN3, QWEN3_NEXT, OLMO2) and case.tokens in (64, 8192) and case.cache != "float8_e5m2"
    return is_shown and not (name == NORMS_THEN_CACHE and (case.float8_q or case.shape == OLMO2))


def relative_error(case: Case, run: Callable[[Buffers], object], device: str) -> float:
    """Relative error of the cached keys against their norm and rotation in float64, over the last 256 tokens."""
    buffers = Buffers(case, device)
    last = slice(-256, None)
    k, positions = buffers.k[last].double(), buffers.positions[last]
    if not buffers.shape.has_norms:
        exact, _ = mrrope.rotary(k, None, positions, buffers.table, "thd")
    else:
        exact, _ = mrrope.qk_norm_rotary(
            k, None, buffers.k_weight.double(), None, positions, buffers.table, **buffers.norm, layout="thd"
        )
    run(buffers)
    rows = buffers.key_cache[buffers.block[last], buffers.offset[last]].to(torch.float32).double()
    return baseline.relative_error(rows * (1.0 if buffers.scale is None else buffers.scale.double()), exact)


BENCHMARK = OpBenchmark(
    name="qk_norm_rotary_and_cache",
    cases=CASES,
    make_buffers=Buffers,
    contenders=CONTENDERS,
    relative_error=relative_error,
    takes=takes,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
