"""Generation across the native length in models that drop their cache there.

Phi-3, Phi-3.5-MoE and Phi-4-multimodal may switch from short to long factors of ``longrope`` where a text outgrows
``config.original_max_position_embeddings``. Their ``prepare_inputs_for_generation`` drops the cache at that length,
whether or not there is anything to switch, and the model then reads one token without the text before it. With tables
that do not depend on the length the cache stays.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from mrrope.hf.rope_types import ROPE_TYPES, TABLE_TYPE
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.hf.swapped_table import SwappedTable

PREPARE = "prepare_inputs_for_generation"
SWITCHING_LENGTH = "original_max_position_embeddings"


class PrepareInputsKeepingCache:
    """A model's ``prepare_inputs_for_generation`` without that of the class which drops the cache."""

    def __init__(self, model: nn.Module, *, is_configured: bool = False) -> None:
        self.model = model
        self.is_configured = is_configured
        """Whether the model's configuration selects it, not a patch: ``unpatch`` keeps it."""
        self.own: Callable[..., Any] | None = vars(model).get(PREPARE)
        """What the instance had before, as other libraries set."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.model), PREPARE).__get__(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.__signature__.bind(*args, **kwargs)
        given.apply_defaults()
        named = dict(given.arguments)
        named |= named.pop("kwargs", {})
        dropping = _class_that_drops_cache(type(self.model))
        assert dropping is not None
        return getattr(super(dropping, self.model), PREPARE)(**named)


class KeptCache:
    """Keeps the cache of models that drop it at their native length; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, PrepareInputsKeepingCache]]:
        """Yield the models that drop their cache although their tables do not change with the length."""
        for module in list(model.modules()):
            if drops_cache(module) and self.state_of(module) is None and _has_fixed_tables(module):
                yield module, PrepareInputsKeepingCache(module)

    def apply(self, module: nn.Module, state: PrepareInputsKeepingCache) -> None:
        """Set ``prepare_inputs_for_generation`` on the instance."""
        setattr(module, PREPARE, state)

    def undo(self, module: nn.Module) -> None:
        """Restore what the instance had, or else let it use that of its class."""
        state = self.state_of(module)
        assert state is not None
        if state.own is None:
            delattr(module, PREPARE)
        else:
            setattr(module, PREPARE, state.own)

    def state_of(self, module: nn.Module) -> PrepareInputsKeepingCache | None:
        """Return what a patch set on a model."""
        prepare = vars(module).get(PREPARE)
        return prepare if isinstance(prepare, PrepareInputsKeepingCache) and not prepare.is_configured else None


def drops_cache(model: nn.Module) -> bool:
    """Whether the class of a model drops its cache at a length that its configuration states."""
    return _class_that_drops_cache(type(model)) is not None


def whole_that_drops_cache(model: nn.Module) -> str | None:
    """Return the name of the class that a base model is a part of where that drops the cache, or None.

    Such as Phi3ForCausalLM for Phi3Model, from which it cannot be reached. With mrrope's rope types it keeps its cache
    (:mod:`mrrope.hf.registration`).
    """
    modeling = sys.modules.get(type(model).__module__)
    parameters = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    is_base_model = getattr(model, "base_model", None) is model
    if modeling is None or not is_base_model or parameters.get("rope_type") in (*ROPE_TYPES, TABLE_TYPE):
        return None
    classes = [each for each in vars(modeling).values() if isinstance(each, type)]
    own = [each for each in classes if each.__module__ == modeling.__name__]
    return next((each.__name__ for each in own if _class_that_drops_cache(each) is not None), None)


def _class_that_drops_cache(model_class: type) -> type | None:
    for each in model_class.__mro__:
        if PREPARE in vars(each):
            return each if SWITCHING_LENGTH in inspect.unwrap(vars(each)[PREPARE]).__code__.co_names else None
    return None


def _has_fixed_tables(model: nn.Module) -> bool:
    """Whether no rotary embedding of a model keeps its own code, which may switch its frequencies."""
    swaps = [swap for swap in map(SwappedTable().state_of, model.modules()) if swap is not None]
    if any(swap.tables.by_layer_type.keys() != swap.tables.settings.keys() for swap in swaps):
        return False
    return bool(swaps) or any(isinstance(module, TableRotaryEmbedding) for module in model.modules())
