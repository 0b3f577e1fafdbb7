"""Time and error of re-rotating a cache's keys to another scale, beside a copy of the keys.

    python benchmarks/rescale_cache.py [--output benchmarks/results/NAME]

The keys have a Llama-3-8B shape: 32 layers, 8 heads of 128, bfloat16. "nothing to turn" is a call whose old and new
scale are equal. Prints one table and writes NAME.json.
"""

from __future__ import annotations

from typing import Any

import torch
from op_benchmark import HEAD_DIM, RESULTS, llama_table, require_gpu, script_parser, write
from tqdm import tqdm

import mrrope
from mrrope.benchmark import baseline
from mrrope.benchmark.timing import copy_steps, interleaved_medians, with_faster_copy
from mrrope.tables.frequency_table import packed_stack

LAYERS, HEADS = 32, 8
TOKENS = (1024, 8192, 32768, 131072)
RESCALE, NO_OP = "turn", "nothing to turn"
"""Keys of the results file."""


def measure(tokens: int) -> dict[str, Any]:
    """One row: seconds of the copy, the re-rotation and the no-op, and the error of a re-rotation against float64."""
    device = torch.device("cuda")
    shape = (1, HEADS, tokens, HEAD_DIM)
    keys = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    positions = torch.arange(tokens, device=device)
    tables = [llama_table(scale) for scale in (1.0, 2.0)]
    stack = packed_stack(tables, device)
    index = [torch.tensor([i], dtype=torch.int32, device=device) for i in range(2)]

    def rescale(old: int, new: int) -> None:
        torch.ops.mrrope.rescale_cache_.default(keys, positions, stack, index[old], index[new])

    steps = copy_steps([[(torch.empty_like(layer), layer) for layer in keys]])
    # There and back, so that the keys stay those of the first table.
    steps[RESCALE] = [lambda: rescale(0, 1), lambda: rescale(1, 0)]
    steps[NO_OP] = [lambda: rescale(0, 0)] * 20
    seconds = with_faster_copy(interleaved_medians(steps, "cuda"))
    before = keys[-1].clone()
    rescale(0, 1)
    exact = mrrope.rotary(before.double(), None, positions, tables[1].relative_to(tables[0]))[0]
    error = baseline.relative_error(keys[-1], exact)
    size = 2 * LAYERS * HEADS * tokens * HEAD_DIM * 2
    return {"tokens": tokens, "bytes": size, "seconds": seconds, "error": error}


def main() -> None:
    """Measure, print and write."""
    options = script_parser(__doc__, RESULTS / "rescale_cache_cuda").parse_args()
    require_gpu()
    rows = [measure(tokens) for tokens in tqdm(TOKENS, desc="rescale_cache")]
    print(f"\n{'tokens':>8}{'copy us':>12}{'rescale us':>12}{'x copy':>8}{'no-op us':>12}{'error':>10}")
    for row in rows:
        copy, rescale, no_op = row["seconds"].values()
        print(
            f"{row['tokens']:8}{copy * 1e6:12.1f}{rescale * 1e6:12.1f}{rescale / copy:8.3f}{no_op * 1e6:12.2f}"
            f"{row['error']:10.1e}"
        )
    write(options.output, "cuda", rows)


if __name__ == "__main__":
    main()
