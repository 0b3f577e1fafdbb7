"""Run an op case in its execution mode and check the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from fuzz import float64_reference, invalid_arguments
from fuzz.call_memory import changed_outside, cloned, storages_now_and_before, tensors_by_name
from fuzz.chained_calls import ChainedCalls
from fuzz.learnable_rotary_call import LearnableRotaryCall
from fuzz.mla_rotary_and_cache_call import MlaRotaryAndCacheCall
from fuzz.mla_rotary_call import MlaRotaryCall
from fuzz.op_call import Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import LARGE_SIZES, MANY_TOKENS, OpCase
from fuzz.qk_norm_rotary_and_cache_call import QkNormRotaryAndCacheCall
from fuzz.qkv_rotary_call import QkvRotaryCall
from fuzz.rescale_cache_call import RescaleCacheCall
from fuzz.rotary_and_cache_call import RotaryAndCacheCall
from fuzz.rotary_call import RotaryCall
from fuzz.rotary_cos_sin_call import RotaryCosSinCall
from fuzz.shrinking import CaseError, draw, unexpected_error

CALLS: dict[str, type[OpCall]] = {
    "rotary": RotaryCall,
    "rotary_": RotaryCall,
    "qk_norm_rotary": RotaryCall,
    "qk_norm_rotary_": RotaryCall,
    "rescale_cache_": RescaleCacheCall,
    "rotary_and_cache_": RotaryAndCacheCall,
    "qk_norm_rotary_and_cache_": QkNormRotaryAndCacheCall,
    "qkv_rotary": QkvRotaryCall,
    "learnable_rotary": LearnableRotaryCall,
    "mla_rotary": MlaRotaryCall,
    "mla_rotary_and_cache_": MlaRotaryAndCacheCall,
    "rotary_cos_sin": RotaryCosSinCall,
    "chain": ChainedCalls,
}
# One case in so many also runs its alternatives.
ALTERNATIVES_EVERY = 3
# Shares of invalid calls, of qkv_rotary with many rows, and of modes other than eager. Compiling takes seconds.
INVALID_SHARE = 0.08
MANY_ROWS_SHARE = 0.002
# Large cases have the shapes of models, without which few would reach the plans of large launches.
LARGE_SHARE = {"cpu": 0.001, "cuda": 0.006}
LARGE_OPS = [op for op in CALLS if op not in ("qkv_rotary", "chain")] + [op for op in CALLS if op.startswith("qk_norm")]
LARGE_SHAPES = {"op": LARGE_OPS, "q_heads": (5, 8, 32), "k_heads": (1, 3, 8), "head_dim": (64, 80, 128, 128, 128, 256),
                "rotary_dim": (32, 64, 512, 512), "dtype": ("bfloat16", "bfloat16", "float16", "float32"),
                "memory": ("contiguous", "transposed", "padded", "packed", "unaligned"),
                "over": ("head", "head", "all_heads"), "tables": ("one", "one", "each", "index"),
                "table_heads": (1, 1, 1, 4), "position_rows": (0, 0, 0, 3)}  # fmt: skip
MODE_SHARES = {"cpu": {"inference": 0.02, "compile": 0.0005},
        "cuda": {"inference": 0.02, "stream": 0.05, "graph": 0.05, "compile": 0.0003}}  # fmt: skip


def random_case(rng: random.Random, device: str) -> OpCase:
    shares = MODE_SHARES[device]
    modes, weights = ["eager", *shares], [1.0 - sum(shares.values()), *shares.values()]
    fault = rng.choice(invalid_arguments.FAULTS) if rng.random() < INVALID_SHARE else ""
    given = {"device": device, "fault": fault, "mode": rng.choices(modes, weights)[0]}
    if device == "cuda" and rng.random() < MANY_ROWS_SHARE:
        given |= {"op": "qkv_rotary", "batch": 1, "tokens": MANY_TOKENS, "dtype": rng.choice(["bfloat16", "float16"])}
        given |= {"q_heads": 32, "k_heads": 8, "head_dim": 128, "inputs": 256, "gradient": "none"}
    elif rng.random() < LARGE_SHARE[device]:
        given |= large_shape(rng, device)
    return draw(OpCase, rng, **given)


def large_shape(rng: random.Random, device: str) -> dict[str, Any]:
    """Return the fields of a large case that decide its launch plan."""
    shape = {name: rng.choice(values) for name, values in LARGE_SHAPES.items()}
    return shape | {"size": rng.choice(LARGE_SIZES[device])}


class CaseChecks:
    """The checks of a case: bools on the device, True for a failure. They are read once per batch."""

    def __init__(self, case: OpCase, raised: CaseError | None = None) -> None:
        self.case = case
        self.raised = raised
        self.flags: list[tuple[str, Tensor]] = []

    def add(self, kind: str, flag: Tensor | bool) -> None:
        if flag is False:
            return
        self.flags.append((f"{self.case.op}: {kind}", torch.as_tensor(flag, device=self.case.device)))


def failures_in(cases: list[OpCase]) -> list[CaseError | None]:
    """Return the failure of each case or None; synchronizes with the device once."""
    checked = []
    for case in cases:
        try:
            checked.append(run_checks(case))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            checked.append(CaseChecks(case, unexpected_error(case.op, error)))
    return read_failures(checked)


def read_failures(checked: list[CaseChecks]) -> list[CaseError | None]:
    flags = [flag for checks in checked for _, flag in checks.flags]
    values = iter(torch.stack(flags).tolist() if flags else [])
    found = []
    for checks in checked:
        wrong = [kind for kind, _ in checks.flags if next(values)]
        failure = CaseError(wrong[0], f"{len(wrong)} of {len(checks.flags)} checks fail: {wrong}") if wrong else None
        found.append(checks.raised or failure)
    return found


def check(case: OpCase) -> None:
    """Raise the :class:`CaseError` of a case that fails."""
    (failure,) = failures_in([case])
    if failure is not None:
        raise failure


def run_checks(case: OpCase) -> CaseChecks:
    """Make the call and return its checks, not yet read."""
    checks = CaseChecks(case)
    call = CALLS[case.op](case)
    if case.fault:
        checks.add(*invalid_arguments.rejection_failure(case, call))
        return checks
    if call.conflict():
        checks.add(*invalid_arguments.conflict_failure(case, call))
        return checks
    before = cloned(call.arguments)
    found = run_in_mode(case, call, before)
    expected = call.expected(before)
    compare(checks, "float64", found, expected, case.torch_dtype)
    written = call.written(call.arguments)
    for name, now, was in storages_now_and_before(call.arguments, before):
        checks.add(f"{name} written outside the outputs", changed_outside(now, was, written))
    if case.seed % ALTERNATIVES_EVERY == 0:
        for other in [call.without_alias()] if case.alias else call.alternatives():
            results = other.run(cloned(before))
            if not other.is_bitwise:
                compare(checks, other.name, results, expected, case.torch_dtype)
                continue
            for x, y, want in zip(found, results, expected, strict=True):
                if want.name.startswith("gradient"):
                    continue  # sums in autograd turn -0.0 into 0.0
                differs = float64_reference.any_bit_differs(x.contiguous(), y.contiguous())
                checks.add(f"{want.name} differs in bits from {other.name}", differs)
        if case.device != "cpu" and not case.size:
            on_cpu = [x.to(case.device) for x in call.run(cloned(before, "cpu"))]
            compare(checks, "float64, on the CPU", on_cpu, expected, case.torch_dtype)
    return checks


def compare(
    checks: CaseChecks, against: str, found: list[Tensor], expected: list[Expected], dtype: torch.dtype
) -> None:
    checks.add(f"gives {len(found)} tensors, not {len(expected)}", len(found) != len(expected))
    for x, want in zip(found, expected, strict=False):
        is_right = x.shape == want.value.shape and x.dtype in (dtype, *float64_reference.FLOAT8, want.dtype)
        checks.add(f"{want.name} has another shape or dtype", not is_right)
        if is_right:
            checks.add(
                f"{want.name} against {against}", float64_reference.exceeds(x.detach(), want.value, want.allowed)
            )


def run_in_mode(case: OpCase, call: OpCall, before: Arguments) -> list[Tensor]:
    """Make the call eagerly, in inference mode, compiled, on another stream or as a CUDA graph."""
    arguments = call.arguments
    if case.mode == "inference":
        with torch.inference_mode():
            return call.run(arguments)
    if case.mode == "compile":
        torch._dynamo.reset()
        backend = "inductor" if case.seed % 4 == 0 else "aot_eager"
        return list(torch.compile(call.run, backend=backend)(arguments))
    if case.mode == "stream":
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found = call.run(arguments)
        current.wait_stream(stream)
        return found
    if case.mode == "graph":
        return run_as_graph(call.run, arguments, before)
    return call.run(arguments)


def run_as_graph(run: Callable[[Arguments], list[Tensor]], arguments: Arguments, before: Arguments) -> list[Tensor]:
    """Capture the call on zeroed memory and replay it twice on its real contents."""
    run(cloned(before))  # copies the tables to the device, which a capture cannot
    memories = [(now, was) for _, now, was in storages_now_and_before(arguments, before)]
    for now, _ in memories:
        float64_reference.as_integers(now).zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(arguments)
    for _ in range(2):
        for now, was in memories:
            float64_reference.as_integers(now).copy_(float64_reference.as_integers(was))
        graph.replay()
    found = [x.clone() if not any(x is y for y in tensors_by_name(arguments).values()) else x for x in found]
    torch.cuda.synchronize()  # before the graph and its memory are freed
    return found
