"""Chains of in-place calls on the same memory: their rotations compose."""

from __future__ import annotations

from functools import reduce

import torch
from rotary_reference import TOLERANCES

import mrrope
from fuzz import float64_reference
from fuzz.float64_reference import PhaseSteps
from fuzz.op_call import Arguments, Expected, OpCall, Tensor
from fuzz.op_cases import OpCase, by_heads


class ChainedCalls(OpCall):
    """q and k rotated, re-rotated and rotated back in place, in random order."""

    def __init__(self, case: OpCase) -> None:
        super().__init__(case)
        q, k = self.tensors.heads(case.q_heads, case.k_heads)
        self.arguments = {"q": q, "k": k, "positions": self.tensors.positions()}
        random = case.numpy_random(4)

        def tables() -> list[mrrope.FrequencyTable]:
            return [case.make_table(int(number)) for number in random.integers(0, 8, case.table_heads)]

        self.links = [
            (str(random.choice(["rotary_", "rotary_ back", "rescale_cache_"])), tables(), tables())
            for _ in range(case.steps)
        ]

    def written(self, arguments: Arguments) -> list[Tensor]:
        return [arguments["q"], arguments["k"]]

    def run(self, arguments: Arguments) -> list[Tensor]:
        q, k, positions = arguments["q"], arguments["k"], arguments["positions"]
        options = (self.case.layout, self.case.pairing)
        for link, *tables in self.links:
            first, second = (by_heads(of_heads, self.case.table_heads)[0] for of_heads in tables)
            if link == "rescale_cache_":
                mrrope.rescale_cache_([q, k], positions, first, second, *options)
            else:
                mrrope.rotary_(q, k, positions, first.inverse() if link.endswith("back") else first, *options)
        return [q, k]

    def expected(self, before: Arguments) -> list[Expected]:
        case = self.case
        links = [self.steps_of_links(head) for head in range(case.table_heads)]
        whole = [reduce(PhaseSteps.after, steps) for steps in links]
        of_tables = [float64_reference.rotations(before["positions"], one, case.layout, None) for one in whole]
        gains = [torch.cat([one.factor for one in steps]).clamp(min=1.0).prod() for steps in links]
        gain = torch.stack(gains).max()
        tolerance = TOLERANCES[case.torch_dtype]
        found = []
        for name in "qk":
            by = float64_reference.of_every_head(of_tables, before[name], case.layout)
            value = float64_reference.rotated(before[name], by, case.pairing)
            norms = float64_reference.pair_norms(value, case.rotary_dim, case.pairing)
            # A rotation keeps the error of a pair relative to its norm, so errors add up.
            allowed = case.steps * ((tolerance.arithmetic + 1.1 * tolerance.rounding) * norms)
            allowed += 2 * case.steps * gain * float64_reference.smallest_subnormal(case.torch_dtype)
            allowed[..., case.rotary_dim :] = 0.0
            found.append(Expected(name, value, allowed))
        return found

    def steps_of_links(self, head: int) -> list[PhaseSteps]:
        """Return what each link turns the heads of a head table by."""
        found = []
        for link, *tables in self.links:
            first, second = (PhaseSteps.of([of_heads[head]], self.case.device) for of_heads in tables)
            identity = first.relative_to(first)
            steps = {
                "rotary_": first,
                "rotary_ back": identity.relative_to(first),
                "rescale_cache_": second.relative_to(first),
            }
            found.append(steps[link])
        return found
