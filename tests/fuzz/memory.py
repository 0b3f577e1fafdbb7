"""The memory that a call reads and writes: copied whole, and looked at for what changed."""

from __future__ import annotations

from typing import Any

from cases import whole_memory

from fuzz.attempts import Arguments, Tensor
from fuzz.exact import bits


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """All tensors of a call by name."""
    found = {}
    for name, value in arguments.items():
        items = {name: value} if not isinstance(value, list) else {f"{name}[{i}]": x for i, x in enumerate(value)}
        found |= {key: x for key, x in items.items() if isinstance(x, Tensor)}
    return found


def copied(arguments: Arguments, device: str | None = None) -> Arguments:
    """The same call on copies of all memory: views of one storage stay views of one."""
    memories: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, list):
            return [copy(item) for item in x]
        if not isinstance(x, Tensor):
            return x
        if x.is_meta or x.untyped_storage().nbytes() == 0:
            return x.clone() if device is None else x.to(device, copy=True)
        key = x.untyped_storage().data_ptr()
        if key not in memories:
            memory = whole_memory(x)
            memories[key] = memory.clone() if device is None else memory.to(device, copy=True)
        return memories[key].as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: copy(value) for name, value in arguments.items()}


def storages(arguments: Arguments, before: Arguments) -> list[tuple[str, Tensor, Tensor]]:
    """Every memory of a call, by the name of one that looks into it, now and as it was."""
    now, was = tensors_of(arguments), tensors_of(before)
    distinct = {x.untyped_storage().data_ptr(): name for name, x in reversed(now.items()) if x.numel()}
    return [(name, whole_memory(now[name]), whole_memory(was[name])) for name in distinct.values()]


def touched(now: Tensor, was: Tensor, written: list[Tensor]) -> Tensor:
    """Whether memory has changed that is none of what is written."""
    changed = bits(now) != bits(was)
    for x in written:
        if x.untyped_storage().data_ptr() == now.untyped_storage().data_ptr():
            changed.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return changed.any()
