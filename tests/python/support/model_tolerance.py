"""Tolerance for two correctly rounded results of one model, derived from the model itself.

Models amplify rounding errors by very different factors: models that are recurrent in depth a hundred times as much as
others.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mrrope.hf.fusion.norm_probe import form_of

DRAWS = 3


def relative(got: Tensor, want: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((got - want).detach().double().norm() / want.detach().double().norm())


@torch.no_grad()
def rounding_noise(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> float:
    """Return the largest relative change of ``run(model)`` when every weight and buffer is off by one rounding.

    The signs are random, in ``DRAWS`` draws. Frequencies are among the buffers, so the error of float32 angles, which
    grows with the position, is included. Of norms by 1 + weight the sum is off by one rounding.
    """
    want = run(model)
    eps = torch.finfo(want.dtype).eps
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    kept = [tensor.clone() for tensor in tensors]
    offsets = {id(norm.weight): form.weight_offset for norm in model.modules() if (form := form_of(norm)) is not None}
    generator = torch.Generator().manual_seed(0)
    changes = []
    for _ in range(DRAWS):
        for tensor, value in zip(tensors, kept, strict=True):
            sign = 2.0 * torch.randint(0, 2, value.shape, generator=generator).to(value.device) - 1.0
            tensor.copy_(value + (value + offsets.get(id(tensor), 0.0)) * eps * sign)
        changes.append(relative(run(model), want))
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)
    return max(changes)


def tolerance(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> float:
    """Return the largest relative error allowed against ``run(model)``: twice the rounding noise, once per result.

    Patched models of the causal-LM families of transformers 5.17 use at most a third of it, Qwen3-Next and Qwen3.5,
    whose recurrence amplifies the rounding of norms, up to 0.76.
    """
    return 2.0 * rounding_noise(model, run)
