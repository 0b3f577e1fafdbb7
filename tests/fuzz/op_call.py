"""Base class of the calls that the fuzzer makes: arguments, the call itself, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """A call that can be repeated on copies of its arguments."""

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


def compute_eps(case: OpCase) -> float:
    """Return the eps of the dtype that the op computes in: at least float32."""
    return torch.finfo(torch.promote_types(case.torch_dtype, torch.float32)).eps
