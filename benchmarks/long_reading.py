"""Time and peak memory of a 128K-token prefill in chunks, as in mrrope eval, with a Llama-3-8B-shaped model.

    python benchmarks/long_reading.py [--tokens 131072] [--chunk 8192] [--layers 32] [--scale 16]
        [--output benchmarks/results/long_reading]

Random weights and tokens, bfloat16, one GPU, patched with MrRoPE-Pro. Writes NAME.json.
"""

from __future__ import annotations

import time

import torch
from model_shapes import SHAPES
from op_benchmark import RESULTS, require_gpu, script_parser, write
from tqdm import tqdm

import mrrope
from mrrope.evaluation.perplexity import token_losses


def main() -> None:
    """Measure, print and write."""
    parser = script_parser(__doc__, RESULTS / "long_reading")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per forward pass")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--scale", type=float, default=16.0)
    options = parser.parse_args()
    require_gpu(": an 8B model takes hours without one")
    model = SHAPES["llama3-8b"].model(options.layers)
    weights = torch.cuda.memory_allocated()
    mrrope.patch(model, "mrrope_pro", scale=options.scale, fuse_norms=True)
    tokens = torch.randint(0, 128000, (options.tokens,)).tolist()
    start = time.perf_counter()
    with tqdm(total=options.tokens, unit=" tokens", unit_scale=True) as bar:
        losses = torch.cat(list(token_losses(model, tokens, chunk=options.chunk, progress=bar.update)))
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated()
    name = f"{options.tokens} tokens, {options.layers} layers, chunks of {options.chunk}"
    print(f"{name}: {seconds:.1f} s, weights {weights / 1e9:.1f} GB, peak {peak / 1e9:.1f} GB")
    row = {
        "name": name,
        "seconds": seconds,
        "weights_bytes": weights,
        "peak_bytes": peak,
        "losses_finite": bool(losses.isfinite().all()),
    }
    write(options.output, "cuda", [row])


if __name__ == "__main__":
    main()
