"""Making a case's call in its way, and every comparison of what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from fuzz import bad_inputs, exact
from fuzz.attempts import Arguments, Attempt, Expected, RotaryAttempt, Tensor
from fuzz.cache_attempts import CacheAttempt, RescaleAttempt
from fuzz.chain_attempts import ChainAttempt
from fuzz.memory import copied, storages, tensors_of, touched
from fuzz.op_cases import MANY_TOKENS, OpCase
from fuzz.projection_attempts import ProjectionAttempt
from fuzz.shrinking import CaseError, draw, raised

ATTEMPTS: dict[str, type[Attempt]] = {
    "rotary": RotaryAttempt,
    "rotary_": RotaryAttempt,
    "qk_norm_rotary": RotaryAttempt,
    "qk_norm_rotary_": RotaryAttempt,
    "rescale_cache_": RescaleAttempt,
    "rotary_and_cache_": CacheAttempt,
    "qkv_rotary": ProjectionAttempt,
    "chain": ChainAttempt,
}
# One case in so many is done in all the other ways, too.
EVERY = 3
# How often calls are bad, and how often they are made in other ways than plainly. Compiling takes seconds.
BAD = 0.08
MANY_ROWS = 0.002
WAYS = {"cpu": {"inference": 0.02, "compile": 0.0005},
        "cuda": {"inference": 0.02, "stream": 0.05, "graph": 0.05, "compile": 0.0003}}  # fmt: skip


def random_case(rng: random.Random, device: str) -> OpCase:
    shares = WAYS[device]
    ways, weights = ["eager", *shares], [1.0 - sum(shares.values()), *shares.values()]
    fault = rng.choice(bad_inputs.FAULTS) if rng.random() < BAD else ""
    given = {"device": device, "fault": fault, "way": rng.choices(ways, weights)[0]}
    if device == "cuda" and rng.random() < MANY_ROWS:
        given |= {"op": "qkv_rotary", "batch": 1, "tokens": MANY_TOKENS, "dtype": rng.choice(["bfloat16", "float16"])}
        given |= {"q_heads": 32, "k_heads": 8, "head_dim": 128, "inputs": 256, "gradient": "none"}
    return draw(OpCase, rng, **given)


class Verdict:
    """What was found wrong with a case: bools on the device, read when there are enough of them."""

    def __init__(self, case: OpCase, raised: CaseError | None = None) -> None:
        self.case = case
        self.raised = raised
        self.flags: list[tuple[str, Tensor]] = []

    def add(self, kind: str, flag: Tensor | bool) -> None:
        if flag is False:
            return
        self.flags.append((f"{self.case.op}: {kind}", torch.as_tensor(flag, device=self.case.device)))


def failures_in(cases: list[OpCase]) -> list[CaseError | None]:
    """Of each case, what went wrong; waits for the device once."""
    verdicts = []
    for case in cases:
        try:
            verdicts.append(examine(case))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            verdicts.append(Verdict(case, raised(case.op, error)))
    return failures_of(verdicts)


def failures_of(verdicts: list[Verdict]) -> list[CaseError | None]:
    flags = [flag for verdict in verdicts for _, flag in verdict.flags]
    values = iter(torch.stack(flags).tolist() if flags else [])
    found = []
    for verdict in verdicts:
        wrong = [kind for kind, _ in verdict.flags if next(values)]
        failure = CaseError(wrong[0], f"{len(wrong)} of {len(verdict.flags)} checks fail: {wrong}") if wrong else None
        found.append(verdict.raised or failure)
    return found


def check(case: OpCase) -> None:
    """Raises the :class:`CaseError` of a case, if it has one."""
    (failure,) = failures_in([case])
    if failure is not None:
        raise failure


def examine(case: OpCase) -> Verdict:
    """Makes the call and notes all comparisons."""
    verdict = Verdict(case)
    attempt = ATTEMPTS[case.op](case)
    if case.fault:
        verdict.add(*bad_inputs.refusal(case, attempt))
        return verdict
    before = copied(attempt.arguments)
    found = in_its_way(case, attempt, before)
    expected = attempt.expected(before)
    compare(verdict, "float64", found, expected, case.torch_dtype)
    written = attempt.written(attempt.arguments)
    for name, now, was in storages(attempt.arguments, before):
        verdict.add(f"{name} touched outside what is written", touched(now, was, written))
    if case.seed % EVERY == 0:
        for way, function in attempt.other_ways().items():
            others = function(copied(before))
            if way.startswith("bits"):
                for x, y, want in zip(found, others, expected, strict=True):
                    if want.name.startswith("gradient"):
                        continue  # autograd's own sums make a zero of a negative one
                    verdict.add(f"{want.name} differs from the {way}", exact.differs(x.contiguous(), y.contiguous()))
            else:
                compare(verdict, way, others, expected, case.torch_dtype)
        if case.device != "cpu":
            on_cpu = [x.to(case.device) for x in attempt.invoke(copied(before, "cpu"))]
            compare(verdict, "float64, on the CPU", on_cpu, expected, case.torch_dtype)
    return verdict


def compare(verdict: Verdict, way: str, found: list[Tensor], expected: list[Expected], dtype: torch.dtype) -> None:
    verdict.add(f"gives {len(found)} tensors, not {len(expected)}", len(found) != len(expected))
    for x, want in zip(found, expected, strict=False):
        is_right = x.shape == want.value.shape and x.dtype in (dtype, exact.FLOAT8)
        verdict.add(f"{want.name} has another shape or dtype", not is_right)
        if is_right:
            verdict.add(f"{want.name} against {way}", exact.is_off(x.detach(), want.value, want.allowed))


def in_its_way(case: OpCase, attempt: Attempt, before: Arguments) -> list[Tensor]:
    """Makes the call: plainly, in inference mode, compiled, on a stream of its own or as a replayed graph."""
    arguments = attempt.arguments
    if case.way == "inference":
        with torch.inference_mode():
            return attempt.invoke(arguments)
    if case.way == "compile":
        torch._dynamo.reset()
        backend = "inductor" if case.seed % 4 == 0 else "aot_eager"
        return list(torch.compile(attempt.invoke, backend=backend)(arguments))
    if case.way == "stream":
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found = attempt.invoke(arguments)
        current.wait_stream(stream)
        return found
    if case.way == "graph":
        return replayed(attempt.invoke, arguments, before)
    return attempt.invoke(arguments)


def replayed(invoke: Callable[[Arguments], list[Tensor]], arguments: Arguments, before: Arguments) -> list[Tensor]:
    """Captured while the memory holds zeros, then replayed with what belongs there, twice."""
    invoke(copied(before))  # tables get to the device before the capture
    memories = [(now, was) for _, now, was in storages(arguments, before)]
    for now, _ in memories:
        exact.bits(now).zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = invoke(arguments)
    for _ in range(2):
        for now, was in memories:
            exact.bits(now).copy_(exact.bits(was))
        graph.replay()
    found = [x.clone() if not any(x is y for y in tensors_of(arguments).values()) else x for x in found]
    torch.cuda.synchronize()  # the graph and its memory go with this function
    return found
