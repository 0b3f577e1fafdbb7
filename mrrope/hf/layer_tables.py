"""A table per layer: hooks that give every attention module the table of its own layer.

A rotary embedding of transformers returns one embedding for all layers. With tables by layer
(:mod:`mrrope.hf.handoff`) it returns those of all layers, and a forward pre-hook on each attention module replaces them
by the layer's before the model's own code sees them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from mrrope.hf import handoff
from mrrope.hf.model_layers import key_layer, layer_index
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

EMBEDDINGS = "position_embeddings"
"""The parameter by which attention modules of transformers take cosines and sines."""


@dataclass(frozen=True)
class LayerTable:
    """A forward pre-hook that replaces tables by layer in ``position_embeddings`` by those of one layer."""

    layer: int
    place: int
    """The place of ``position_embeddings`` among the positional arguments."""
    in_one_tensor: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if EMBEDDINGS in kwargs:
            return args, {**kwargs, EMBEDDINGS: self._of_layer(kwargs[EMBEDDINGS])}
        if self.place < len(args):
            return (*args[: self.place], self._of_layer(args[self.place]), *args[self.place + 1 :]), kwargs
        return None

    def _of_layer(self, embedding: Any) -> Any:
        return handoff.of_layer(embedding, self.layer, in_one_tensor=self.in_one_tensor)


class LayerTables:
    """Registers the hooks of rotary embeddings with tables by layer; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, LayerTable]]:
        """Yield the modules that take tables by layer, each with its hook.

        Raises:
            ValueError: the layers of the model cannot be told apart.
        """
        for rotary in [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]:
            if not rotary.is_by_layer:
                continue
            for owner in callers_of(model, rotary):
                if reason := _indistinct_layers(owner, rotary):
                    raise ValueError(f"method must be one table for all layers of {type(model).__name__}: {reason}")
                for module, layer in _modules_of_layers(owner).items():
                    table_of = key_layer(rotary.config, layer)  # queries rotate as the keys that they meet
                    yield module, LayerTable(table_of, _place_in(module), rotary.in_one_tensor)

    def apply(self, module: nn.Module, state: LayerTable) -> None:
        """Register the hook, ahead of others: they may look into what it replaces."""
        module.register_forward_pre_hook(state, prepend=True, with_kwargs=True)

    def undo(self, module: nn.Module) -> None:
        """Remove the hook."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, LayerTable):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    def state_of(self, module: nn.Module) -> LayerTable | None:
        """Return the hook of a module."""
        return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, LayerTable)), None)


def callers_of(model: nn.Module, rotary: nn.Module) -> list[nn.Module]:
    """Return the modules that call a rotary embedding: its parents, or theirs where those are mere containers."""
    parents = {child: module for module in model.modules() for child in module.children()}
    callers = [module for module in model.modules() if any(child is rotary for child in module.children())]
    while any(isinstance(caller, (nn.ModuleList, nn.ModuleDict)) for caller in callers):
        callers = [parents[each] if isinstance(each, (nn.ModuleList, nn.ModuleDict)) else each for each in callers]
    return callers


def _modules_of_layers(owner: nn.Module) -> dict[nn.Module, int]:
    """Return the modules that take position_embeddings and know their layer. A hook on nested ones does no harm."""
    layers = {module: layer_index(module) for module in owner.modules() if EMBEDDINGS in _parameters(module)}
    return {module: layer for module, layer in layers.items() if layer is not None}


def _indistinct_layers(owner: nn.Module, rotary: TableRotaryEmbedding) -> str | None:
    """Return why the attention modules in ``owner`` do not each belong to one known layer, or None where they do."""
    modules = _modules_of_layers(owner)
    count = rotary.config.num_hidden_layers
    innermost: set[tuple[type, int]] = set()
    covered: set[nn.Module] = set()
    for module, layer in modules.items():
        parts = set(module.modules())
        covered |= parts
        name = type(module).__name__
        if "layer_idx" in _parameters(module):
            return f"its {name} serves several layers"
        if not 0 <= layer < count:
            return f"its {name} has the layer_idx {layer}, and the configuration {count} layers"
        if any(other in parts for other in modules if other is not module):
            continue
        if (type(module), layer) in innermost:
            return f"it has two of {name} with the layer_idx {layer}"
        innermost.add((type(module), layer))
    functions = {function.name for function in rotary.functions}
    for module in owner.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if module not in covered and code is not None and functions & set(code.co_names):
            return f"its {type(module).__name__} does not know its layer"
    return None if modules else "none of its modules takes position_embeddings and knows its layer"


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(type(module).forward).parameters)


def _place_in(module: nn.Module) -> int:
    return list(_parameters(module)).index(EMBEDDINGS) - 1  # without self
