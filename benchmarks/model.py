"""An 8B-shaped model, stock against patched: prefill and decode, eager and compiled, time and memory.

    python benchmarks/model.py [--shape llama3-8b|qwen3-8b] [--layers N] [--compiled-layers 4] [--only REGEX]
        [--output benchmarks/results/NAME]

Random weights, bfloat16, one GPU. Eager models are patched in their rotation alone and with fused norms, the default;
compiled ones, and decoding with CUDA graphs, by default only. Timing is interleaved, so that all kinds see the same
clocks. Prints one table and writes NAME.json and NAME.png; NAME is model_cuda for Llama-3-8B, model_qwen3_cuda for
Qwen3-8B.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

import mrrope
from mrrope.benchmark import record

Step = Callable[[], Any]
Forward = Callable[..., Any]

RESULTS = Path(__file__).parent / "results"
PREFILL_TOKENS = (8192, 32768)
DECODE_BATCHES = (1, 16, 64)
CONTEXT = 1024
ROOM = 512
"""Cache slots for the decoded tokens; writing past a static cache is an error on the device."""
WARM_UP_ROUNDS = 2
PREFILL_ROUNDS = 7
DECODE_ROUNDS = 15
"""More rounds than prefill: a decode step is short and includes host time."""
STOCK, ROTATION, PATCHED = "stock", "rotation alone", "patched"
OPTIONS = {ROTATION: {"fuse_norms": False}, PATCHED: {}}
COLOURS = {ROTATION: "tab:green", PATCHED: "tab:olive"}


@dataclass(frozen=True)
class Shape:
    """The shape of a published model."""

    model_class: Any
    config_class: Any
    config: dict[str, Any]
    layers: int
    output: str

    def model(self, layers: int) -> Any:
        """Return a model of this shape with random weights."""
        config = self.config_class(**self.config, num_hidden_layers=layers)
        with torch.device("cuda"):
            return self.model_class._from_config(config, dtype=torch.bfloat16).eval()


SHAPES = {
    "llama3-8b": Shape(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
        layers=32,
        output="model_cuda",
    ),
    "qwen3-8b": Shape(
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        layers=36,
        output="model_qwen3_cuda",
    ),
}


def llama(layers: int) -> Any:
    """Return a model of the shape of Llama-3-8B."""
    return SHAPES["llama3-8b"].model(layers)


def random_tokens(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Return token ids on the GPU."""
    return torch.randint(0, model.config.vocab_size, (batch, tokens), device="cuda")


def prefill(forward: Forward, tokens: int, model: Any) -> Step:
    """Return a step that reads a text, for the logits of its last token."""
    text = random_tokens(model, 1, tokens)
    return lambda: forward(model, text, use_cache=False, logits_to_keep=1).logits


def decode(forward: Forward, batch: int, model: Any) -> Step:
    """Return a step that reads one more token, with a context in the cache."""
    text, token = random_tokens(model, batch, CONTEXT), random_tokens(model, batch, 1)
    cache = StaticCache(model.config, max_cache_len=CONTEXT + ROOM)
    model(text, past_key_values=cache, logits_to_keep=1)
    return lambda: forward(model, token, past_key_values=cache, logits_to_keep=1).logits


def seconds(step: Step, repeats: int) -> float:
    """Time one call by events around several; a call before short ones keeps the launch latency out of the time."""
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
                torch.cuda.reset_peak_memory_stats()
                times[kind].append(seconds(steps[kind], repeats))
                memory[kind] = torch.cuda.max_memory_allocated()
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


def measure(shape: Shape, mode: str, kinds: Sequence[str], layers: int, only: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of prefill and decode whose names match ``only``."""
    forward = MODES[mode]
    models = as_kinds(shape.model(layers), kinds)
    for_prefill, for_decode = (max(1, 16 // layers), PREFILL_ROUNDS), (min(25, max(5, 50 // layers)), DECODE_ROUNDS)
    assert (for_decode[0] + 1) * (DECODE_ROUNDS + WARM_UP_ROUNDS) + 1 < ROOM
    # CUDA graphs save host time, which the kernels of a prefill hide.
    lengths = () if forward is graphed else PREFILL_TOKENS
    steps = {f"prefill {tokens}": (partial(prefill, forward, tokens), *for_prefill) for tokens in lengths}
    steps |= {f"decode batch {batch}": (partial(decode, forward, batch), *for_decode) for batch in DECODE_BATCHES}
    named = {f"{name}, {mode}, {layers} layers": step for name, step in steps.items()}
    wanted = {name: step for name, step in named.items() if re.search(only, name)}
    for name, how in tqdm(wanted.items(), desc=mode):
        torch._dynamo.reset()  # guards of graphs for other shapes would be evaluated first
        yield compare(models, name, *how)


def logits_errors(shape: Shape, layers: int) -> dict[str, float]:
    """Return the error of either model's logits against the same weights in float32, to judge differences by."""
    model = shape.model(layers)
    text = random_tokens(model, 1, 2048)
    with torch.no_grad():
        logits = {STOCK: model(text, logits_to_keep=64).logits.float()}
        with mrrope.patched(model, "rope"):
            logits[PATCHED] = model(text, logits_to_keep=64).logits.float()
        want = model.float()(text, logits_to_keep=64).logits
    return {kind: float((got - want).norm() / want.norm()) for kind, got in logits.items()}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print milliseconds, gigabytes, ratios."""
    print(f"\n{'':36}" + "".join(f"{kind:>44}" for kind in (STOCK, *OPTIONS)))
    for row in rows:
        cells = []
        for kind, time in row["seconds"].items():
            beside = f"{row['ratios'][kind]:8.3f}, off {row['logits_differences'][kind]:.1e}" if kind != STOCK else ""
            cells.append(f"{time * 1e3:10.3f} ms{row['peak_bytes'][kind] / 1e9:7.2f} GB{beside}")
        print(f"{row['name']:36}" + "".join(f"{cell:>44}" for cell in cells))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
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
    axes.set(xlabel="time of the patched model / time of stock transformers", title=torch.cuda.get_device_name())
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="if not given, those of the shape")
    parser.add_argument("--compiled-layers", type=int, default=4)
    parser.add_argument("--only", default="", metavar="REGEX", help="the rows whose names match")
    parser.add_argument("--output", type=Path, help="where to write, without ending")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: an 8B model's prefill takes too long without one")
    shape = SHAPES[options.shape]
    eager_layers = options.layers or shape.layers
    output = options.output or RESULTS / shape.output
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        # All layers are alike, so a few are enough to compile. Compiled models run their own norms.
        kinds, layers = (
            ((STOCK, *OPTIONS), eager_layers) if mode == "eager" else ((STOCK, PATCHED), options.compiled_layers)
        )
        for row in measure(shape, mode, kinds, layers, options.only):
            rows.append(row)
            record.write(output.with_suffix(".json"), "cuda", rows)
        torch.cuda.empty_cache()
    print_rows(rows)
    errors = logits_errors(shape, eager_layers)
    print(f"\nlogits off those of float32: stock {errors[STOCK]:.2e}, patched {errors[PATCHED]:.2e}")
    record.write(output.with_suffix(".json"), "cuda", rows, errors=errors)
    plot(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
