"""A Llama-3-8B-shaped model, stock against patched: prefill and decode, eager and compiled, time and memory.

    python benchmarks/model.py [--layers 32] [--compiled-layers 4] [--only REGEX] [--output benchmarks/results/NAME]

Random weights, bfloat16, one GPU. Eagerly the model is patched in its rotation alone, as it is by default, and with
fuse_projection; compiled, by default, and decoding with CUDA graphs, too. They take turns, so that all see the same
clocks; prints one table and writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
STOCK, ROTATION, PATCHED, PROJECTION = "stock", "rotation alone", "patched", "with fuse_projection"
OPTIONS = {ROTATION: {"fuse_norms": False}, PATCHED: {}, PROJECTION: {"fuse_projection": True}}


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


def prefill(forward: Forward, tokens: int, model: Any) -> Step:
    """Reads a text, for the logits of its last token."""
    text = torch.randint(0, 128000, (1, tokens), device="cuda")
    return lambda: forward(model, text, use_cache=False, logits_to_keep=1).logits


def decode(forward: Forward, batch: int, model: Any) -> Step:
    """Reads one token more, with a context in the cache."""
    text = torch.randint(0, 128000, (batch, CONTEXT), device="cuda")
    token = torch.randint(0, 128000, (batch, 1), device="cuda")
    cache = StaticCache(model.config, max_cache_len=CONTEXT + ROOM)
    model(text, past_key_values=cache, logits_to_keep=1)
    return lambda: forward(model, token, past_key_values=cache, logits_to_keep=1).logits


def seconds(step: Step, repeats: int) -> float:
    """Of one call, by events around several; short ones are begun before, so that the host's start is not counted."""
    if repeats > 1:
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def as_kinds(model: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """A model and others with the same weights, patched."""
    weights = {id(weight): weight for weight in model.parameters()}
    models = {kind: copy.deepcopy(model, dict(weights)) for kind in kinds if kind != STOCK}
    return {STOCK: model} | {kind: mrrope.patch(other, "rope", **OPTIONS[kind]) for kind, other in models.items()}


def compare(
    models: dict[str, Any], name: str, make: Callable[[Any], Step], repeats: int, rounds: int
) -> dict[str, Any]:
    """The kinds in turns: medians, peak memory, and how far the logits are from the stock model's."""
    kinds = (*models,)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    memory: dict[str, int] = {}
    logits: dict[str, torch.Tensor] = {}
    steps: dict[str, Step] = {}
    with torch.no_grad():
        for kind in kinds:
            torch.manual_seed(1)
            steps[kind] = make(models[kind])
            logits[kind] = steps[kind]().float()
        for turn in range(rounds + WARM_UP_ROUNDS):
            # Whoever comes later meets a warmer chip, and whoever follows a hot one a slower.
            in_turn = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]
            for kind in in_turn if turn // len(kinds) % 2 else reversed(in_turn):
                torch.cuda.reset_peak_memory_stats()
                times[kind].append(seconds(steps[kind], repeats))
                memory[kind] = torch.cuda.max_memory_allocated()
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
graphed: Forward = torch.compile(eager, dynamic=False, mode="reduce-overhead")
WAYS = {"eager": eager, "compiled": compiled, "compiled with graphs": graphed}


def measure(way: str, kinds: Sequence[str], layers: int, only: str) -> Iterator[dict[str, Any]]:
    """Prefill and decode of a model with that many layers, the rows whose names match ``only``."""
    forward = WAYS[way]
    models = as_kinds(llama(layers), kinds)
    for_prefill, for_decode = (max(1, 16 // layers), PREFILL_ROUNDS), (min(25, max(5, 50 // layers)), DECODE_ROUNDS)
    assert (for_decode[0] + 1) * (DECODE_ROUNDS + WARM_UP_ROUNDS) + 1 < ROOM
    # Graphs save the host's time, which a text's kernels hide.
    lengths = () if forward is graphed else PREFILL_TOKENS
    steps = {f"prefill {tokens}": (partial(prefill, forward, tokens), *for_prefill) for tokens in lengths}
    steps |= {f"decode batch {batch}": (partial(decode, forward, batch), *for_decode) for batch in DECODE_BATCHES}
    named = {f"{name}, {way}, {layers} layers": step for name, step in steps.items()}
    wanted = {name: step for name, step in named.items() if re.search(only, name)}
    for name, how in tqdm(wanted.items(), desc=way):
        torch._dynamo.reset()  # what other shapes were compiled to would be asked for its guards first
        yield compare(models, name, *how)


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
    parser.add_argument("--compiled-layers", type=int, default=4)
    parser.add_argument("--only", default="", metavar="REGEX", help="the rows whose names match")
    parser.add_argument("--output", type=Path, default=RESULTS / "model_cuda", help="where to write, without ending")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: an 8B model's prefill takes too long without one")
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        # Compiling takes its time, and all layers are alike: a few will do. The norms are the model's own then.
        kinds, layers = (
            ((STOCK, *OPTIONS), options.layers) if way == "eager" else ((STOCK, PATCHED), options.compiled_layers)
        )
        for row in measure(way, kinds, layers, options.only):
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
