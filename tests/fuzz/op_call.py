"""Base class of the calls that the fuzzer makes: arguments, the call itself, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fuzz.op_cases import CaseTensors, OpCase

Arguments = dict[str, Any]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Expected:
    """The float64 value of one tensor, the absolute error allowed in it, and its dtype where it is not the heads'."""

    name: str
    value: Tensor
    allowed: Tensor | float
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Alternative:
    """Another function of the same arguments with the same result, within tolerance or bit for bit."""

    name: str
    run: Callable[[Arguments], list[Tensor]]
    is_bitwise: bool


class OpCall:
    """A call that can be repeated on copies of its arguments.

    Attributes:
        query: Name of the argument that others may share memory with.
        aliases: Names of those by the values of ``OpCase.alias``.
    """

    query = "q"
    aliases: ClassVar[dict[str, str]] = {"k": "k", "v": "v", "gate": "gate"}

    def __init__(self, case: OpCase) -> None:
        self.case = case
        self.tensors = CaseTensors(case)
        self.arguments: Arguments = {}

    def run(self, arguments: Arguments) -> list[Tensor]:
        """Make the call and return the tensors that it returned or wrote, gradients last."""
        raise NotImplementedError

    def expected(self, before: Arguments) -> list[Expected]:
        """Return what :meth:`run` should return for the arguments as they were before the call."""
        raise NotImplementedError

    def written(self, arguments: Arguments) -> list[Tensor]:
        """Return the arguments that the call may write."""
        return []

    def alternatives(self) -> list[Alternative]:
        """Return other calls with the same result."""
        return []

    @property
    def alias(self) -> str:
        """Name of the argument that shares memory with the query."""
        return self.aliases[self.case.alias]

    def conflict(self) -> list[str]:
        """Return the two arguments that share memory although the call writes one of them; none in valid calls."""
        if not self.case.alias or self.arguments[self.alias].numel() == 0:
            return []
        names = [self.query, self.alias]
        is_written = any(x is self.arguments[name] for x in self.written(self.arguments) for name in names)
        return names if is_written else []

    def without_alias(self) -> Alternative:
        """Return the call with a copy in place of the argument that shares the query's memory."""

        def run(arguments: Arguments) -> list[Tensor]:
            return self.run(arguments | {self.alias: arguments[self.alias].clone()})

        # The bits of a NaN are not defined.
        return Alternative("the call on copies", run, is_bitwise=self.case.special == "none")


def compute_eps(case: OpCase) -> float:
    """Return the eps of the dtype that the op computes in: at least float32."""
    return torch.finfo(torch.promote_types(case.torch_dtype, torch.float32)).eps
