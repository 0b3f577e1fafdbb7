"""Which modules are RMSNorms, and how they norm: found by trying."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrrope.hf.fusion.attention_proxy import agree, random

EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon")

tried_forwards: dict[type, Callable[..., Any]] = {}
"""Of classes of norms. Who puts another in its place later, wants that one called."""


@dataclass(frozen=True)
class NormForm:
    """How a module norms: x / rms(x) * (weight + weight_offset) over the last dimension."""

    module_class: type[nn.Module]
    eps_name: str
    eps: float
    weight_offset: float

    def is_of(self, norm: nn.Module, x: torch.Tensor) -> bool:
        """Whether a norm of this class still norms ``x`` like this, and gives its dtype."""
        weight = norm.weight
        return (
            getattr(norm, self.eps_name, None) == self.eps
            and tried_forwards.get(self.module_class, self.module_class.forward) is self.module_class.forward
            and type(weight) in (nn.Parameter, torch.Tensor)
            and weight.dtype == x.dtype
            and weight.device == x.device
            and weight.shape == x.shape[-1:]
        )


def may_be_a_norm(module: nn.Module) -> bool:
    """Whether a module is worth trying: it has a weight, an eps, and no other parts."""
    tensors = {name: tensor for name, tensor in (module._parameters | module._buffers).items() if tensor is not None}
    weight = tensors.get("weight")
    if type(weight) is not nn.Parameter or len(tensors) > 1 or module._modules or _eps_name(module) is None:
        return False
    # An empty one is kept elsewhere, in parts, until it is needed.
    return weight.dim() == 1 and weight.numel() > 0 and not weight.is_meta


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def form_of(norm: nn.Module) -> NormForm | None:
    """How a module norms, if it is an RMSNorm."""
    eps_name = _eps_name(norm)
    if eps_name is None or not may_be_a_norm(norm):
        return None
    eps = float(getattr(norm, eps_name))
    for offset in (0.0, 1.0):
        form = NormForm(type(norm), eps_name, eps, offset)
        # Small ones too, where eps counts.
        ways = itertools.product((1.0, eps**0.5), (False, True))
        if all(_norms_as(form, norm, scale, training) for scale, training in ways) and _keeps_dtype(norm):
            tried_forwards[type(norm)] = type(norm).forward
            return form
    return None


def _norms_as(form: NormForm, norm: nn.Module, scale: float, training: bool) -> bool:
    """In float32, and not by its own weights: in fewer bits, or by weights as they are trained, norms that take the
    mean away or add 1 to their weight can look alike."""
    x, weight = _tried_with(norm)
    got = _tried(norm, scale * x, weight, training)
    x, exact_weight = (scale * x).double(), weight.double() + form.weight_offset
    want = x * (x.square().mean(-1, keepdim=True) + form.eps).rsqrt() * exact_weight
    return got is not None and agree(got, want)


def _keeps_dtype(norm: nn.Module) -> bool:
    x, weight = (tensor.bfloat16() for tensor in _tried_with(norm))
    got = _tried(norm, x, weight, training=False)
    return got is not None and got.dtype == x.dtype


def _tried_with(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Something to norm, which has a mean, and weights."""
    device = norm.weight.device
    x, weight = random(2, 3, norm.weight.numel()).to(device)  # type: ignore[operator,arg-type]
    return 1 + x, 0.5 + weight[0].sigmoid()


@torch.no_grad()
def _tried(norm: nn.Module, x: torch.Tensor, weight: torch.Tensor, training: bool) -> torch.Tensor | None:
    """What a double of the module with these weights gives, if anything."""
    try:
        double = copy.copy(norm)
        vars(double).update(_parameters={"weight": nn.Parameter(weight)}, training=training)
        got = type(norm).forward(double, x)
    except Exception:  # it may be anybody's
        return None
    return got if isinstance(got, torch.Tensor) else None
