"""Error of the rotary op by position, and its speed on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mrrope.benchmark import baseline
from mrrope.ops.rotary import rotary
from mrrope.tables.frequency_table import FrequencyTable, frequency_table


def extended_llama(method: str) -> FrequencyTable:
    """A table for Llama-3-8B, extended 16 times from 8192 tokens."""
    return frequency_table(method, rotary_dim=128, base=500_000.0, original_max_position=8192, scale=16.0)


def exact(x: torch.Tensor, positions: torch.Tensor, table: FrequencyTable) -> torch.Tensor:
    """The rotation in float64, with phases of 64-bit integers."""
    phases = baseline.exact_phases(positions, table)
    return baseline.exact_rotary(x.double(), phases.cos(), phases.sin()) * table.attention_factor


def relative_errors() -> list[dict[str, Any]]:
    """Relative errors of the op and of plain PyTorch, by position."""
    table = extended_llama("mrrope_pro")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for end in (8192, 131_072, 16_777_216, 2**31):
        for dtype in (torch.float32, torch.bfloat16):
            positions = torch.arange(end - 64, end)
            q = torch.randn(1, 8, 64, 128, generator=generator).to(dtype)
            want = exact(q, positions, table)
            ours = rotary(q, None, positions, table)[0]
            theirs = baseline.apply(q, *baseline.cos_sin(positions, table, dtype))
            errors = {
                name: baseline.relative_error(got, want) for name, got in (("mrrope", ours), ("plain PyTorch", theirs))
            }
            rows.append({"positions near": end, "dtype": str(dtype).removeprefix("torch."), **errors})
    return rows


def show_errors(rows: list[dict[str, Any]]) -> None:
    """Print the relative errors."""
    print("\nRelative error against float64, by position (plain PyTorch: float32 angles, as in transformers):\n")
    print(f"{'positions near':>16}{'dtype':>10}{'mrrope':>12}{'plain PyTorch':>16}")
    for row in rows:
        print(f"{row['positions near']:>16}{row['dtype']:>10}{row['mrrope']:12.1e}{row['plain PyTorch']:16.1e}")


def milliseconds(function: Callable[[], object], device: str, repeats: int = 9) -> float:
    """Median milliseconds per call, after two warm-up calls."""
    times = []
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[repeats // 2]


def times_of(dtype: torch.dtype, device: str) -> tuple[float, float, float]:
    """Milliseconds of the op, plain PyTorch and a copy."""
    table = extended_llama("mrrope_pro")
    positions = torch.arange(4096, device=device)
    q = torch.randn(1, 32, 4096, 128, device=device).to(dtype)
    k = torch.randn(1, 8, 4096, 128, device=device).to(dtype)
    cos, sin = baseline.cos_sin(positions, table, dtype)
    return (
        milliseconds(lambda: rotary(q, k, positions, table), device),
        milliseconds(lambda: (baseline.apply(q, cos, sin), baseline.apply(k, cos, sin)), device),
        milliseconds(lambda: (q.clone(), k.clone()), device),
    )


def show_speed() -> None:
    """Print the times of the op, plain PyTorch and a copy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"\nMilliseconds to rotate 4096 tokens with 32 query and 8 key heads of 128, on {device}:\n")
    print(f"{'dtype':>10}{'mrrope':>10}{'plain PyTorch':>16}{'copy':>10}")
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs, copy = times_of(dtype, device)
        print(f"{str(dtype).removeprefix('torch.'):>10}{ours:10.2f}{theirs:16.2f}{copy:10.2f}")
