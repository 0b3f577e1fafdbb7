"""Time and peak memory of a step of ``mrrope calibrate --per head``: Llama-3-8B's and SmolLM2-135M's shape.

    python benchmarks/gradient_step.py [--shapes smollm2-135m llama3-8b] [--steps 3]
        [--output benchmarks/results/gradient_step_cuda]

Random weights and tokens, bfloat16, one GPU: forward and backward pass for a table per layer and key head, over texts
of a quarter, half and all of the extended length. Layers are recomputed in the backward pass where memory requires it.
Writes NAME.json.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from model_shapes import SHAPES, Shape
from op_benchmark import RESULTS, require_gpu, script_parser, write
from transformers import LlamaConfig, LlamaForCausalLM

from mrrope.calibration.command import trained_with
from mrrope.calibration.learnable_tables import LearnableTables
from mrrope.calibration.table_gradient import TableGradient
from mrrope.calibration.token_weights import token_weights
from mrrope.calibration.training_texts import TrainingText
from mrrope.tables.lookup import resolve_table

SMOLLM2 = Shape(
    LlamaForCausalLM,
    LlamaConfig,
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
    },
    layers=30,
    output="gradient_step_cuda",
)
COMPARED = {"smollm2-135m": SMOLLM2, "llama3-8b": SHAPES["llama3-8b"]}
LENGTHS = {"smollm2-135m": (32768, 65536, 131072), "llama3-8b": (8192, 16384, 32768)}


def measured(shape: str, steps: int) -> list[dict[str, Any]]:
    """The rows of a shape: seconds of the fastest step and peak memory at every length."""
    torch.manual_seed(0)
    model = COMPARED[shape].model(COMPARED[shape].layers)
    lengths, config = LENGTHS[shape], model.config
    trained = trained_with(model, None)
    start = resolve_table(trained, "yarn_ratio", lengths[-1] / config.max_position_embeddings, {})
    learnable = LearnableTables(
        start,
        trained,
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        per="head",
        device="cuda",
    )
    gradient = TableGradient(model, learnable)
    rows = []
    with gradient.ready():
        for length in lengths:
            tokens = torch.randint(config.vocab_size, (length,))
            text = TrainingText("random", tokens, token_weights(length, {length: 1.0}))
            torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(steps):
                began = time.perf_counter()
                gradient.add(text)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            assert learnable.moves.grad is not None
            rows.append(
                {
                    "name": f"{shape}, {length} tokens",
                    "seconds": min(seconds),
                    "peak_bytes": torch.cuda.max_memory_allocated(),
                    "recomputed_layers": gradient.recomputation.count,
                    "layers": config.num_hidden_layers,
                    "gradients_finite": bool(learnable.moves.grad.isfinite().all()),
                }
            )
            print({**rows[-1], "peak_GB": round(rows[-1]["peak_bytes"] / 1e9, 1)}, flush=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = script_parser(__doc__, RESULTS / "gradient_step_cuda")
    parser.add_argument("--shapes", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    require_gpu(": an 8B model takes hours without one")
    write(options.output, "cuda", [row for shape in options.shapes for row in measured(shape, options.steps)])


if __name__ == "__main__":
    main()
