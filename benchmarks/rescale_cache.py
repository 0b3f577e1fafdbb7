"""Speed of turning a cache from one scale to the next, beside a copy of its keys, and of asking where nothing turns.

    python benchmarks/rescale_cache.py [--output benchmarks/results/NAME]

The keys of a Llama-3-8B shape: 32 layers, 8 heads of 128, bfloat16. Times are medians by CUDA-graph replay; prints one
table and writes NAME.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import mrrope
from mrrope.benchmark import record
from mrrope.benchmark.timing import COPY, COPY_BY_KERNEL, Step, interleaved_medians, with_faster_copy
from mrrope.tables import packed_stack

RESULTS = Path(__file__).parent / "results"
LAYERS, HEADS, HEAD_DIM = 32, 8, 128
TOKENS = (1024, 8192, 32768, 131072)


def table(scale: float) -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_pro", rotary_dim=128, base=5e5, original_max_position=8192, scale=scale)


def measure(tokens: int) -> dict[str, Any]:
    """One row: seconds for the copy, the turn and the question, and the error of a turn against float64."""
    device = torch.device("cuda")
    shape = (1, HEADS, tokens, HEAD_DIM)
    keys = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    copies = [torch.empty_like(layer) for layer in keys]
    positions = torch.arange(tokens, device=device)
    stack = packed_stack([table(1.0), table(2.0)], device)
    index = [torch.tensor([i], dtype=torch.int32, device=device) for i in range(2)]

    def rescale(old: int, new: int) -> None:
        torch.ops.mrrope.rescale_cache_.default(keys, positions, stack, index[old], index[new])

    def copy_by_kernel() -> None:
        for source, target in zip(keys, copies, strict=True):
            torch.bitwise_not(source.view(torch.int32), out=target.view(torch.int32))

    def copy() -> None:
        for source, target in zip(keys, copies, strict=True):
            target.copy_(source)

    steps: dict[str, list[Step]] = {
        COPY: [copy],
        COPY_BY_KERNEL: [copy_by_kernel],
        "turn": [lambda: rescale(0, 1), lambda: rescale(1, 0)],
        "nothing to turn": [lambda: rescale(0, 0)] * 20,
    }
    seconds = with_faster_copy(interleaved_medians(steps, "cuda"))
    before = keys[-1].clone()
    rescale(0, 1)
    exact = mrrope.rotary(before.double(), None, positions, table(2.0).relative_to(table(1.0)))[0]
    error = float((keys[-1].double() - exact).norm() / exact.norm())
    size = 2 * LAYERS * HEADS * tokens * HEAD_DIM * 2
    return {"tokens": tokens, "bytes": size, "seconds": seconds, "error": error}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "rescale_cache_cuda", help="where to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    rows = [measure(tokens) for tokens in tqdm(TOKENS, desc="rescale")]
    print(f"\n{'tokens':>8}{'copy us':>12}{'turn us':>12}{'x copy':>8}{'nothing us':>12}{'error':>10}")
    for row in rows:
        copy, turn, nothing = row["seconds"].values()
        print(
            f"{row['tokens']:8}{copy * 1e6:12.1f}{turn * 1e6:12.1f}{turn / copy:8.3f}{nothing * 1e6:12.2f}"
            f"{row['error']:10.1e}"
        )
    record.write(options.output.with_suffix(".json"), "cuda", rows)


if __name__ == "__main__":
    main()
