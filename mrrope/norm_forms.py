"""Which modules are RMSNorms, and how they norm: found by trying."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from mrrope.attention_calls import agree, random

EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon")


@dataclass(frozen=True)
class NormForm:
    """How a module norms: x / rms(x) * (weight + weight_offset) over the last dimension."""

    module_class: type
    eps_name: str
    eps: float
    weight_offset: float

    def is_of(self, norm: nn.Module, x: torch.Tensor) -> bool:
        """Whether a norm of this class still norms ``x`` like this, and gives its dtype."""
        weight = norm.weight
        return (
            getattr(norm, self.eps_name, None) == self.eps
            and type(weight) in (nn.Parameter, torch.Tensor)
            and weight.dtype == x.dtype
            and weight.device == x.device
            and weight.shape == x.shape[-1:]
        )


def form_of(norm: nn.Module) -> NormForm | None:
    """How a module norms, if it is an RMSNorm."""
    tensors = dict(norm.named_parameters()) | dict(norm.named_buffers())
    weight = tensors.get("weight")
    # An empty one is kept elsewhere, in parts, until it is needed.
    if len(tensors) != 1 or type(weight) is not nn.Parameter or weight.dim() != 1 or weight.is_meta or not len(weight):
        return None
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(norm, name, None), float)), None)
    if eps_name is None:
        return None
    eps = float(getattr(norm, eps_name))
    for offset in (0.0, 1.0):
        form = NormForm(type(norm), eps_name, eps, offset)
        # Small ones too, where eps counts.
        if all(_norms_as(form, norm, weight, scale) for scale in (1.0, eps**0.5)):
            return form
    return None


@torch.no_grad()
def _norms_as(form: NormForm, norm: nn.Module, weight: nn.Parameter, scale: float) -> bool:
    """By a double of the module in float32: in fewer bits, and by weights as they are trained, norms that take the mean
    away or add 1 to their weight can look alike."""
    x, tried_weight = random(2, 3, len(weight)).float().to(weight.device)
    x, tried_weight = scale * (1 + x), 1.5 + tried_weight[0].sigmoid()
    double = copy.copy(norm)
    vars(double)["_parameters"] = {"weight": nn.Parameter(tried_weight)}
    try:
        got = form.module_class.forward(double, x)  # type: ignore[attr-defined]
    except Exception:  # it may be anybody's
        return False
    x, exact_weight = x.double(), tried_weight.double() + form.weight_offset
    want = x * (x.square().mean(-1, keepdim=True) + form.eps).rsqrt() * exact_weight
    return isinstance(got, torch.Tensor) and agree(got, want)
