"""Calls of the ops with a cache: where their tokens go, copies of their tensors, and checks that they all pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cache_reference import FLOAT8
from rotary_cases import Case, onto, storage_of, whole_memory
from tensor_bits import bits_of

import mrrope

LEFT_OUT = [-1, -9]


def random_slots(case: Case, paged: bool, rng: np.random.Generator) -> tuple[int, int, torch.Tensor]:
    """Return the blocks and the block size of a cache, and a slot of it for every token; some are left out."""
    sequences = 1 if case.layout == "thd" else case.batch
    blocks, block_size = (-(-sequences * case.tokens // 4) + 2, 5) if paged else (sequences, case.tokens + 3)
    if paged:
        places = rng.permutation(blocks * block_size)[: sequences * case.tokens].reshape(sequences, case.tokens)
    else:
        places = np.stack([rng.permutation(block_size)[: case.tokens] for _ in range(max(1, sequences))])[:sequences]
    places = np.where(rng.random(places.shape) < 0.2, rng.choice(LEFT_OUT, places.shape), places)
    slots = torch.from_numpy(places.astype(np.int64))
    return blocks, block_size, slots[0] if case.layout == "thd" else slots


def cached_tokens(slots: torch.Tensor, static_length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are cached, and their slots, counted over all blocks.

    Args:
        slots: one per token.
        static_length: of a sequence in a static cache; None for a paged one.
    """
    flat = slots.reshape(-1).long()
    kept = flat >= 0
    if static_length is not None:
        flat = flat + static_length * (torch.arange(len(flat), device=flat.device) // max(1, slots.shape[-1]))
    return kept, flat[kept]


def cache_storage(shape: tuple[int, ...], memory: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a view of this shape into poisoned memory on a device, of any dtype."""
    view = onto(device, storage_of(shape, memory, torch.float32 if dtype in FLOAT8 else dtype))
    return whole_memory(view).to(dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def near_and_far_blocks(shape: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float8 caches of two small blocks; those of the second are more than 2**31 elements apart.

    On the CPU most of these pages are never touched, and so never allocated.
    """
    near = torch.zeros(shape, device=device).to(torch.float8_e4m3fn)
    stride = 2**31 + 64
    memory = torch.empty(stride + 64, dtype=torch.uint8, device=device).view(near.dtype)
    return near, memory.as_strided(shape, (stride, *near.stride()[1:]))


class CacheCall(ABC):
    """One call with everything it reads and writes, as attributes."""

    op: ClassVar[Callable[..., torch.Tensor]]
    inputs: ClassVar[tuple[str, ...]]
    """Names of the tensors that are rotated or cached."""
    positions: torch.Tensor
    slots: torch.Tensor
    table: mrrope.FrequencyTable

    @abstractmethod
    def arguments(self) -> dict[str, Any]: ...

    @abstractmethod
    def written(self) -> list[torch.Tensor]:
        """Return the tensors that the call writes, the rotated q first."""

    @abstractmethod
    def check(self, before: "CacheCall") -> None:
        """Assert all results of the call, given the tensors before it."""

    def copied(self) -> "CacheCall":
        """Return the same call on copies of its tensors' memory."""
        copied = object.__new__(type(self))
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                value = whole_memory(value).clone().as_strided(value.shape, value.stride(), value.storage_offset())
            setattr(copied, name, value)
        return copied

    def memories(self) -> list[torch.Tensor]:
        """Return copies of the bytes of all tensors and of the memory around them."""
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return [bits_of(whole_memory(x)).clone() for x in tensors]

    def run_and_check(self) -> None:
        before = self.copied()
        result = self.op(**self.arguments())
        assert result is self.written()[0]
        self.check(before)

    def assert_gradient_refused(self, name: str) -> None:
        """Assert that the call raises and writes nothing where a tensor requires grad, and runs without gradients."""
        getattr(self, name).requires_grad_()
        before = self.memories()
        with pytest.raises(RuntimeError, match=f"{name} requires grad, and caches are written without gradients"):
            self.op(**self.arguments())
        assert all(torch.equal(x, y) for x, y in zip(self.memories(), before, strict=True))
        with torch.no_grad():
            self.run_and_check()

    def assert_graph_replays(self, others: Iterable["CacheCall"]) -> None:
        """Assert that a graph of the call computes what others do, once their inputs and slots are copied to it."""
        self.table.to(self.slots.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.op(**self.arguments())
        for other in others:
            for name in (*self.inputs, "positions", "slots"):
                getattr(self, name).copy_(getattr(other, name))
            before = self.copied()
            graph.replay()
            torch.cuda.synchronize()
            self.check(before)

    def assert_runs_on_the_current_stream(self) -> None:
        self.table.to(self.slots.device)
        late = self.copied()
        for name in self.inputs:
            getattr(late, name).zero_()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # The heads are written late on this stream, so that a kernel on another stream would read zeros.
            torch.cuda._sleep(200_000_000)
            for name in self.inputs:
                getattr(late, name).copy_(getattr(self, name))
            late.op(**late.arguments())
        stream.synchronize()
        late.check(self)


def assert_compiled_like_eager(attend: Callable[..., torch.Tensor], width: int, backend: str, device: str) -> None:
    """Assert that attend(x of this width, positions, slots, key_cache, value_cache) gives the same when compiled."""
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(device)
        slots = torch.randperm(16, generator=generator)[:tokens].to(device)
        positions = torch.arange(tokens, device=device)
        caches = [[torch.zeros(4, 4, 2, 16, dtype=torch.float64, device=device) for _ in range(2)] for _ in range(2)]
        expected = attend(x, positions, slots, *caches[0])
        actual = compiled(x, positions, slots, *caches[1])
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-12)
        for ours, theirs in zip(*caches, strict=True):
            assert ours.abs().sum() > 0
            torch.testing.assert_close(theirs, ours, rtol=1e-14, atol=1e-14)


def written_arguments(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments if argument.is_write]
