"""Speed and error of QK-norm and rotary in one op beside a copy of the same bytes, and norm and rotary apart.

    python benchmarks/qk_norm_rotary.py [--device cuda|cpu] [--no-compile] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json. Times are medians; on a GPU by CUDA-graph replay, over buffers that do not fit
the cache. Rows "with backward" run the op and its gradient, for q, k and the weights; their copy moves as many bytes:
five times q and k, where the op alone moves two.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import rms_norm
from tqdm import tqdm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import mrrope
from mrrope.benchmark import baseline, record
from mrrope.benchmark.timing import COPY, COPY_BY_KERNEL, Step, buffer_sets, interleaved_medians, with_faster_copy

RESULTS = Path(__file__).parent / "results"
TABLE = mrrope.frequency_table("mrrope_pro", rotary_dim=128, base=5e5, original_max_position=8192, scale=16.0)
EPS = 1e-6
HEAD_DIM = 128

Heads = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row: what is normed and rotated."""

    tokens: int
    q_heads: int
    k_heads: int
    over: str
    dtype: str = "bfloat16"
    with_backward: bool = False

    @property
    def bytes(self) -> int:
        """Forwards, q and k are read and written; backwards, they and the gradient are read and theirs is written."""
        size: int = getattr(torch, self.dtype).itemsize
        return (5 if self.with_backward else 2) * self.tokens * (self.q_heads + self.k_heads) * HEAD_DIM * size

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
    """q and k as a model's projections give them: [1, tokens, heads, head_dim]."""

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
        self.copy = torch.empty(case.bytes // 2, device=device, dtype=torch.uint8)
        self.copied = torch.ones_like(self.copy)
        self.positions = torch.arange(case.tokens, device=device)
        self.place_at(0)

    def place_at(self, first: int) -> None:
        """Numbers the tokens from `first` on."""
        self.positions += first - self.positions[0].clone()
        self.cos, self.sin = (x[None] for x in baseline.cos_sin(self.positions, TABLE, self.q.dtype))

    @property
    def leaves(self) -> list[torch.Tensor]:
        weights = (norm.weight for norm in (self.q_norm, self.k_norm))
        return [self.q, self.k, *weights]  # type: ignore[list-item]

    def in_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Heads as the norm takes them: what one mean is taken of is the last dimension."""
        return x if self.over == "head" else x.flatten(-2)


Contender = Callable[[Buffers], Heads]


def copy(buffers: Buffers) -> object:
    return buffers.copy.copy_(buffers.copied)


def copy_by_kernel(buffers: Buffers) -> object:
    return torch.bitwise_not(buffers.copied.view(torch.int32), out=buffers.copy.view(torch.int32))


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


def apart(buffers: Buffers) -> Heads:
    """torch's own norm, then mrrope's rotation."""
    q, k = (
        rms_norm(buffers.in_rows(x), weight.shape, weight, EPS).view_as(x).transpose(1, 2)
        for x, weight in zip(buffers.leaves[:2], buffers.leaves[2:], strict=True)
    )
    # In place is rotary and a copy where gradients are wanted.
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


CONTENDERS: dict[str, Contender] = {
    "mrrope": fused,
    "mrrope in place": fused_in_place,
    "apart": apart,
    "apart, compiled": torch.compile(apart, dynamic=False),
    "transformers": transformers_eager,
    "transformers, compiled": torch.compile(transformers_eager, dynamic=False),
}


def step_of(contender: Contender, buffers: Buffers, with_backward: bool) -> Step:
    if not with_backward:
        return lambda: contender(buffers)
    return lambda: torch.autograd.grad(contender(buffers), buffers.leaves, buffers.gradients)


def relative_error(case: Case, contender: Contender, device: str) -> float:
    """Of q, against float64 with exact phases, over the last tokens of the case."""
    buffers = Buffers(Case(min(case.tokens, 256), case.q_heads, case.k_heads, case.over, case.dtype), device)
    buffers.place_at(case.tokens - buffers.positions.numel())
    rows, weight = buffers.in_rows(buffers.q.double()), buffers.q_norm.weight
    assert isinstance(weight, torch.Tensor)
    normed = rms_norm(rows, weight.shape, weight.double(), EPS).view_as(buffers.q).transpose(1, 2)
    phases = (buffers.positions[:, None] * TABLE.turns.to(device)).double() * (math.tau / 2**64)
    phases = torch.cat([phases, phases], dim=-1)
    want = baseline.apply(normed, phases.cos(), phases.sin()) * TABLE.attention_factor
    return float((contender(buffers)[0].double() - want).norm() / want.norm())


def measure(device: str, names: list[str]) -> list[dict[str, Any]]:
    """A row for every case: seconds and errors by contender."""
    rows: list[dict[str, Any]] = []
    cases = CASES[device]
    with tqdm(total=len(cases), desc="qk norm", unit="row") as progress:
        for case in cases:
            sets = [Buffers(case, device) for _ in range(buffer_sets(case.bytes, device))]
            torch.compiler.reset()  # every case is compiled for its own shape
            progress.set_postfix_str(case.name)
            copies = {COPY: copy, COPY_BY_KERNEL: copy_by_kernel}
            # In place is for inference.
            taking = [name for name in names if not (case.with_backward and name == "mrrope in place")]
            steps: dict[str, list[Step]] = {
                name: [functools.partial(one, buffers) for buffers in sets] for name, one in copies.items()
            }
            for name in taking:
                steps[name] = [step_of(CONTENDERS[name], buffers, case.with_backward) for buffers in sets]
            errors = {}
            with torch.set_grad_enabled(case.with_backward):
                seconds = with_faster_copy(interleaved_medians(steps, device))
                if not case.with_backward:
                    errors = {name: relative_error(case, CONTENDERS[name], device) for name in taking}
            progress.update()
            rows.append({**asdict(case), "name": case.name, "bytes": case.bytes, "seconds": seconds, "errors": errors})
    return rows


def print_rows(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Microseconds, the ratio to the copy, and the error, by contender."""
    width = max(len(row["name"]) for row in rows)
    print(f"\n{'':>{width}}{'copy':>12}" + "".join(f"{name:>30}" for name in names))
    print(f"{'tokens x heads':>{width}}{'us':>12}" + "".join(f"{'us  x copy     error':>30}" for _ in names))
    for row in rows:
        seconds, errors = row["seconds"], row["errors"]
        cells = [f"{seconds['copy'] * 1e6:12.2f}"]
        for name in names:
            error = f"{errors[name]:.1e}" if name in errors else ""
            time = f"{seconds[name] * 1e6:.2f}{seconds[name] / seconds['copy']:8.2f}" if name in seconds else ""
            cells.append(f"{time:>20}{error:>10}")
        print(f"{row['name']:>{width}}" + "".join(cells))


def main() -> None:
    """Measures, prints, writes."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(CASES), default=default)
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile makes")
    parser.add_argument("--output", type=Path, help="where to write, without ending")
    options = parser.parse_args()
    output = options.output or RESULTS / f"qk_norm_rotary_{options.device}"
    names = [name for name in CONTENDERS if not (options.no_compile and "compiled" in name)]

    rows = measure(options.device, names)
    print_rows(rows, names)
    written = record.write(output.with_suffix(".json"), options.device, rows)
    print(f"\n{written['machine']}; written to {output}.json")


if __name__ == "__main__":
    main()
