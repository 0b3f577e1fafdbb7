"""mrrope's rotation in the slots that transformers has for kernels, ``from_pretrained(..., use_kernels=True)``."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from torch import nn

import mrrope._core as _core
from mrrope.hf.conventions import is_fused
from mrrope.hf.rotary_layer import RotaryPosEmb

SLOT = "rotary_pos_emb"
"""The name by which transformers looks up a rotary kernel."""
APPLY = "apply_rotary_pos_emb"
PARAMETERS = "(q, k, cos, sin, unsqueeze_dim=1)"

_OPENED: set[str] = set()
"""Model types that were given a slot."""


class InProcess:
    """A repository of ``kernels`` that loads the layer from this process."""

    def load(self) -> type[nn.Module]:
        """Return the layer."""
        return RotaryPosEmb

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InProcess)

    def __hash__(self) -> int:
        return hash(InProcess)

    def __str__(self) -> str:
        return f"mrrope, layer `{RotaryPosEmb.__name__}`"


def register_kernels(*model_types: str) -> None:
    """Register ``rotary_cos_sin`` as the rotary kernel of transformers, for inference and training, CPUs and GPUs.

    Models loaded with ``use_kernels=True`` from then on rotate by it. Other models, and patched ones, do not change. A
    registered kernel stays for the process; calling this again has no effect.

    Args:
        model_types: Families whose modeling code has no slot for a rotary kernel, and gets one: ``gpt_neox``, ``glm``,
            ``cohere``. Models that exist already do not have it.

    Raises:
        ImportError: The package ``kernels`` is not installed, or transformers has no such model type.
        ValueError: The modeling code of a model type applies RoPE in another way, or one of its models is patched.
    """
    try:
        kernels: Any = importlib.import_module("kernels")
    except ImportError as error:
        raise ImportError("register_kernels needs the package kernels: pip install kernels") from error
    repository = InProcess()
    devices: dict[Any, Any] = {"cpu": repository}
    if not _core.build_info()["without_cuda"]:
        # transformers registers its own kernel for all capabilities whenever a model is loaded. The smallest interval
        # that holds a device's capability wins.
        every = kernels.CUDAProperties(min_capability=10, max_capability=9999)
        devices[kernels.Device("cuda", every)] = repository
    kernels.register_kernel_mapping({SLOT: devices})
    for model_type in model_types:
        _open_slot(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), model_type)


def _open_slot(module: ModuleType, model_type: str) -> None:
    """Do to a modeling module what transformers' decorators do to those that have a slot."""
    if model_type in _OPENED:
        return
    integrations: Any = importlib.import_module("transformers.integrations")  # its decorators heed USE_HUB_KERNELS
    slot: Any = getattr(module, APPLY, None)
    if is_fused(slot):
        raise ValueError(f"model_types must be those of models that are not patched, got {model_type!r}: unpatch first")
    if not isinstance(slot, nn.Module):  # some modeling code has the slot, but attention that does not name it
        found = str(inspect.signature(slot)) if inspect.isfunction(slot) else "none"
        if found != PARAMETERS:
            raise ValueError(
                f"model_types must be of modeling code with {APPLY}{PARAMETERS}, got {model_type!r}, which has {found}"
            )
        slot = integrations.use_kernel_forward_from_hub(SLOT)(slot)
        setattr(module, APPLY, slot)
    for value in list(vars(module).values()):
        is_own = isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        if is_own and APPLY in inspect.unwrap(value.forward).__code__.co_names:
            integrations.use_kernelized_func(slot)(value)
    _OPENED.add(model_type)
