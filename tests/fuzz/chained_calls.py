"""Chains of in-place calls on the same memory: their rotations compose."""

from __future__ import annotations

from rotary_reference import TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase


class ChainedCalls(OpCall):
    """q and k rotated, re-rotated and rotated back in place, in random order."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, k = self.tensors.heads(case.q_heads, case.k_heads)
        self.arguments = {"q": q, "k": k, "positions": self.tensors.positions()}
        random = case.numpy_random(4)
        self.links = [
            (str(random.choice(["rotary_", "rotary_ back", "rescale_cache_"])), *map(int, random.integers(0, 8, 2)))
            for _ in range(case.steps)
        ]

    def written(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"], arguments["k"]]

    def run(self, arguments: Arguments) -> list[Tensor]:
        q, k, positions = arguments["q"], arguments["k"], arguments["positions"]
        options = (self.case.layout, self.case.pairing)
        for link, a, b in self.links:
            first, second = self.case.make_table(a), self.case.make_table(b)
            if link == "rescale_cache_":
                mrrope.rescale_cache_([q, k], positions, first, second, *options)
            else:
                mrrope.rotary_(q, k, positions, first.inverse() if link.endswith("back") else first, *options)
        return [q, k]

    def expected(self, before: Arguments) -> list[Expected]:
        case, none = self.case, mrrope.frequency_table("rope", rotary_dim=self.case.rotary_dim, base=1e4,
                                                       original_max_position=8)  # fmt: skip
        total = PhaseSteps.of([none], case.device)
        total = total.relative_to(total)
        gain = 1.0
        for link, a, b in self.links:
            first, second = (PhaseSteps.of([case.make_table(i)], case.device) for i in (a, b))
            identity = first.relative_to(first)
            link_steps = {
                "rotary_": first,
                "rotary_ back": identity.relative_to(first),
                "rescale_cache_": second.relative_to(first),
            }[link]
            total = link_steps.after(total)
            gain *= max(1.0, self.factor_of(link, a, b))
        by = float64_reference.rotations(before["positions"], total, case.layout, None)
        tolerance = TOLERANCES[case.torch_dtype]
        found = []
        for name in "qk":
            value = float64_reference.rotated(before[name], by, case.pairing)
            norms = float64_reference.pair_norms(value, case.rotary_dim, case.pairing)
            # A rotation keeps the error of a pair relative to its norm, so errors add up.
            allowed = case.steps * ((tolerance.arithmetic + 1.1 * tolerance.rounding) * norms)
            allowed += 2 * case.steps * gain * float64_reference.smallest_subnormal(case.torch_dtype)
            allowed[..., case.rotary_dim :] = 0.0
            found.append(Expected(name, value, allowed))
        return found

    def factor_of(self, link: str, a: int, b: int) -> float:
        first, second = (self.case.make_table(i).attention_factor for i in (a, b))
        return {"rotary_": first, "rotary_ back": 1.0 / first, "rescale_cache_": second / first}[link]
