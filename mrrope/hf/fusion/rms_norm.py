"""RMSNorms of a model, by one kernel each.

Transformers writes a norm out; run eagerly, that takes half a dozen kernels or more, each of which goes through memory,
and rounds twice. In a patched model such a norm calls torch's own, which is one kernel and rounds once. Which modules
are norms of that kind is found by trying; some of what may change later is looked at in every call, and normed by the
model's own code then: another eps, another forward of the class, weights that are sharded or in another dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from mrrope.hf.fusion.class_swap import change_class, change_class_back, derived
from mrrope.hf.fusion.norm_probe import NormForm, form_of, may_be_a_norm
from mrrope.hf.fusion.qk_norm import deferred_norms_of

FORM = "_mrrope_norm"
"""Where a norm keeps how it norms."""
WHAT_MODULES_HAVE = vars(nn.Module()).keys()


@functools.cache
def class_in_one_kernel(original: type[nn.Module]) -> type[nn.Module]:
    """The class of a norm, but normed by one kernel."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The compiler makes one kernel of the model's own code, and needs no guards for what else is asked here.
        if not torch.compiler.is_compiling():
            form: NormForm | None = vars(self).get(FORM)
            if form is not None and not kwargs and _may_be_fused(self, form, *args):
                return nn.functional.rms_norm(args[0], self.weight.shape, self.weight, form.eps)  # type: ignore[arg-type]
        normed: torch.Tensor = original.forward(self, *args, **kwargs)
        return normed

    return derived(original, forward, class_in_one_kernel)


def _may_be_fused(norm: nn.Module, form: NormForm, x: torch.Tensor, *more: Any) -> bool:
    takes_more = bool(more)  # such as a gate
    return not takes_more and form.is_of(norm, x) and not _is_autocast(x.device.type)


def _is_autocast(device_type: str) -> bool:
    return torch.amp.autocast_mode.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def fuse_all_norms(model: nn.Module) -> None:
    """Makes the RMSNorms of a patched model norm by one kernel each, but for those that norm and rotate at once."""
    waiting = {norm for module in model.modules() for norm in deferred_norms_of(module)}
    candidates = [module for module in model.modules() if may_be_a_norm(module) and module not in waiting]
    forms: dict[Hashable, NormForm | None] = {}
    for module in filter(_has_code_of_its_own, candidates):
        # Trying takes its time, and most norms of a model are alike.
        kind = _what_tells_apart(module)
        if kind not in forms:
            forms[kind] = form_of(module)
        form = forms[kind]
        # Torch's takes a weight of the input's dtype, in which 1 + weight would be rounded.
        if form is not None and form.weight_offset == 0:
            fuse_norm(module, form)


def _what_tells_apart(norm: nn.Module) -> Hashable:
    """Modules with the same of this compute the same from the same weights."""
    own = {name: value for name, value in vars(norm).items() if name not in WHAT_MODULES_HAVE}
    values = {name: value if isinstance(value, (bool, int, float, str)) else id(value) for name, value in own.items()}
    weight: Any = norm.weight
    return type(norm), weight.shape, weight.device, frozenset(values.items())


def _has_code_of_its_own(module: nn.Module) -> bool:
    # A forward that was put over its class's, as by accelerate, would go on calling what it was put over.
    return not isinstance(module, nn.RMSNorm) and "forward" not in vars(module)


def fuse_norm(norm: nn.Module, form: NormForm) -> None:
    """Makes one norm use one kernel."""
    change_class(norm, FORM, form, class_in_one_kernel)


def norm_fused_in(module: nn.Module) -> NormForm | None:
    """How a module norms, if :func:`fuse_norm` changed it."""
    return vars(module).get(FORM)


def restore_norm(module: nn.Module) -> None:
    """Undoes :func:`fuse_norm`."""
    change_class_back(module, FORM)
