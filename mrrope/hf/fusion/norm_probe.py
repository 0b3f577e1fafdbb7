"""Probe which modules of a model are RMSNorms that a fused kernel reproduces."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope.hf.probing import agree, random_tensor

EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon")

PLAIN_TENSORS = (nn.Parameter, torch.Tensor)
WEIGHT_OFFSETS = (0.0, 1.0)
"""Of Gemma's norms and those derived from them it is 1."""

probed_forwards: dict[type, Callable[..., Any]] = {}
"""The forward of each norm class when it was probed. One that is monkeypatched later has to be called."""


@dataclass(frozen=True)
class NormForm:
    """A norm of x / sqrt(mean(x**2) + eps) * (weight + offset) over the last dimension, and where its eps is."""

    module_class: type[nn.Module]
    eps_name: str
    eps: float
    weight_offset: float

    def is_of(self, norm: nn.Module, x: torch.Tensor) -> bool:
        """Whether the module still has this form, and a weight of the dtype and on the device of ``x``."""
        weight = norm.weight
        # The op for weights with an offset has no rule for tensor subclasses, such as those of FakeTensorMode.
        is_plain = self.weight_offset == 0.0 or (type(x) in PLAIN_TENSORS and x.stride(-1) == 1)
        return (
            is_plain
            and getattr(norm, self.eps_name, None) == self.eps
            and probed_forwards.get(self.module_class, self.module_class.forward) is self.module_class.forward
            and type(weight) in PLAIN_TENSORS
            and weight.dtype == x.dtype
            and weight.device == x.device
            and weight.shape == x.shape[-1:]
        )


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module is worth probing: it has a weight, an eps, and nothing else."""
    tensors = {name: tensor for name, tensor in (module._parameters | module._buffers).items() if tensor is not None}
    weight = tensors.get("weight")
    if type(weight) is not nn.Parameter or len(tensors) > 1 or module._modules or _eps_name(module) is None:
        return False
    # An empty weight is gathered from other ranks when it is needed.
    return weight.dim() == 1 and weight.numel() > 0 and not weight.is_meta


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def form_of(norm: nn.Module) -> NormForm | None:
    """Return the form of an RMSNorm, or None for other modules."""
    eps_name = _eps_name(norm)
    if eps_name is None or not may_be_norm(norm):
        return None
    eps = float(getattr(norm, eps_name))
    # Inputs of the size of sqrt(eps) show where eps is added.
    cases = [*itertools.product((1.0, eps**0.5), (False, True))]
    for offset in WEIGHT_OFFSETS if norm.weight.numel() % 2 == 0 else (0.0,):  # type: ignore[operator]
        if all(_is_rms_norm(norm, eps, offset, scale, training) for scale, training in cases) and _keeps_dtype(norm):
            probed_forwards[type(norm)] = type(norm).forward
            return NormForm(type(norm), eps_name, eps, offset)
    return None


def _is_rms_norm(norm: nn.Module, eps: float, offset: float, scale: float, training: bool) -> bool:
    """Compare in float32 and with random weights.

    In fewer bits, or with trained weights, norms that subtract the mean or add 1 to their weight can look alike.
    """
    x, weight = _probe_inputs(norm)
    got = _run_copy(norm, scale * x, weight, training)
    x = (scale * x).double()
    want = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)
    return got is not None and agree(got, want)


def _keeps_dtype(norm: nn.Module) -> bool:
    x, weight = (tensor.bfloat16() for tensor in _probe_inputs(norm))
    got = _run_copy(norm, x, weight, training=False)
    return got is not None and got.dtype == x.dtype


def _probe_inputs(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input whose mean is not zero, and weights."""
    device = norm.weight.device
    x, weight = random_tensor(2, 3, norm.weight.numel()).to(device)  # type: ignore[operator,arg-type]
    return 1 + x, 0.5 + weight[0].sigmoid()


@torch.no_grad()
def _run_copy(norm: nn.Module, x: torch.Tensor, weight: torch.Tensor, training: bool) -> torch.Tensor | None:
    """Run the forward of a copy of the module with these weights; None where that fails."""
    try:
        copied = copy.copy(norm)
        vars(copied).update(_parameters={"weight": nn.Parameter(weight)}, training=training)
        got = type(norm).forward(copied, x)
    except Exception:  # modules of any kind are probed
        return None
    return got if isinstance(got, torch.Tensor) else None
