"""The storages that a call reads and writes: clone them and find changes."""

from __future__ import annotations

from typing import Any

from rotary_cases import whole_memory

from fuzz.float64_reference import as_integers
from fuzz.op_call import Arguments, Tensor


def tensors_by_name(arguments: Arguments) -> dict[str, Tensor]:
    """Return all tensors among the arguments by name."""
    found = {}
    for name, value in arguments.items():
        items = {name: value} if not isinstance(value, list) else {f"{name}[{i}]": x for i, x in enumerate(value)}
        found |= {key: x for key, x in items.items() if isinstance(x, Tensor)}
    return found


def cloned(arguments: Arguments, device: str | None = None) -> Arguments:
    """Return the arguments on copies of their storages; views of one storage stay views of one."""
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


def storages_now_and_before(arguments: Arguments, before: Arguments) -> list[tuple[str, Tensor, Tensor]]:
    """Return every distinct storage with the name of one argument in it: after the call and before."""
    now, was = tensors_by_name(arguments), tensors_by_name(before)
    distinct = {x.untyped_storage().data_ptr(): name for name, x in reversed(now.items()) if x.numel()}
    return [(name, whole_memory(now[name]), whole_memory(was[name])) for name in distinct.values()]


def changed_outside(now: Tensor, was: Tensor, written: list[Tensor]) -> Tensor:
    """Return whether a storage changed outside the tensors that the call may write."""
    changed = as_integers(now) != as_integers(was)
    for x in written:
        if x.untyped_storage().data_ptr() == now.untyped_storage().data_ptr():
            changed.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return changed.any()
