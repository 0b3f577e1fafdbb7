"""An 8B-shaped model served by vLLM: mrrope's plugin beside stock vLLM, prefill and decode.

    python benchmarks/serving.py [--shape llama3-8b|qwen3-8b ...] [--contenders NAME ...] [--layers N]
        [--output benchmarks/results/serving_cuda]

Dummy weights, bfloat16, one GPU, compiled with CUDA graphs. Every contender is an engine in a process of its own; all
share the GPU, and rounds are interleaved: a round times each engine once while the others are idle. Prints one table
and writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"
STOCK = "stock"
NATIVE_LENGTH = 8192
MAX_LENGTH = 40960
PREFILL_ROUNDS = {8192: 9, 32768: 5}
"""Rounds by the number of tokens."""
DECODE_BATCHES = (1, 16, 64, 256)
DECODE_ROUNDS = 11
DECODE_STEPS = 16
"""Steps of one timing; batches stay in the cache from round to round."""
CONTEXT = 128
WARM_UP_ROUNDS = 2
KV_CACHE_BYTES = 13 << 30
"""Four engines of 16 GB weights share the GPU; 256 texts of CONTEXT tokens and all their steps take 12 GB."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


def longrope(head_dim: int) -> dict[str, Any]:
    """Return vLLM's own type for tables: it reads both lists of factors and adds an offset to every position."""
    factors = [1.0 + pair / head_dim for pair in range(head_dim // 2)]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": NATIVE_LENGTH,
    }


def overrides(contender: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the ``hf_overrides`` of a contender."""
    theta = shape["rope_parameters"]["rope_theta"]
    extensions: dict[str, dict[str, Any]] = {
        STOCK: {"rope_type": "default", "rope_theta": theta},
        "longrope": {**longrope(shape["head_dim"]), "rope_theta": theta},
        "mrrope": {"rope_type": "mrrope_pro", "factor": MAX_LENGTH / NATIVE_LENGTH},
        "mrrope auto": {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": MAX_LENGTH / NATIVE_LENGTH},
    }
    stated = NATIVE_LENGTH if contender.startswith("mrrope") else MAX_LENGTH
    return {"rope_parameters": extensions[contender], "max_position_embeddings": stated}


CONTENDERS = (STOCK, "longrope", "mrrope", "mrrope auto")


def config_of(shape: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the ``config.json`` of a shape."""
    config = {**shape, "max_position_embeddings": NATIVE_LENGTH, "torch_dtype": "bfloat16"}
    return config if layers is None else {**config, "num_hidden_layers": layers}


def engine_arguments(contender: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine besides its model."""
    return {
        "hf_overrides": overrides(contender, shape),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": max(DECODE_BATCHES),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.24,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "compilation_config": {"cudagraph_capture_sizes": list(DECODE_BATCHES)},
        "disable_log_stats": True,
    }


@dataclass
class Engine:
    """An engine in this process, which runs a step when told to."""

    llm: Any
    vocabulary: int
    batch: list[str] = field(default_factory=list)

    @staticmethod
    def start(contender: str, shape: dict[str, Any], layers: int | None) -> Engine:
        """Start the engine of a contender."""
        from vllm import LLM

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(shape, layers)))
            llm = LLM(folder, **engine_arguments(contender, shape))
        return Engine(llm, shape["vocab_size"])

    def _add(self, name: str, tokens: int, new_tokens: int) -> str:
        import numpy as np
        from vllm import SamplingParams

        prompt = np.random.default_rng(tokens).integers(0, self.vocabulary, tokens).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        return str(self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params))

    def prefill(self, tokens: int) -> float:
        """Return the seconds from adding one prompt to its first token."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        self._add(f"prefill {start}", tokens, 1)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def start_decode(self, batch: int) -> None:
        """Fill the cache with a batch of texts and decode until all of them do."""
        steps = 2 * DECODE_STEPS * (DECODE_ROUNDS + WARM_UP_ROUNDS)
        self.batch = [self._add(f"decode {i}", CONTEXT, steps) for i in range(batch)]
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in self.llm.llm_engine.step()}

    def decode(self) -> float:
        """Return the seconds of one decode step."""
        import torch

        torch.cuda.synchronize()
        start, results = time.perf_counter(), 0
        while results < DECODE_STEPS:
            results += bool(self.llm.llm_engine.step())
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / DECODE_STEPS

    def stop_decode(self) -> None:
        """Drop the batch."""
        self.llm.llm_engine.abort_request(self.batch, internal=True)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()


def serve(pipe: Any, contender: str, shape: dict[str, Any], layers: int | None) -> None:
    """Run in a process of its own: start an engine, then call its methods by name."""
    # Stepping by hand keeps an engine idle while others are timed.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    engine = Engine.start(contender, shape, layers)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        if name == "stop":
            return
        pipe.send(getattr(engine, name)(*arguments))


class EngineProcess:
    """The engine of a contender in another process."""

    def __init__(self, contender: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, contender, *arguments))
        self.process.start()
        other.close()

    def wait(self) -> Any:
        """Return the answer to the last call."""
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit("an engine died; its messages are above") from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine."""
        self.pipe.send((name, arguments))
        return self.wait()

    def stop(self) -> None:
        """End the process, and free its memory."""
        if self.process.is_alive():
            self.pipe.send(("stop", ()))
        self.process.join(20)
        self.process.kill()


def interleaved(engines: dict[str, EngineProcess], method: str, arguments: tuple[Any, ...], rounds: int) -> Any:
    """Return medians and the medians of ratios to stock within a round."""
    names = list(engines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + WARM_UP_ROUNDS):
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order if i % 2 else reversed(order):
            seconds[name].append(engines[name].call(method, *arguments))
    kept = {name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}
    ratios = {name: [a / b for a, b in zip(kept[STOCK], kept[name], strict=True)] for name in names}
    return {
        "seconds": {name: statistics.median(values) for name, values in kept.items()},
        "throughput_of_stock": {name: statistics.median(values) for name, values in ratios.items()},
    }


def measure(shape: str, contenders: list[str], layers: int | None) -> list[dict[str, Any]]:
    """Return the rows of one shape."""
    engines = {name: EngineProcess(name, SHAPES[shape], layers) for name in contenders}
    rows = []
    try:
        for engine in tqdm(engines.values(), desc=f"{shape}: start engines"):
            engine.wait()
        for tokens, rounds in tqdm(PREFILL_ROUNDS.items(), desc="prefill"):
            found = interleaved(engines, "prefill", (tokens,), rounds)
            rows.append({"shape": shape, "name": f"prefill {tokens}", "tokens": tokens, **found})
        for batch in tqdm(DECODE_BATCHES, desc="decode"):
            for engine in engines.values():
                engine.call("start_decode", batch)
            found = interleaved(engines, "decode", (), DECODE_ROUNDS)
            rows.append({"shape": shape, "name": f"decode batch {batch}", "tokens": batch, **found})
            for engine in engines.values():
                engine.call("stop_decode")
    finally:
        for engine in engines.values():
            engine.stop()
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print milliseconds and throughput relative to stock."""
    names = list(rows[0]["seconds"])
    print(f"\n{'':28}" + "".join(f"{name:>22}" for name in names))
    for row in rows:
        cells = [f"{row['seconds'][name] * 1e3:9.3f} ms {row['throughput_of_stock'][name]:6.3f}" for name in names]
        print(f"{row['shape'] + ' ' + row['name']:28}" + "".join(f"{cell:>22}" for cell in cells))


def plot(rows: list[dict[str, Any]], path: Path, machine: str) -> None:
    """Plot the throughput of every contender relative to stock vLLM."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in rows[0]["seconds"] if name != STOCK]
    figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * height for place in range(len(rows))]
        axes.barh(places, [row["throughput_of_stock"][name] for row in rows], height, label=name)
    axes.set_yticks(range(len(rows)), [f"{row['shape']} {row['name']}" for row in rows])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(xlim=(0.9, None), xlabel="throughput / throughput of stock vLLM", title=machine)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--layers", type=int, help="if not given, those of the shape")
    parser.add_argument("--output", type=Path, default=RESULTS / "serving_cuda", help="where to write, without ending")
    options = parser.parse_args()
    import torch

    from mrrope.benchmark import record

    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: vLLM serves 8B models on one")
    contenders = [STOCK, *(name for name in options.contenders if name != STOCK)]
    rows: list[dict[str, Any]] = []
    for shape in options.shape:
        rows += measure(shape, contenders, options.layers)
        import vllm

        written = record.write(options.output.with_suffix(".json"), "cuda", rows, vllm=vllm.__version__)
    print_rows(rows)
    plot(rows, options.output.with_suffix(".png"), written["machine"])


if __name__ == "__main__":
    main()
