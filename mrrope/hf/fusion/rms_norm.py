"""RMSNorms of a patched model by a fused kernel.

The RMSNorms of transformers are written in elementwise ops: run eagerly, each takes half a dozen kernels or more, all
bandwidth-bound, and most round twice. ``torch.nn.functional.rms_norm``, or :mod:`mrrope.hf.fusion.offset_norm` where
the norm adds 1 to its weight, is one kernel and rounds once. Every call checks what may have changed since the patch
(eps, the class's forward, dtype and sharding of the weight) and falls back to the model's own code where it has.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from mrrope.hf.fusion.class_swap import restore_class, subclass_with, swap_class
from mrrope.hf.fusion.norm_probe import NormForm, form_of, may_be_norm
from mrrope.hf.fusion.offset_norm import offset_rms_norm

FORM = "_mrrope_norm"
"""The attribute of a fused norm that holds its :class:`NormForm`."""
MODULE_ATTRIBUTES = vars(nn.Module()).keys()


class FusedNorms:
    """Swaps the class of every RMSNorm; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, NormForm]]:
        """Yield the RMSNorms of a model, those of q and k included, with their forms."""
        forms: dict[Hashable, NormForm | None] = {}
        for module in [module for module in model.modules() if may_be_norm(module)]:
            # nn.RMSNorm is fused already. An instance's own forward, as accelerate sets, calls the one it replaced.
            if isinstance(module, nn.RMSNorm) or "forward" in vars(module):
                continue
            kind = _kind_of(module)
            if kind not in forms:
                forms[kind] = form_of(module)
            form = forms[kind]
            if form is not None:
                yield module, form

    def apply(self, module: nn.Module, state: NormForm) -> None:
        """Swap the class of a norm."""
        swap_class(module, FORM, state, fused_class)

    def undo(self, module: nn.Module) -> None:
        """Restore the class of a norm."""
        restore_class(module, FORM)

    def state_of(self, module: nn.Module) -> NormForm | None:
        """Return the form of a norm whose class is swapped."""
        return vars(module).get(FORM)


@functools.cache
def fused_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a norm's class that runs a fused kernel."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Inductor fuses the model's own code into one kernel, without guards on the conditions below.
        if not torch.compiler.is_compiling():
            form: NormForm | None = vars(self).get(FORM)
            if form is not None and not kwargs and _can_be_fused(self, form, *args):
                return _fused(args[0], self.weight, form)  # type: ignore[arg-type]
        normed: torch.Tensor = original.forward(self, *args, **kwargs)
        return normed

    return subclass_with(forward, original, fused_class)


def _fused(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    if form.weight_offset == 0.0:
        return nn.functional.rms_norm(x, weight.shape, weight, form.eps)
    return offset_rms_norm(x, weight, form.eps, form.weight_offset)


def _can_be_fused(norm: nn.Module, form: NormForm, x: torch.Tensor, *more: Any) -> bool:
    has_gate = bool(more)
    return not has_gate and form.is_of(norm, x) and not _is_autocast(x.device.type)


def _is_autocast(device_type: str) -> bool:
    return torch.amp.autocast_mode.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _kind_of(norm: nn.Module) -> Hashable:
    """Return a key under which norms compute the same function of their weights: one probe per key is enough."""
    own = {name: value for name, value in vars(norm).items() if name not in MODULE_ATTRIBUTES}
    values = {name: value if isinstance(value, (bool, int, float, str)) else id(value) for name, value in own.items()}
    weight: Any = norm.weight
    return type(norm), weight.shape, weight.device, frozenset(values.items())
