"""How long a Llama-3-8B-shaped model takes to read 128K tokens as mrrope eval reads them, and how much memory.

    python studies/long_reading.py [--tokens 131072] [--chunk 8192] [--layers 32] [--scale 16]
        [--output benchmarks/results/long_reading]

Random weights and random tokens, bfloat16, one GPU; patched with MrRoPE-Pro. It writes NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import mrrope
from mrrope.benchmark import record
from mrrope.evaluation.perplexity import token_losses

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from model import llama

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def main() -> None:
    """Reads, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens read at a time")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--scale", type=float, default=16.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "long_reading", help="where to write, without ending")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: an 8B model would read for hours without one")
    model = llama(options.layers)
    weights = torch.cuda.memory_allocated()
    mrrope.patch(model, "mrrope_pro", scale=options.scale)
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
    record.write(options.output.with_suffix(".json"), "cuda", [row])


if __name__ == "__main__":
    main()
