"""A Llama-3-8B-shaped model, stock against patched: prefill and decode, eager and compiled, time and memory.

    python benchmarks/model.py [--layers 32] [--compiled-layers 2] [--only REGEX] [--output benchmarks/results/NAME]

Random weights, bfloat16, one GPU. Patched is so by itself, with fuse_projection, and eagerly with fuse_norms as well.
They take turns, so that all see the same clocks; prints one table and writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import statistics
from collections.abc import Callable, Iterator
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
ROOM = 512
"""For the tokens that are decoded; a cache that is full stops the GPU."""
WARM_UP_ROUNDS = 2
PREFILL_ROUNDS = 7
DECODE_ROUNDS = 15
"""More, since a step is short and the host's time is part of it."""
STOCK, PATCHED, FUSED, ALL_FUSED = "stock", "patched", "with fuse_projection", "and fuse_norms"
OPTIONS = {PATCHED: {}, FUSED: {"fuse_projection": True}, ALL_FUSED: {"fuse_projection": True, "fuse_norms": True}}


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
    cache = StaticCache(model.config, max_cache_len=CONTEXT + ROOM)
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


def patched_as(kind: str, model: Any) -> contextlib.AbstractContextManager[Any]:
    """The model as one of the kinds has it."""
    if kind == STOCK:
        return contextlib.nullcontext()
    return mrrope.patched(model, "rope", **OPTIONS[kind])


def compare(
    model: Any, name: str, kinds: tuple[str, ...], make: Callable[[], Step], repeats: int, rounds: int
) -> dict[str, Any]:
    """The kinds in turns: medians, peak memory, and how far the logits are from the stock model's."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    memory: dict[str, int] = {}
    logits: dict[str, torch.Tensor] = {}
    steps: dict[str, Step] = {}
    with torch.no_grad():
        for kind in kinds:
            with patched_as(kind, model):
                steps[kind] = make()
        for turn in range(rounds + WARM_UP_ROUNDS):
            # Whoever comes later meets a warmer chip, and whoever follows a hot one a slower.
            in_turn = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]
            for kind in in_turn if turn // len(kinds) % 2 else reversed(in_turn):
                with patched_as(kind, model):
                    torch.cuda.reset_peak_memory_stats()
                    times[kind].append(seconds(steps[kind], repeats))
                    memory[kind] = torch.cuda.max_memory_allocated()
        for kind in kinds:
            torch.manual_seed(1)
            with patched_as(kind, model):
                logits[kind] = make()().float()
    # The chip slows down as it warms: only those of one round can be compared.
    ratios = {kind: [a / b for a, b in zip(times[kind], times[STOCK], strict=True)] for kind in kinds[1:]}
    return {
        "name": name,
        "seconds": {kind: statistics.median(values[WARM_UP_ROUNDS:]) for kind, values in times.items()},
        "ratios": {kind: statistics.median(values[WARM_UP_ROUNDS:]) for kind, values in ratios.items()},
        "peak_bytes": memory,
        "logits_differences": {
            kind: float((logits[kind] - logits[STOCK]).norm() / logits[STOCK].norm()) for kind in kinds[1:]
        },
    }


def eager(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As transformers runs it."""
    return model(*args, **kwargs)


compiled: Forward = torch.compile(eager, dynamic=False)


def measure(kind: str, forward: Forward, kinds: tuple[str, ...], layers: int, only: str) -> Iterator[dict[str, Any]]:
    """Prefill and decode of a model with that many layers, the rows whose names match ``only``."""
    model = llama(layers)
    for_prefill, for_decode = (max(1, 16 // layers), PREFILL_ROUNDS), (min(25, max(5, 50 // layers)), DECODE_ROUNDS)
    assert for_decode[0] * (DECODE_ROUNDS + WARM_UP_ROUNDS) < ROOM
    steps = {
        f"prefill {tokens}": (functools.partial(prefill, model, forward, tokens), *for_prefill)
        for tokens in PREFILL_TOKENS
    }
    steps |= {
        f"decode batch {batch}": (functools.partial(decode, model, forward, batch), *for_decode)
        for batch in DECODE_BATCHES
    }
    named = {f"{name}, {kind}, {layers} layers": step for name, step in steps.items()}
    wanted = {name: step for name, step in named.items() if re.search(only, name)}
    for name, how in tqdm(wanted.items(), desc=kind):
        yield compare(model, name, kinds, *how)


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
    """Milliseconds, gigabytes, ratios."""
    print(f"\n{'':36}" + "".join(f"{kind:>44}" for kind in (STOCK, *OPTIONS)))
    for row in rows:
        cells = []
        for kind, time in row["seconds"].items():
            beside = f"{row['ratios'][kind]:8.3f}, off {row['logits_differences'][kind]:.1e}" if kind != STOCK else ""
            cells.append(f"{time * 1e3:10.3f} ms{row['peak_bytes'][kind] / 1e9:7.2f} GB{beside}")
        print(f"{row['name']:36}" + "".join(f"{cell:>44}" for cell in cells))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of the patched model as a share of the stock one's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    height = 0.8 / len(OPTIONS)
    for i, (kind, colour) in enumerate(zip(OPTIONS, ("tab:green", "tab:olive", "tab:brown"), strict=True)):
        places = [place + (i - 1) * height for place in range(len(rows))]
        axes.barh(places, [row["ratios"].get(kind, 0) for row in rows], height, color=colour, label=kind)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    figure.legend(loc="outside lower center", ncols=len(OPTIONS))
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
    rows: list[dict[str, Any]] = []
    for measured in (
        measure("eager", eager, (STOCK, *OPTIONS), options.layers, options.only),
        # Compiling takes its time, and all layers are alike: a few will do.
        measure("compiled", compiled, (STOCK, PATCHED), options.compiled_layers, options.only),
    ):
        for row in measured:
            rows.append(row)
            record.write(options.output.with_suffix(".json"), "cuda", rows)
        torch.cuda.empty_cache()
    print_rows(rows)
    errors = logits_errors(options.layers)
    print(f"\nlogits off those of float32: stock {errors['stock']:.2e}, patched {errors['patched']:.2e}")
    record.write(options.output.with_suffix(".json"), "cuda", rows, errors=errors)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
