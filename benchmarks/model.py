"""A Llama-3-8B-shaped model, stock against patched: prefill and decode, eager and compiled, time and memory.

    python benchmarks/model.py [--layers 32] [--compiled-layers 2] [--only REGEX] [--output benchmarks/results/NAME]

Random weights, bfloat16, one GPU. Stock and patched alternate, so that both see the same clocks; prints one table and
writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import mrrope
from mrrope.benchmark import record

Step = Callable[[], Any]
Forward = Callable[..., Any]

RESULTS = Path(__file__).parent / "results"
PREFILL_TOKENS = (8192, 32768)
DECODE_BATCHES = (1, 16, 64)
CONTEXT = 1024
ROUNDS = 7


def llama(layers: int) -> Any:
    """Llama-3-8B with that many layers."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def prefill(model: Any, forward: Forward, tokens: int) -> Step:
    """Reads a text, for the logits of its last token."""
    text = torch.randint(0, 128000, (1, tokens), device="cuda")
    return lambda: forward(model, text, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, forward: Forward, batch: int) -> Step:
    """Reads one token more, with a context in the cache."""
    text = torch.randint(0, 128000, (batch, CONTEXT), device="cuda")
    token = torch.randint(0, 128000, (batch, 1), device="cuda")
    cache = StaticCache(model.config, max_cache_len=CONTEXT + 512)
    model(text, past_key_values=cache, logits_to_keep=1)
    return lambda: forward(model, token, past_key_values=cache, logits_to_keep=1).logits


def seconds(step: Step, repeats: int) -> float:
    """Of one call, by events around several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def compare(model: Any, name: str, make: Callable[[], Step], repeats: int) -> dict[str, Any]:
    """Stock and patched in turns: medians, peak memory, and how far the logits are apart."""
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    memory: dict[str, int] = {}
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        steps = {"stock": make()}
        with mrrope.patched(model, "rope"):
            steps["patched"] = make()

        def run(kind: str) -> None:
            torch.cuda.reset_peak_memory_stats()
            times[kind].append(seconds(steps[kind], repeats))
            memory[kind] = torch.cuda.max_memory_allocated()

        torch.manual_seed(0)
        for turn in range(ROUNDS + 2):
            # Whoever goes second meets a warmer chip.
            for kind in ("stock", "patched") if turn % 2 else ("patched", "stock"):
                with mrrope.patched(model, "rope") if kind == "patched" else contextlib.nullcontext():
                    run(kind)
        torch.manual_seed(1)
        logits["stock"] = make()()
        torch.manual_seed(1)
        with mrrope.patched(model, "rope"):
            logits["patched"] = make()()
    median = {kind: sorted(values[2:])[ROUNDS // 2] for kind, values in times.items()}
    difference = (logits["patched"].float() - logits["stock"].float()).norm() / logits["stock"].float().norm()
    return {
        "name": name,
        "seconds": median,
        "ratio": median["patched"] / median["stock"],
        "peak_bytes": memory,
        "logits_difference": float(difference),
    }


def eager(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As transformers runs it."""
    return model(*args, **kwargs)


compiled: Forward = torch.compile(eager, dynamic=False)


def measure(kind: str, forward: Forward, layers: int, only: str) -> list[dict[str, Any]]:
    """Prefill and decode of a model with that many layers, the rows whose names match ``only``."""
    model = llama(layers)
    steps = {
        f"prefill {tokens}": (functools.partial(prefill, model, forward, tokens), max(1, 16 // layers))
        for tokens in PREFILL_TOKENS
    }
    steps |= {
        f"decode batch {batch}": (functools.partial(decode, model, forward, batch), max(10, 100 // layers))
        for batch in DECODE_BATCHES
    }
    named = {f"{name}, {kind}, {layers} layers": step for name, step in steps.items()}
    wanted = {name: step for name, step in named.items() if re.search(only, name)}
    return [compare(model, name, make, repeats) for name, (make, repeats) in tqdm(wanted.items(), desc=kind)]


def logits_errors(layers: int) -> dict[str, float]:
    """How far the logits of either are from those of the same weights in float32: the noise to judge differences by."""
    model = llama(layers)
    text = torch.randint(0, 128000, (1, 2048), device="cuda")
    with torch.no_grad():
        logits = {"stock": model(text, logits_to_keep=64).logits.float()}
        with mrrope.patched(model, "rope"):
            logits["patched"] = model(text, logits_to_keep=64).logits.float()
        want = model.float()(text, logits_to_keep=64).logits
    return {kind: float((got - want).norm() / want.norm()) for kind, got in logits.items()}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Milliseconds, ratio, gigabytes."""
    print(
        f"\n{'':40}{'stock ms':>12}{'patched ms':>12}{'ratio':>8}{'stock GB':>10}{'patched GB':>12}{'logits off':>12}"
    )
    for row in rows:
        time, peak = row["seconds"], row["peak_bytes"]
        print(
            f"{row['name']:40}{time['stock'] * 1e3:12.3f}{time['patched'] * 1e3:12.3f}{row['ratio']:8.3f}"
            f"{peak['stock'] / 1e9:10.2f}{peak['patched'] / 1e9:12.2f}{row['logits_difference']:12.1e}"
        )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of the patched model as a share of the stock one's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.barh([row["name"] for row in rows], [row["ratio"] for row in rows], color="tab:green")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="time of the patched model / time of stock transformers", title=torch.cuda.get_device_name())
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compiled-layers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="REGEX", help="the rows whose names match")
    parser.add_argument("--output", type=Path, default=RESULTS / "model_cuda", help="where to write, without ending")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: an 8B model's prefill takes too long without one")
    torch._dynamo.config.recompile_limit = 64  # every shape, stock and patched, is a graph of its own
    rows = measure("eager", eager, options.layers, options.only)
    torch.cuda.empty_cache()
    # Compiling takes its time, and all layers are alike: a few will do.
    rows += measure("compiled", compiled, options.compiled_layers, options.only)
    print_rows(rows)
    errors = logits_errors(options.layers)
    print(f"\nlogits off those of float32: stock {errors['stock']:.2e}, patched {errors['patched']:.2e}")
    record.write(options.output.with_suffix(".json"), "cuda", rows, errors=errors)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
