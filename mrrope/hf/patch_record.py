"""What a patch gave to a model, and a warning where the model is saved without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from mrrope.hf.rope_types import tables_per_layer_or_head
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.hf.swapped_table import SwappedTable
from mrrope.tables.lookup import ModelTables

SAVE = "save_pretrained"
PREFIXES_IN_PEFT = ("base_model.model.", "base_model.")
"""Ends of the names of a model's weights in a wrapper of PEFT: in one that changes layers, and in one that does not."""


@dataclass(frozen=True)
class PatchRecord:
    """The patch of a model, as :func:`mrrope.patch_of` returns it."""

    method: str | None
    """The method's name; None where ready tables were given."""
    scale: float | Literal["auto"]
    """By how much the model is extended; of ready tables their own scale."""
    tables: tuple[ModelTables, ...]
    """The table, head tables or set of the layers that see the whole text; with ``scale="auto"`` those of all scales,
    the model's own first."""
    call: str
    """The call that patches a model like this one. Tables that were given as objects are called ``tables``."""


def record_in(model: nn.Module) -> PatchRecord | None:
    """Return the record of the first patched rotary embedding in a model; None where there is none."""
    for module in model.modules():
        swap = SwappedTable().state_of(module)
        record = module.record if isinstance(module, TableRotaryEmbedding) else swap and swap.tables.record
        if isinstance(record, PatchRecord):
            return record
    return None


class SaveWithWarning:
    """A model's own ``save_pretrained``, which writes nothing of a patch, with a warning at the first call.

    PEFT saves adapters by ``save_pretrained`` of its wrapper, which reads the model's ``state_dict``. A hook of that
    warns where the model was wrapped after the patch.
    """

    def __init__(self, model: nn.Module, *, is_whole: bool) -> None:
        self.model = model
        self.is_whole = is_whole
        """Whether no other model that can be saved contains this one; only the whole warns of PEFT's checkpoints."""
        self.hook: RemovableHandle | None = None
        self.own: Callable[..., Any] | None = vars(model).get(SAVE)
        """What the instance had before, as other libraries set."""
        self.has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._warn(SAVE)
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.model), SAVE)(self.model, *args, **kwargs)

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warn where a wrapper of PEFT collects the weights that it saves."""
        if prefix.endswith(PREFIXES_IN_PEFT):
            self._warn("a checkpoint of PEFT")

    def _warn(self, what: str) -> None:
        record = record_in(self.model)
        if record is None or self.has_warned or _is_in_config(record, self.model):
            return
        self.has_warned = True
        warnings.warn(
            f"{what} writes {type(self.model).__name__} without its patch: {record.call} after from_pretrained patches "
            "it again, and mrrope.export_config returns a configuration that holds the extension",
            UserWarning,
            stacklevel=3,
        )


class SavesWarn:
    """Lets ``save_pretrained`` of patched models warn; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, SaveWithWarning]]:
        """Yield the models that can be saved and contain a patched rotary embedding."""
        found = [module for module in model.modules() if hasattr(type(module), SAVE) and record_in(module) is not None]
        parts = {part for module in found for part in module.modules() if part is not module}
        for module in found:
            yield module, SaveWithWarning(module, is_whole=module not in parts)

    def apply(self, module: nn.Module, state: SaveWithWarning) -> None:
        """Set ``save_pretrained`` on the instance, and the hook of ``state_dict`` on the whole model."""
        setattr(module, SAVE, state)
        if state.is_whole:
            state.hook = module.register_state_dict_pre_hook(state.before_state_dict)  # type: ignore[no-untyped-call]

    def undo(self, module: nn.Module) -> None:
        """Restore what the instance had, or else let it use that of its class."""
        state = self.state_of(module)
        assert state is not None
        if state.hook is not None:
            state.hook.remove()
            state.hook = None
        if state.own is None:
            delattr(module, SAVE)
        else:
            setattr(module, SAVE, state.own)

    def state_of(self, module: nn.Module) -> SaveWithWarning | None:
        """Return the ``save_pretrained`` of a patched model."""
        save = vars(module).get(SAVE)
        return save if isinstance(save, SaveWithWarning) else None


def _is_in_config(record: PatchRecord, model: Any) -> bool:
    """Whether the configuration that is saved holds the tables (:mod:`mrrope.hf.registration`)."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_type = [parameters] if "rope_type" in parameters else parameters.values()
    return any(tables_per_layer_or_head(own) in record.tables for own in by_type)
