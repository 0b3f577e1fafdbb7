"""The projection that rotates beside cuBLAS alone, and cuBLAS followed by rotary: time and error.

    python benchmarks/qkv_rotary.py [--plans [REGEX]] [--seconds S] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json, as it goes. All contenders of a case take turns, so that they see the same
clocks: a GPU slows down as it warms, and only ratios within a case count. They first run for a second untimed: within
that time a GPU comes down to the clocks that it can hold under such load. Times are medians of CUDA-graph replays, over
weights that do not fit the cache; ratios are medians of those of each turn. Errors are relative, in Frobenius norm,
against float64 with exact phases.

With --plans: every compiled kernel whose name matches, every way of walking through its tiles, and rows from 256 on, to
choose plans by.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

import mrrope
from mrrope.benchmark import baseline, record
from mrrope.benchmark.timing import CACHE_BYTES, InterleavedTimer
from mrrope.ops.qkv_rotary import split_qkv

RESULTS = Path(__file__).parent / "results"
TABLE = mrrope.frequency_table("mrrope_pro", rotary_dim=128, base=5e5, original_max_position=8192, scale=16.0)
HEAD_DIM = 128
ROWS = (1, 16, 64, 256, 2048, 8192, 32768)
ROWS_OF_PLANS = (2048, 8192, 32768, 1024, 512, 256)
SWIZZLES = (1, 2, 4, 8)
SECONDS_TO_SETTLE = 1.0
APART = "cuBLAS, then rotary"
ALONE = "cuBLAS"
OP = "mrrope"

Step = Callable[[], Any]


@dataclass(frozen=True)
class Geometry:
    """What is projected to what."""

    name: str
    inputs: int
    q_heads: int
    kv_heads: int
    bias: bool

    @property
    def outputs(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * HEAD_DIM


GEOMETRIES = (
    Geometry("Llama-3-8B", 4096, 32, 8, bias=False),
    Geometry("Qwen2.5-3B", 2048, 16, 2, bias=True),
    Geometry("Llama-3-70B TP8", 8192, 8, 1, bias=False),
)


class Buffers:
    """One projection with its input; several sets of weights where one would stay in the cache."""

    def __init__(self, geometry: Geometry, rows: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.geometry = geometry
        weight_bytes = geometry.outputs * geometry.inputs * dtype.itemsize
        moved = weight_bytes + rows * (geometry.inputs + geometry.outputs) * dtype.itemsize
        sets = 1 if device == "cpu" else max(1, min(16, 4 * CACHE_BYTES // moved))
        generator = torch.Generator(device).manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.x = random(1, rows, geometry.inputs)
        self.weights = [random(geometry.outputs, geometry.inputs) * geometry.inputs**-0.5 for _ in range(sets)]
        self.bias = random(geometry.outputs) if geometry.bias else None
        # Somewhere in a long text, where phases of 32 bits are wrong already.
        self.positions = torch.arange(rows, device=device) + 2**26
        self.table = TABLE.packed(torch.device(device))

    def arguments(self, weight: torch.Tensor, pairing: str) -> tuple[Any, ...]:
        heads = self.geometry.q_heads, self.geometry.kv_heads
        return self.x, weight, self.bias, self.positions, self.table, *heads, pairing


def alone(buffers: Buffers, weight: torch.Tensor) -> torch.Tensor:
    return linear(buffers.x, weight, buffers.bias)


def apart(buffers: Buffers, weight: torch.Tensor, pairing: str = "halves") -> torch.Tensor:
    packed = linear(buffers.x, weight, buffers.bias)
    q, k, _ = split_qkv(packed, buffers.geometry.q_heads, buffers.geometry.kv_heads)
    torch.ops.mrrope.rotary_.default([q, k], buffers.positions, buffers.table, "bshd", pairing)
    return packed


def op(buffers: Buffers, weight: torch.Tensor, pairing: str = "halves") -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mrrope.qkv_rotary.default(*buffers.arguments(weight, pairing))
    return packed


def planned(buffers: Buffers, weight: torch.Tensor, pairing: str, plan: tuple[int, ...]) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mrrope.qkv_rotary_planned.default(*buffers.arguments(weight, pairing), list(plan))
    return packed


# --- errors ---


def relative_error(run: Step, buffers: Buffers, weight: torch.Tensor, pairing: str) -> float:
    """Of any 256 rows and the last. The result should lie where NaN was, which stays where nothing is written."""
    every = buffers.x.shape[1]
    poison = torch.full((every, buffers.geometry.outputs), math.nan, dtype=buffers.x.dtype, device=buffers.x.device)
    place = poison.data_ptr()
    del poison
    packed = run()
    if packed.data_ptr() != place:
        warnings.warn("the result does not lie where NaN was: nothing tells what was not written", stacklevel=2)
    rows = torch.randperm(every, generator=torch.Generator().manual_seed(every))[:256]
    rows = torch.cat([rows, torch.tensor([every - 1])]).to(packed.device)
    exact = linear(
        buffers.x[:, rows].double(), weight.double(), None if buffers.bias is None else buffers.bias.double()
    )
    geometry = buffers.geometry
    q, k, v = split_qkv(exact, geometry.q_heads, geometry.kv_heads)
    phases = (buffers.positions[rows, None] * TABLE.turns.to(exact.device)).double() * (math.tau / 2**64)
    cos, sin = (part[:, None] * TABLE.attention_factor for part in (phases.cos(), phases.sin()))
    if pairing == "halves":
        cos, sin = (torch.cat([part, part], dim=-1) for part in (cos, sin))
        turned = [baseline.apply(x, cos, sin) for x in (q, k)]
    else:
        turned = []
        for x in (q, k):
            first, second = x[..., ::2], x[..., 1::2]
            turned.append(torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2))
    want = torch.cat([*turned, v], dim=-2).flatten(-2)
    return float((packed[:, rows].double() - want).norm() / want.norm())


# --- the op as it is ---


def measure(geometry: Geometry, rows: int, device: str) -> dict[str, Any]:
    buffers = Buffers(geometry, rows, device)
    turns = InterleavedTimer(device)
    contenders: dict[str, Callable[..., torch.Tensor]] = {ALONE: alone, APART: apart, OP: op}
    for name, contender in contenders.items():
        turns.add(name, [functools.partial(contender, buffers, weight) for weight in buffers.weights])
    turns.settle(SECONDS_TO_SETTLE)
    turns.take(31 if rows < 32768 else 15)
    weight = buffers.weights[0]
    return {
        "name": f"{rows} x {geometry.outputs} x {geometry.inputs}",
        "geometry": geometry.name,
        "rows": rows,
        "seconds": {name: turns.median(name) for name in contenders},
        "op / cuBLAS": turns.ratio(OP, ALONE),
        "op / apart": turns.ratio(OP, APART),
        "errors": {
            name: relative_error(functools.partial(contender, buffers, weight), buffers, weight, "halves")
            for name, contender in {APART: apart, OP: op}.items()
        },
        "plan": plan_name(buffers, "halves"),
    }


def plan_name(buffers: Buffers, pairing: str) -> str:
    if not buffers.x.is_cuda:
        return "apart"
    plan = torch.ops.mrrope.qkv_rotary_plan.default(*buffers.arguments(buffers.weights[0], pairing))
    return name_of(tuple(plan))


def name_of(plan: tuple[int, ...]) -> str:
    kernel, swizzle, raster = plan
    if kernel < 0:
        return "apart"
    name: str = torch.ops.mrrope.qkv_rotary_kernels.default()[kernel]
    return f"{name}, swizzle {swizzle}, along {('rows', 'columns')[raster]}"


def print_row(row: dict[str, Any]) -> None:
    times, errors = row["seconds"], row["errors"]
    print(
        f"{row['geometry']:16}{row['name']:>22}"
        + "".join(f"{times[name] * 1e6:12.2f}" for name in (ALONE, APART, OP))
        + f"{row['op / cuBLAS']:10.3f}{row['op / apart']:10.3f}{errors[APART]:11.2e}{errors[OP]:11.2e}  {row['plan']}",
        flush=True,
    )


def measure_all(device: str, deadline: float) -> Iterator[dict[str, Any]]:
    print(
        f"{'':16}{'rows x out x in':>22}{'cuBLAS us':>12}{'+ rotary':>12}{'op':>12}{'/ cuBLAS':>10}{'/ apart':>10}"
        f"{'err apart':>11}{'err op':>11}  plan"
    )
    for rows, geometry in itertools.product(ROWS, GEOMETRIES):
        if time.monotonic() > deadline:
            print("out of time")
            return
        row = measure(geometry, rows, device)
        print_row(row)
        yield row


# --- every plan ---


def plans(only: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every compiled kernel of such a name, with its pairing, and every way of walking through its tiles."""
    for kernel, name in enumerate(torch.ops.mrrope.qkv_rotary_kernels.default()):
        if not re.search(only, name):
            continue
        for swizzle, raster in itertools.product(SWIZZLES, (0, 1)):
            yield name.split()[0], (kernel, swizzle, raster)


def sweep(geometry: Geometry, rows: int, only: str) -> dict[str, Any]:
    """All plans in few turns, then the best of each kernel in many, beside cuBLAS."""
    buffers = Buffers(geometry, rows, "cuda")
    weight = buffers.weights[0]
    turns = InterleavedTimer("cuda")

    def add(name: str, contender: Callable[..., torch.Tensor], *more: Any) -> None:
        turns.add(name, [functools.partial(contender, buffers, w, *more) for w in buffers.weights])

    add(ALONE, alone)
    add(APART, apart)
    errors = {APART: relative_error(functools.partial(apart, buffers, weight), buffers, weight, "halves")}
    kernels: dict[int, list[str]] = {}
    failures: dict[str, str] = {}
    for pairing, plan in plans(only):
        name = name_of(plan)
        try:
            kind = name.split(",")[0]
            if kind not in errors:
                print(f"{'first run':>12}  {kind:60}", end="\r", flush=True)  # should it never end, it is known which
                run = functools.partial(planned, buffers, weight, pairing, plan)
                errors[kind] = relative_error(run, buffers, weight, pairing)
            if not errors[kind] <= errors[APART]:
                failures[name] = f"an error of {errors[kind]:.2e}, more than apart"
                continue
            add(name, planned, pairing, plan)
        except RuntimeError as failure:  # a plan that cannot be is told, and the others go on
            failures[name] = str(failure).splitlines()[0]
            continue
        kernels.setdefault(plan[0], []).append(name)
    turns.take(5)
    first = {name: turns.median(name) for name in turns.names}
    finalists = [name for names in kernels.values() for name in sorted(names, key=turns.median)[:2]]
    for name in turns.names:
        if name not in (ALONE, APART, *finalists):
            turns.drop(name)
    for times in turns.seconds.values():
        times.clear()
    turns.settle(SECONDS_TO_SETTLE)
    turns.take(15)
    row: dict[str, Any] = {
        "geometry": geometry.name,
        "name": f"{rows} x {geometry.outputs} x {geometry.inputs}",
        "rows": rows,
        "seconds": {name: turns.median(name) for name in turns.names},
        "to cuBLAS": {name: turns.ratio(name, ALONE) for name in turns.names},
        "to apart": {name: turns.ratio(name, APART) for name in turns.names},
        "first seconds": first,
        "errors": errors,
        "failures": failures,
    }
    print(f"\n{geometry.name}, {row['name']}: microseconds, / cuBLAS, / apart, plan", flush=True)
    for name in sorted(turns.names, key=turns.median):
        print(f"{turns.median(name) * 1e6:12.2f}{row['to cuBLAS'][name]:8.3f}{row['to apart'][name]:8.3f}  {name}")
    print("   errors: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()), flush=True)
    for name, why in failures.items():
        print(f"{'fails':>12}  {name}: {why}", flush=True)
    return row


def sweep_all(deadline: float, only: str) -> Iterator[dict[str, Any]]:
    best: list[str] = []
    for rows, geometry in itertools.product(ROWS_OF_PLANS, GEOMETRIES):
        if time.monotonic() > deadline:
            print("out of time")
            break
        row = sweep(geometry, rows, only)
        best += best_of_each_kernel(row)
        yield row
    print("\n".join([f"\n{'rows x out x in':22}{'/ cuBLAS':>10}{'/ apart':>10}  the best plan of each kernel", *best]))


def best_of_each_kernel(row: dict[str, Any]) -> list[str]:
    kernels: dict[str, str] = {}
    for name in sorted(row["seconds"], key=row["to cuBLAS"].get):
        if name not in (ALONE, APART):
            kernels.setdefault(name.split(",")[0], name)
    return [
        f"{row['name']:22}{row['to cuBLAS'][name]:10.3f}{row['to apart'][name]:10.3f}  {name}"
        for name in kernels.values()
    ]


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plans",
        nargs="?",
        const="",
        metavar="REGEX",
        help="every plan of kernels whose names match, instead of the op's own",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="no case is begun after that (default: 120)")
    parser.add_argument("--output", type=Path, help="where to write, without ending")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    by_plans = options.plans is not None
    output = options.output or RESULTS / f"qkv_rotary_{'plans' if by_plans else 'cuda'}"
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    measured = sweep_all(deadline, options.plans) if by_plans else measure_all("cuda", deadline)
    with torch.no_grad():
        for row in measured:
            rows.append(row)
            record.write(output.with_suffix(".json"), "cuda", rows)
    print(f"\n{record.machine('cuda')}; written to {output}.json")


if __name__ == "__main__":
    main()
