"""Time and error of the fused QKV projection + rotary, beside cuBLAS alone and cuBLAS followed by rotary.

    python benchmarks/qkv_rotary.py [--plans [REGEX]] [--seconds S] [--output benchmarks/results/NAME]

Prints one table and writes NAME.json, row by row. A warm-up of one second lets the GPU settle at the clocks it holds
under GEMM load. Ratios are medians of the ratios within a round; only they compare, since clocks differ between cases.

With --plans: measure every compiled kernel whose name matches with every swizzle and raster order, from 256 rows on,
to choose launch plans by.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from op_benchmark import HEAD_DIM, RESULTS, llama_table, require_gpu, script_parser, write
from torch.nn.functional import linear

from mrrope.benchmark import baseline, record
from mrrope.benchmark.timing import L2_BYTES, InterleavedTimer
from mrrope.ops.qkv_rotary import split_qkv

TABLE = llama_table()
ROWS = (1, 16, 64, 256, 2048, 8192, 32768)
ROWS_OF_PLANS = (2048, 8192, 32768, 1024, 512, 256)
SWIZZLES = (1, 2, 4, 8)
WARM_UP_SECONDS = 1.0
UNFUSED = "cuBLAS, then rotary"
GEMM = "cuBLAS"
FUSED = "mrrope"

Step = Callable[[], Any]


@dataclass(frozen=True)
class Geometry:
    """Shape of a QKV projection."""

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
    """One projection with its input, and enough sets of weights to exceed L2."""

    def __init__(self, geometry: Geometry, rows: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.geometry = geometry
        weight_bytes = geometry.outputs * geometry.inputs * dtype.itemsize
        moved = weight_bytes + rows * (geometry.inputs + geometry.outputs) * dtype.itemsize
        sets = 1 if device == "cpu" else max(1, min(16, 4 * L2_BYTES // moved))
        generator = torch.Generator(device).manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.x = random(1, rows, geometry.inputs)
        self.weights = [random(geometry.outputs, geometry.inputs) * geometry.inputs**-0.5 for _ in range(sets)]
        self.bias = random(geometry.outputs) if geometry.bias else None
        # Positions at which 32-bit phases would be wrong.
        self.positions = torch.arange(rows, device=device) + 2**26
        self.table = TABLE.packed(torch.device(device))

    def arguments(self, weight: torch.Tensor, pairing: str) -> tuple[Any, ...]:
        heads = self.geometry.q_heads, self.geometry.kv_heads
        return self.x, weight, self.bias, self.positions, self.table, *heads, pairing


def gemm(buffers: Buffers, weight: torch.Tensor) -> torch.Tensor:
    return linear(buffers.x, weight, buffers.bias)


def unfused(buffers: Buffers, weight: torch.Tensor, pairing: str = "halves") -> torch.Tensor:
    packed = linear(buffers.x, weight, buffers.bias)
    q, k, _ = split_qkv(packed, buffers.geometry.q_heads, buffers.geometry.kv_heads)
    torch.ops.mrrope.rotary_.default([q, k], buffers.positions, buffers.table, "bshd", pairing)
    return packed


def fused(buffers: Buffers, weight: torch.Tensor, pairing: str = "halves") -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mrrope.qkv_rotary.default(*buffers.arguments(weight, pairing))
    return packed


def planned(buffers: Buffers, weight: torch.Tensor, pairing: str, plan: tuple[int, ...]) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mrrope.qkv_rotary_planned.default(*buffers.arguments(weight, pairing), list(plan))
    return packed


def relative_error(run: Step, buffers: Buffers, weight: torch.Tensor, pairing: str) -> float:
    """Relative error of 256 random rows and the last, against float64 with exact phases.

    The result is expected to reuse memory that held NaN, so that elements that are not written show up.
    """
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
    phases = baseline.exact_phases(buffers.positions[rows], TABLE)
    cos, sin = (part[:, None] * TABLE.attention_factor for part in (phases.cos(), phases.sin()))
    rotated = [baseline.exact_rotary(x, cos, sin, pairing) for x in (q, k)]
    want = torch.cat([*rotated, v], dim=-2).flatten(-2)
    return baseline.relative_error(packed[:, rows], want)


def measure(geometry: Geometry, rows: int, device: str) -> dict[str, Any]:
    """One row: the op with its own launch plan."""
    buffers = Buffers(geometry, rows, device)
    timer = InterleavedTimer(device)
    contenders: dict[str, Callable[..., torch.Tensor]] = {GEMM: gemm, UNFUSED: unfused, FUSED: fused}
    for name, contender in contenders.items():
        timer.add(name, [functools.partial(contender, buffers, weight) for weight in buffers.weights])
    timer.warm_up(WARM_UP_SECONDS)
    timer.run_rounds(31 if rows < 32768 else 15)
    weight = buffers.weights[0]
    return {
        "name": f"{rows} x {geometry.outputs} x {geometry.inputs}",
        "geometry": geometry.name,
        "rows": rows,
        "seconds": {name: timer.median(name) for name in contenders},
        "op / cuBLAS": timer.ratio(FUSED, GEMM),
        "op / apart": timer.ratio(FUSED, UNFUSED),
        "errors": {
            name: relative_error(functools.partial(contender, buffers, weight), buffers, weight, "halves")
            for name, contender in {UNFUSED: unfused, FUSED: fused}.items()
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
        + "".join(f"{times[name] * 1e6:12.2f}" for name in (GEMM, UNFUSED, FUSED))
        + f"{row['op / cuBLAS']:10.3f}{row['op / apart']:11.3f}{errors[UNFUSED]:13.2e}{errors[FUSED]:11.2e}"
        + f"  {row['plan']}",
        flush=True,
    )


def measure_all(device: str, deadline: float) -> Iterator[dict[str, Any]]:
    print(
        f"{'':16}{'rows x out x in':>22}{'cuBLAS us':>12}{'+ rotary':>12}{'op':>12}{'/ cuBLAS':>10}{'/ unfused':>11}"
        f"{'err unfused':>13}{'err op':>11}  plan"
    )
    for rows, geometry in itertools.product(ROWS, GEOMETRIES):
        if time.monotonic() > deadline:
            print("out of time")
            return
        row = measure(geometry, rows, device)
        print_row(row)
        yield row


def plans(only: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every compiled kernel whose name matches, with its pairing, and every swizzle and raster order."""
    for kernel, name in enumerate(torch.ops.mrrope.qkv_rotary_kernels.default()):
        if not re.search(only, name):
            continue
        for swizzle, raster in itertools.product(SWIZZLES, (0, 1)):
            yield name.split()[0], (kernel, swizzle, raster)


def sweep(geometry: Geometry, rows: int, only: str) -> dict[str, Any]:
    """Time all plans in 5 rounds, then the best two of each kernel in 15, beside cuBLAS."""
    buffers = Buffers(geometry, rows, "cuda")
    weight = buffers.weights[0]
    timer = InterleavedTimer("cuda")

    def add(name: str, contender: Callable[..., torch.Tensor], *more: Any) -> None:
        timer.add(name, [functools.partial(contender, buffers, w, *more) for w in buffers.weights])

    add(GEMM, gemm)
    add(UNFUSED, unfused)
    errors = {UNFUSED: relative_error(functools.partial(unfused, buffers, weight), buffers, weight, "halves")}
    kernels: dict[int, list[str]] = {}
    failures: dict[str, str] = {}
    for pairing, plan in plans(only):
        name = name_of(plan)
        try:
            kind = name.split(",")[0]
            if kind not in errors:
                print(f"{'first run':>12}  {kind:60}", end="\r", flush=True)  # names the kernel if it hangs
                run = functools.partial(planned, buffers, weight, pairing, plan)
                errors[kind] = relative_error(run, buffers, weight, pairing)
            if not errors[kind] <= errors[UNFUSED]:
                failures[name] = f"an error of {errors[kind]:.2e}, more than unfused"
                continue
            add(name, planned, pairing, plan)
        except RuntimeError as failure:  # an invalid plan is reported, and the sweep continues
            failures[name] = str(failure).splitlines()[0]
            continue
        kernels.setdefault(plan[0], []).append(name)
    timer.run_rounds(5)
    first = {name: timer.median(name) for name in timer.names}
    finalists = [name for names in kernels.values() for name in sorted(names, key=timer.median)[:2]]
    for name in timer.names:
        if name not in (GEMM, UNFUSED, *finalists):
            timer.drop(name)
    for times in timer.seconds.values():
        times.clear()
    timer.warm_up(WARM_UP_SECONDS)
    timer.run_rounds(15)
    row: dict[str, Any] = {
        "geometry": geometry.name,
        "name": f"{rows} x {geometry.outputs} x {geometry.inputs}",
        "rows": rows,
        "seconds": {name: timer.median(name) for name in timer.names},
        "to cuBLAS": {name: timer.ratio(name, GEMM) for name in timer.names},
        "to apart": {name: timer.ratio(name, UNFUSED) for name in timer.names},
        "first seconds": first,
        "errors": errors,
        "failures": failures,
    }
    print(f"\n{geometry.name}, {row['name']}: microseconds, / cuBLAS, / unfused, plan", flush=True)
    for name in sorted(timer.names, key=timer.median):
        print(f"{timer.median(name) * 1e6:12.2f}{row['to cuBLAS'][name]:8.3f}{row['to apart'][name]:8.3f}  {name}")
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
    print(
        "\n".join([f"\n{'rows x out x in':22}{'/ cuBLAS':>10}{'/ unfused':>11}  the best plan of each kernel", *best])
    )


def best_of_each_kernel(row: dict[str, Any]) -> list[str]:
    kernels: dict[str, str] = {}
    for name in sorted(row["seconds"], key=row["to cuBLAS"].get):
        if name not in (GEMM, UNFUSED):
            kernels.setdefault(name.split(",")[0], name)
    return [
        f"{row['name']:22}{row['to cuBLAS'][name]:10.3f}{row['to apart'][name]:11.3f}  {name}"
        for name in kernels.values()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "--plans",
        nargs="?",
        const="",
        metavar="REGEX",
        help="measure all plans of kernels whose names match, instead of the op's own",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="start no case after this time (default: 120)")
    options = parser.parse_args()
    require_gpu()
    by_plans = options.plans is not None
    output = options.output or RESULTS / f"qkv_rotary_{'plans' if by_plans else 'cuda'}"
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    measured = sweep_all(deadline, options.plans) if by_plans else measure_all("cuda", deadline)
    with torch.no_grad():
        for row in measured:
            rows.append(row)
            record.write(output.with_suffix(".json"), "cuda", rows)
    write(output, "cuda", rows)


if __name__ == "__main__":
    main()
