"""A whole model, stock against patched: prefill and decode, eager and compiled, time and memory.

    python benchmarks/model.py [--shape llama3-8b|qwen3-8b|deepseek-v3|gemma3-4b] [--layers N] [--compiled-layers N]
        [--short] [--only REGEX] [--append] [--output benchmarks/results/NAME]

Random weights, bfloat16, one GPU. Eager models are patched in their rotation alone and with fused norms, the default;
compiled ones, and decoding with CUDA graphs, by default only. Timing is interleaved, so that all kinds see the same
clocks. Prints one table and writes NAME.json, after every row, and NAME.png; NAME is that of the shape in
model_shapes.py. --short measures fewer layers and steps; --tiny needs no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, Shape
from tqdm import tqdm
from transformers import StaticCache

import mrrope
from mrrope.benchmark import record
from mrrope.reporting.machine import machine_name

Step = Callable[[], Any]
Forward = Callable[..., Any]

RESULTS = Path(__file__).parent / "results"
ROOM = 512
"""Cache slots for the decoded tokens; writing past a static cache is an error on the device."""
WARM_UP_ROUNDS = 2
PREFILL_ROUNDS = 7
DECODE_ROUNDS = 15
"""More rounds than prefill: a decode step is short and includes host time."""
STOCK, ROTATION, PATCHED = "stock", "rotation alone", "patched"
OPTIONS = {ROTATION: {"fuse_norms": False}, PATCHED: {"fuse_norms": True}}
COLOURS = {ROTATION: "tab:green", PATCHED: "tab:olive"}


def random_tokens(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Return token ids on the model's device."""
    return torch.randint(0, model.config.vocab_size, (batch, tokens), device=model.device)


def prefill(forward: Forward, tokens: int, model: Any) -> Step:
    """Return a step that reads a text, for the logits of its last token."""
    text = random_tokens(model, 1, tokens)
    return lambda: forward(model, text, use_cache=False, logits_to_keep=1).logits


def decode(forward: Forward, batch: int, context: int, model: Any) -> Step:
    """Return a step that reads one more token, with a context in the cache."""
    text, token = random_tokens(model, batch, context), random_tokens(model, batch, 1)
    cache = StaticCache(model.config, max_cache_len=context + ROOM)
    model(text, past_key_values=cache, logits_to_keep=1)
    return lambda: forward(model, token, past_key_values=cache, logits_to_keep=1).logits


def seconds(step: Step, repeats: int) -> float:
    """Time one call by events around several; a call before short ones keeps the launch latency out of the time."""
    if repeats > 1:
        step()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - begin) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def as_kinds(model: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Return a model of each kind; all share their weights."""
    weights = {id(weight): weight for weight in model.parameters()}
    models = {kind: copy.deepcopy(model, dict(weights)) for kind in kinds if kind != STOCK}
    return {STOCK: model} | {kind: mrrope.patch(other, "rope", **OPTIONS[kind]) for kind, other in models.items()}


def compare(
    models: dict[str, Any], name: str, make: Callable[[Any], Step], repeats: int, rounds: int
) -> dict[str, Any]:
    """Time the kinds interleaved: medians, peak memory, and the difference of the logits from the stock model's."""
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
        for i in range(rounds + WARM_UP_ROUNDS):
            # The order rotates and reverses: later kinds meet a warmer chip, and lower clocks follow a hot one.
            order = kinds[i % len(kinds) :] + kinds[: i % len(kinds)]
            for kind in order if i // len(kinds) % 2 else reversed(order):
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                times[kind].append(seconds(steps[kind], repeats))
                memory[kind] = torch.cuda.max_memory_allocated()  # 0 without a GPU
    # The clocks drop as the chip warms, so ratios are taken within a round.
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
    """Call the model."""
    return model(*args, **kwargs)


compiled: Forward = torch.compile(eager, dynamic=False)
graphed: Forward = torch.compile(eager, dynamic=False, mode="reduce-overhead")
MODES = {"eager": eager, "compiled": compiled, "compiled with graphs": graphed}


def measure(
    shape: Shape, device: str, mode: str, kinds: Sequence[str], layers: int, only: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of prefill and decode whose names match ``only``."""
    forward = MODES[mode]
    for_prefill, for_decode = (max(1, 16 // layers), PREFILL_ROUNDS), (min(25, max(5, 50 // layers)), DECODE_ROUNDS)
    assert (for_decode[0] + 1) * (DECODE_ROUNDS + WARM_UP_ROUNDS) + 1 < ROOM
    # CUDA graphs save host time, which the kernels of a prefill hide.
    lengths = () if forward is graphed else shape.prefill_tokens
    steps = {f"prefill {tokens}": (partial(prefill, forward, tokens), *for_prefill) for tokens in lengths}
    steps |= {
        f"decode batch {batch}": (partial(decode, forward, batch, shape.context), *for_decode)
        for batch in shape.decode_batches
    }
    named = {f"{name}, {mode}, {layers} layers": step for name, step in steps.items()}
    wanted = {name: step for name, step in named.items() if re.search(only, name)}
    models = as_kinds(shape.model(layers, device), kinds) if wanted else {}
    for name, how in tqdm(wanted.items(), desc=mode):
        torch._dynamo.reset()  # guards of graphs for other shapes would be evaluated first
        try:
            yield compare(models, name, *how)
        except torch.OutOfMemoryError as error:
            tqdm.write(f"{name} does not fit: {error}")


def logits_errors(shape: Shape, device: str, layers: int) -> dict[str, float]:
    """Return the error of either model's logits against the same weights in float32, to judge differences by."""
    model = shape.model(layers, device)
    text = random_tokens(model, 1, min(2048, 2 * shape.prefill_tokens[0]))
    with torch.no_grad():
        logits = {STOCK: model(text, logits_to_keep=64).logits.float()}
        with mrrope.patched(model, "rope", **OPTIONS[PATCHED]):
            logits[PATCHED] = model(text, logits_to_keep=64).logits.float()
        want = model.float()(text, logits_to_keep=64).logits
    return {kind: float((got - want).norm() / want.norm()) for kind, got in logits.items()}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print milliseconds, gigabytes, ratios."""
    print(f"\n{'':36}" + "".join(f"{kind:>44}" for kind in (STOCK, *OPTIONS)))
    for row in rows:
        cells = []
        for kind, taken in row["seconds"].items():
            beside = f"{row['ratios'][kind]:8.3f}, off {row['logits_differences'][kind]:.1e}" if kind != STOCK else ""
            cells.append(f"{taken * 1e3:10.3f} ms{row['peak_bytes'][kind] / 1e9:7.2f} GB{beside}")
        print(f"{row['name']:36}" + "".join(f"{cell:>44}" for cell in cells))


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the time of the patched model divided by the stock model's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    height = 0.8 / len(OPTIONS)
    for i, kind in enumerate(OPTIONS):
        places = [place + (i - (len(OPTIONS) - 1) / 2) * height for place in range(len(rows))]
        axes.barh(places, [row["ratios"].get(kind, 0) for row in rows], height, color=COLOURS[kind], label=kind)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    figure.legend(loc="outside lower center", ncols=len(OPTIONS))
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="time of the patched model / time of stock transformers", title=title)
    figure.savefig(path, dpi=150)


def with_new_rows(kept: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of an earlier run in their order, with those of the same name replaced, and the new ones."""
    return list(({row["name"]: row for row in kept} | {row["name"]: row for row in measured}).values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="if not given, those of the shape")
    parser.add_argument("--compiled-layers", type=int, help="if not given, a few: all layers are alike")
    parser.add_argument("--only", default="", metavar="REGEX", help="the rows whose names match")
    parser.add_argument("--short", action="store_true", help="fewer layers and steps")
    parser.add_argument("--append", action="store_true", help="keep the other rows of the results file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same kind, to test this script")
    parser.add_argument("--output", type=Path, help="where to write, without ending")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.tiny:
        raise SystemExit("this needs a GPU, or --tiny: the prefill of a whole model takes too long without one")
    device = "cuda" if has_gpu else "cpu"
    shape = SHAPES[options.shape]
    if options.tiny and options.output is None:
        parser.error("--tiny must come with --output: it is no result")
    shape = shape.shrunk() if options.tiny else shape.shortened() if options.short else shape
    eager_layers, compiled_layers = options.layers or shape.layers, options.compiled_layers or shape.compiled_layers
    output = options.output or RESULTS / shape.output
    results = output.with_suffix(".json")
    kept = json.loads(results.read_text())["rows"] if options.append and results.exists() else []
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        # Compiled models run their own norms.
        kinds, layers = ((STOCK, *OPTIONS), eager_layers) if mode == "eager" else ((STOCK, PATCHED), compiled_layers)
        for row in measure(shape, device, mode, kinds, layers, options.only):
            rows.append(row)
            record.write(results, device, with_new_rows(kept, rows))
        torch.cuda.empty_cache()
    print_rows(rows)
    errors = logits_errors(shape, device, eager_layers)
    print(f"\nlogits off those of float32: stock {errors[STOCK]:.2e}, patched {errors[PATCHED]:.2e}")
    all_rows = with_new_rows(kept, rows)
    record.write(results, device, all_rows, errors=errors)
    plot(all_rows, machine_name(device), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
