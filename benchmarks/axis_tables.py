"""Time and error of the rotation by several positions per token, beside a copy of the same bytes and peers.

    python benchmarks/axis_tables.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

Heads of 128, bfloat16, [1, tokens, heads, 128]: M-RoPE of Qwen2-VL-7B and the image and video axes of Flux and Wan.
The contenders in PyTorch get the cosines and sines of all tokens in float32, and Liger, where it is installed, those of
every axis in bfloat16, computed before: only mrrope is timed with them. Prints one table and writes NAME.json.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from op_benchmark import HEAD_DIM, OpBenchmark

import mrrope
from mrrope.benchmark import baseline

MODELS = ("Qwen2-VL", "Flux", "Wan")
SECTIONS = (16, 24, 24)  # of Qwen2-VL
AXIS_DIMS = {"Flux": (16, 56, 56), "Wan": (44, 42, 42)}
HEADS = {"Qwen2-VL": (28, 4), "Flux": (24, 24), "Wan": (40, 40)}
IMAGE_SIDE = 32
FIRST_POSITION = 8000

Rotated = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    tokens: int

    with_backward = False

    @property
    def passes(self) -> list[int]:
        """q and k are read and written."""
        return [2 * self.tokens * sum(HEADS[self.model]) * HEAD_DIM * torch.bfloat16.itemsize]

    @property
    def pairing(self) -> str:
        return "halves" if self.model == "Qwen2-VL" else "interleaved"

    @property
    def name(self) -> str:
        q_heads, k_heads = HEADS[self.model]
        return f"{self.model}, {self.tokens} x {q_heads}/{k_heads}"


CASES = {
    "cuda": [
        *(Case("Qwen2-VL", tokens) for tokens in (1, 16, 64, 256, 1024, 8192, 131072)),
        Case("Flux", 4608),  # an image of 1024 x 1024 and 512 tokens of text
        Case("Wan", 32760),  # 81 frames of 480 x 832
    ],
    "cpu": [Case(model, 256) for model in MODELS],
}


@functools.cache
def tables_of(model: str) -> mrrope.AxisTables:
    """The model's tables, without an attention factor: heads that are rotated over and over must not grow."""
    if model == "Qwen2-VL":
        text = mrrope.frequency_table("rope", rotary_dim=HEAD_DIM, base=1e6, original_max_position=32768)
        return mrrope.AxisTables.of_sections(text, SECTIONS)
    return mrrope.AxisTables(
        mrrope.frequency_table("rope", rotary_dim=dim, base=1e4, original_max_position=4096) for dim in AXIS_DIMS[model]
    )


class Positions:
    """Frames, rows and columns [3, 1, tokens], and the cosines and sines of the contenders."""

    def __init__(self, case: Case, device: str) -> None:
        numbers = torch.arange(case.tokens, device=device)
        frames, rows, columns = numbers // IMAGE_SIDE**2, numbers // IMAGE_SIDE % IMAGE_SIDE, numbers % IMAGE_SIDE
        first = FIRST_POSITION if case.model == "Qwen2-VL" else 0
        self.positions = first + torch.stack([frames, rows, columns])[:, None]
        tables = tables_of(case.model)
        self.inv_freq = tables.inv_freq.to(device)
        of_pairs = self.positions[list(tables.axis_of_pair), 0].T
        self.angles = (of_pairs.double() * self.inv_freq)[:, None]
        """[tokens, 1, pairs], the same for all heads."""
        self.cos, self.sin = self.angles.cos().float(), self.angles.sin().float()

    @functools.cached_property
    def cos_sin_of_axes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For Liger: [3, 1, tokens, 128] each, both halves, of which it takes the sections."""
        angles = self.positions.double()[..., None] * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().bfloat16(), angles.sin().bfloat16()


@functools.lru_cache(maxsize=1)
def shared_positions(case: Case, device: str) -> Positions:
    """One for all buffers: the layers of a model share them."""
    return Positions(case, device)


class Buffers:
    """q and k."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.shared = case, shared_positions(case, device)
        self.q, self.k = (
            torch.randn(1, case.tokens, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
            for heads in HEADS[case.model]
        )


def ours(buffers: Buffers) -> Any:
    b = buffers
    return mrrope.rotary(b.q, b.k, b.shared.positions, tables_of(b.case.model), "bshd", b.case.pairing)


def ours_in_place(buffers: Buffers) -> Any:
    b = buffers
    mrrope.rotary_(b.q, b.k, b.shared.positions, tables_of(b.case.model), "bshd", b.case.pairing)
    return b.q, b.k


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str) -> Rotated:
    """In float32, as the models of diffusers have it."""
    in_float = (baseline.exact_rotary(x.float(), cos, sin, pairing) for x in (q, k))
    q, k = (x.bfloat16() for x in in_float)
    return q, k


compiled_rotated: Callable[..., Rotated] = torch.compile(rotated, dynamic=False)


def eager(buffers: Buffers) -> Rotated:
    b = buffers
    return rotated(b.q, b.k, b.shared.cos, b.shared.sin, b.case.pairing)


def compiled(buffers: Buffers) -> Rotated:
    b = buffers
    return compiled_rotated(b.q, b.k, b.shared.cos, b.shared.sin, b.case.pairing)


@functools.cache
def liger_op() -> Callable[..., Any] | None:
    """Liger's M-RoPE, or None where it is not installed or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        found: Callable[..., Any] = importlib.import_module("liger_kernel.ops.qwen2vl_mrope").qwen2vl_mrope_forward
    except ImportError:
        return None
    return found


def liger(buffers: Buffers) -> Rotated:
    """In place."""
    op = liger_op()
    assert op is not None
    op(buffers.q.transpose(1, 2), buffers.k.transpose(1, 2), *buffers.shared.cos_sin_of_axes, SECTIONS)
    return buffers.q, buffers.k


LIGER = "liger_kernel"


def takes(case: Case, name: str) -> bool:
    return name != LIGER or (case.model == "Qwen2-VL" and liger_op() is not None)


def relative_error(case: Case, run: Callable[[Buffers], Rotated], device: str) -> float:
    """Relative error of q against its rotation in float64."""
    buffers = Buffers(Case(case.model, min(case.tokens, 1024)), device)
    angles = buffers.shared.angles
    exact = baseline.exact_rotary(buffers.q.double(), angles.cos(), angles.sin(), case.pairing)
    return baseline.relative_error(run(buffers)[0], exact)


BENCHMARK = OpBenchmark(
    name="axis_tables",
    cases=CASES,
    make_buffers=Buffers,
    contenders={
        "mrrope in place": ours_in_place,
        "mrrope": ours,
        LIGER: liger,
        "compiled": compiled,
        "eager": eager,
    },
    relative_error=relative_error,
    takes=takes,
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
