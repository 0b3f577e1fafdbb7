"""Speed and error of the rotary op beside a copy of the same bytes and what transformers does.

    python benchmarks/rotary.py [--device cuda|cpu] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json and NAME.png. Times are medians; on a GPU by CUDA-graph replay, over buffers that
do not fit the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import Step, buffer_sets, median_seconds
from tqdm import tqdm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import mrrope
from mrrope import plain

RESULTS = Path(__file__).parent / "results"
TABLES = [
    mrrope.frequency_table("mrrope_pro", rotary_dim=128, base=5e5, original_max_position=8192, scale=scale)
    for scale in (1.0, 2.0, 4.0, 8.0, 16.0)
]
TABLE = TABLES[-1]
MOST_DECODED = 256


@dataclass(frozen=True)
class Case:
    """One row: what is rotated."""

    tokens: int
    q_heads: int
    k_heads: int
    dtype: str
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        """Read and written once each."""
        size: int = getattr(torch, self.dtype).itemsize
        return 2 * self.tokens * (self.q_heads + self.k_heads) * self.head_dim * size

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.q_heads}/{self.k_heads} {self.dtype}"


CASES = {
    "cuda": [
        *(Case(tokens, 32, 8, "bfloat16") for tokens in (1, 64, 256, 1024, 8192, 131072)),
        Case(131072, 4, 1, "bfloat16"),
        Case(8192, 64, 8, "bfloat16"),
        Case(8192, 32, 8, "float16"),
        Case(8192, 32, 8, "float32"),
    ],
    "cpu": [Case(tokens, 32, 8, dtype) for tokens in (1, 256, 4096) for dtype in ("float32", "bfloat16", "float16")],
}


class Buffers:
    """q and k as a model's projections give them: [1, tokens, heads, head_dim] in memory, heads first in shape."""

    def __init__(self, case: Case, device: str) -> None:
        def heads(count: int) -> torch.Tensor:
            shape = (1, case.tokens, count, case.head_dim)
            return torch.randn(shape, device=device, dtype=getattr(torch, case.dtype)).transpose(1, 2)

        self.q, self.k = heads(case.q_heads), heads(case.k_heads)
        self.copy = torch.empty(case.bytes // 2, device=device, dtype=torch.uint8)
        self.copied = torch.ones_like(self.copy)
        self.positions = torch.arange(case.tokens, device=device)
        self.index = torch.full((case.tokens,), TABLES.index(TABLE), device=device, dtype=torch.int32)
        self.cos, self.sin = (x[None] for x in plain.cos_sin(self.positions, TABLE, self.q.dtype))


def copy(buffers: Buffers) -> object:
    return buffers.copy.copy_(buffers.copied)


def copy_by_kernel(buffers: Buffers) -> object:
    return torch.bitwise_not(buffers.copied.view(torch.int32), out=buffers.copy.view(torch.int32))


def in_place(buffers: Buffers) -> object:
    return mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLE)


def by_table_index(buffers: Buffers) -> object:
    """Decoding, every token is of another sequence, and has a table of its own choice; else it is one long sequence."""
    if buffers.positions.numel() > MOST_DECODED:
        return mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLES, table_index=buffers.index[:1])
    q, k = (x[0].transpose(0, 1) for x in (buffers.q, buffers.k))
    mrrope.rotary_(q, k, buffers.positions, TABLES, layout="thd", table_index=buffers.index)
    return buffers.q, buffers.k


def out_of_place(buffers: Buffers) -> object:
    return mrrope.rotary(buffers.q, buffers.k, buffers.positions, TABLE)


def transformers_eager(buffers: Buffers) -> object:
    return apply_rotary_pos_emb(buffers.q, buffers.k, buffers.cos, buffers.sin)


transformers_compiled: Callable[[Buffers], object] = torch.compile(transformers_eager, dynamic=False)

CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    "copy": copy,
    "mrrope in place": in_place,
    "by table_index": by_table_index,
    "mrrope": out_of_place,
    "transformers compiled": transformers_compiled,
    "transformers eager": transformers_eager,
}


def relative_error(case: Case, contender: Callable[[Buffers], object], device: str) -> float:
    """Of q, against float64 with exact phases, over the last tokens of the case."""
    buffers = Buffers(Case(min(case.tokens, 256), case.q_heads, case.k_heads, case.dtype, case.head_dim), device)
    buffers.positions += case.tokens - buffers.positions.numel()
    buffers.cos, buffers.sin = (x[None] for x in plain.cos_sin(buffers.positions, TABLE, buffers.q.dtype))
    phases = (buffers.positions[:, None] * TABLE.turns.to(device)).double() * (math.tau / 2**64)
    phases = torch.cat([phases, phases], dim=-1)
    want = plain.apply(buffers.q.double(), phases.cos(), phases.sin()) * TABLE.attention_factor
    result = contender(buffers)
    assert isinstance(result, tuple)
    return float((result[0].double() - want).norm() / want.norm())


def steps_of(contender: Callable[[Buffers], object], sets: list[Buffers]) -> list[Step]:
    return [lambda buffers=buffers: contender(buffers) for buffers in sets]  # type: ignore[misc]


def measure(device: str) -> list[dict[str, object]]:
    """A row for every case: seconds and errors by contender."""
    rows: list[dict[str, object]] = []
    cases = CASES[device]
    with tqdm(total=len(cases) * len(CONTENDERS), desc="rotary", unit="timing") as progress:
        for case in cases:
            sets = [Buffers(case, device) for _ in range(buffer_sets(case.bytes, device))]
            torch.compiler.reset()  # every case is compiled for its own shape
            seconds, errors = {}, {}
            for name, contender in CONTENDERS.items():
                progress.set_postfix_str(f"{case.name}, {name}")
                seconds[name] = median_seconds(steps_of(contender, sets), device)
                if name == "copy":  # the driver's copy is slow for more than a gigabyte; the faster one counts
                    seconds[name] = min(seconds[name], median_seconds(steps_of(copy_by_kernel, sets), device))
                if name != "copy":
                    errors[name] = relative_error(case, contender, device)
                progress.update()
            rows.append({**asdict(case), "name": case.name, "bytes": case.bytes, "seconds": seconds, "errors": errors})
    return rows


def print_rows(rows: list[dict[str, object]]) -> None:
    """Microseconds, the ratio to the copy, and the error, by contender."""
    width = max(len(str(row["name"])) for row in rows)
    print(f"\n{'tokens x heads':>{width}}" + "".join(f"{name:>34}" for name in CONTENDERS))
    print(f"{'':>{width}}" + "".join(f"{'us  x copy     error':>34}" for _ in CONTENDERS))
    for row in rows:
        seconds, errors = row["seconds"], row["errors"]
        assert isinstance(seconds, dict)
        assert isinstance(errors, dict)
        cells = []
        for name in CONTENDERS:
            error = f"{errors[name]:.1e}" if name in errors else ""
            cells.append(f"{seconds[name] * 1e6:14.2f}{seconds[name] / seconds['copy']:10.2f}{error:>10}")
        print(f"{row['name']:>{width}}" + "".join(cells))


def plot(rows: list[dict[str, object]], machine: str, path: Path) -> None:
    """Bandwidth over size, for the rows that differ in tokens only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row["dtype"] == "bfloat16" and row["q_heads"] == 32]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in CONTENDERS:
        bandwidth = [row["bytes"] / row["seconds"][name] / 1e9 for row in shown]  # type: ignore[index]
        axes.plot([row["tokens"] for row in shown], bandwidth, marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens (32 query and 8 key heads of 128, bfloat16)", ylabel="GB/s read and written")
    axes.set(title=f"Rotary embedding on {machine}", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures, prints, writes."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(CASES), default=default)
    parser.add_argument("--output", type=Path, help="where to write, without ending (default: %(default)s)")
    options = parser.parse_args()
    output = options.output or RESULTS / f"rotary_{options.device}"
    if options.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads"

    rows = measure(options.device)
    print_rows(rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "torch": torch.__version__, "mrrope": mrrope.__version__, "rows": rows}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    plot(rows, machine, output.with_suffix(".png"))
    print(f"\n{machine}; written to {output}.json and {output}.png")


if __name__ == "__main__":
    main()
