"""What ``scale="auto"`` changes in a model: the hooks of a follower, and a ``generate`` that announces lengths."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mrrope.hf.auto_scale.cache_probe import UnfollowableError, find_cached_keys
from mrrope.hf.auto_scale.follower import Follower, GenerateKnowingLengths, followers_in
from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.hf.rope_config import RotaryTable
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

Followers = dict[TableRotaryEmbedding, Follower]


class AutoScale:
    """Attaches a follower to the module that calls a rotary embedding; a :class:`ModulePatch`."""

    def __init__(self, ladders: Mapping[nn.Module, dict[str | None, Ladder[RotaryTable]]] | None = None) -> None:
        self.ladders = ladders or {}

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, Followers]]:
        """Yield the modules that call a rotary embedding of several tables, with its follower."""
        for rotary in [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]:
            if all(len(tables) == 1 for tables in rotary.tables.values()):
                continue
            owner = _owner_of(model, rotary)
            if any(own.changes_with_length for own in rotary.settings.values()):
                raise UnfollowableError("its own table changes with the length of a text already")
            keys = find_cached_keys(owner, rotary, rotary.settings)
            has_several_positions = any(own.sources is not None for own in rotary.settings.values())
            follower = Follower(owner, self.ladders[rotary.original], keys, has_several_positions=has_several_positions)
            yield owner, {rotary: follower.to(next(rotary.original.buffers()).device)}

    def apply(self, module: nn.Module, state: Followers) -> None:
        """Attach followers to a module, and let them choose the tables of its rotary embeddings."""
        for rotary, follower in state.items():
            rotary.follower = follower
            follower.attach(module)

    def undo(self, module: nn.Module) -> None:
        """Detach the followers of a module."""
        for rotary, follower in (self.state_of(module) or {}).items():
            follower.detach()
            rotary.follower = None

    def state_of(self, module: nn.Module) -> Followers | None:
        """Return the followers of a module's rotary embeddings."""
        rotaries = [child for child in module.children() if isinstance(child, TableRotaryEmbedding)]
        followers = {rotary: rotary.follower for rotary in rotaries if isinstance(rotary.follower, Follower)}
        return followers if followers and _takes_cache(module) else None


class AnnouncedLengths:
    """Wraps the ``generate`` of the models that contain a follower; a :class:`ModulePatch`."""

    def find(self, model: nn.Module) -> Iterator[tuple[nn.Module, GenerateKnowingLengths]]:
        """Yield the models that generate, also those in a wrapper such as torch.compile's."""
        for module in list(model.modules()):
            if hasattr(type(module), "generate") and hasattr(module, "generation_config") and followers_in(module):
                yield module, GenerateKnowingLengths(module)

    def apply(self, module: nn.Module, state: GenerateKnowingLengths) -> None:
        """Set ``generate`` on the instance."""
        module.generate = state  # type: ignore[assignment]

    def undo(self, module: nn.Module) -> None:
        """Restore the ``generate`` that the instance had, or else let it use that of its class."""
        state = self.state_of(module)
        assert state is not None
        if state.own is None:
            del module.generate
        else:
            module.generate = state.own  # type: ignore[assignment]

    def state_of(self, module: nn.Module) -> GenerateKnowingLengths | None:
        """Return the wrapped ``generate`` of a model."""
        generate: Any = vars(module).get("generate")
        return generate if isinstance(generate, GenerateKnowingLengths) else None


def _owner_of(model: nn.Module, rotary: nn.Module) -> nn.Module:
    """Return the module that calls a rotary embedding once for all layers."""
    owners = [module for module in model.modules() if any(child is rotary for child in module.children())]
    owners = [module for module in owners if _takes_cache(module)]
    if len(owners) != 1:
        raise UnfollowableError("its rotary embedding is not called once for all layers")
    return owners[0]


def _takes_cache(module: nn.Module) -> bool:
    return "past_key_values" in inspect.signature(module.forward).parameters
