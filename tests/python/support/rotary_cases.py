"""Random calls of rotary: the arguments that hypothesis varies, and the tensors made of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

import mrrope

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["bhsd", "bshd", "thd"]
PAIRINGS = ["halves", "interleaved"]
HEAD_DIMS = [2, 4, 6, 16, 18, 34, 64, 80, 96, 128, 192, 256, 512]
OWN_MEMORY = ["contiguous", "transposed", "padded", "sliced", "unaligned"]
# Fills the memory around a tensor, so that writes outside it show.
POISON = -77.0


def table_of(method: str, rotary_dim: int) -> mrrope.FrequencyTable:
    return mrrope.frequency_table(method, rotary_dim=rotary_dim, base=1e4, original_max_position=2048, scale=8.0)


def storage_of(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of this shape into poisoned memory, with a contiguous last dimension."""
    *outer, last = shape
    if memory == "transposed":
        outer[-2:] = outer[:-3:-1]
        return torch.full((*outer, last), POISON, dtype=dtype).transpose(-2, -3)
    if memory == "padded":
        return torch.full((*outer, last + 8), POISON, dtype=dtype)[..., :last]
    if memory == "sliced":
        return torch.full((*outer[:-1], 2 * outer[-1], last), POISON, dtype=dtype)[..., 1::2, :]
    if memory == "unaligned":
        return torch.full((int(np.prod(shape)) + 2,), POISON, dtype=dtype)[1:-1].view(shape)
    if memory == "expanded":
        return torch.full((1, *shape[1:]), POISON, dtype=dtype).expand(shape)
    return torch.full(shape, POISON, dtype=dtype)


def whole_memory(x: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a view as a 1-D tensor."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    return torch.as_strided(x, (elements,), (1,), 0)


def onto(device: str, view: torch.Tensor) -> torch.Tensor:
    """Copy the whole storage of a view to a device and return the same view of it."""
    return whole_memory(view).to(device).as_strided(view.shape, view.stride(), view.storage_offset())


@dataclass(frozen=True)
class Case:
    """One call of rotary."""

    layout: str = "bhsd"
    pairing: str = "halves"
    dtype: torch.dtype = torch.float32
    method: str = "mrrope_pro"
    batch: int = 2
    tokens: int = 5
    heads: tuple[int, int | None] = (4, 2)
    head_dim: int = 16
    rotary_dim: int = 16
    memory: str = "contiguous"
    positions_shape: str = "matrix"
    position_dtype: torch.dtype = torch.int64
    reach: int = 2**31 - 1
    seed: int = 0

    def shape(self, heads: int) -> tuple[int, ...]:
        return {
            "bhsd": (self.batch, heads, self.tokens, self.head_dim),
            "bshd": (self.batch, self.tokens, heads, self.head_dim),
            "thd": (self.tokens, heads, self.head_dim),
        }[self.layout]

    def table(self) -> mrrope.FrequencyTable:
        return table_of(self.method, self.rotary_dim)

    def positions(self, device: str, seed: int = 0) -> torch.Tensor:
        rows = {"row": (), "broadcast": (1,), "matrix": (self.batch,)}[self.positions_shape]
        shape = (self.tokens,) if self.layout == "thd" else (*rows, self.tokens)
        rng = np.random.default_rng([self.seed, 1, seed])
        values = rng.integers(-self.reach, self.reach, size=shape, dtype=np.int64, endpoint=True)
        return torch.from_numpy(values).to(self.position_dtype).to(device)

    def heads_on(self, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def one(heads: int) -> torch.Tensor:
            view = storage_of(self.shape(heads), self.memory, self.dtype)
            distinct = view[:1] if self.memory == "expanded" else view
            distinct.copy_(torch.randn(distinct.shape, generator=generator, dtype=torch.float64))
            return onto(device, view)

        q_heads, k_heads = self.heads
        return one(q_heads), None if k_heads is None else one(k_heads)

    def with_changes(self, **changes) -> "Case":
        return replace(self, **changes)


EMPTY_DIMENSIONS = [
    (layout, empty)
    for layout in LAYOUTS
    for empty in ("batch", "tokens", "q_heads", "k_heads")
    if (layout, empty) != ("thd", "batch")
]


def empty_case(layout: str, empty: str) -> Case:
    """Return a call whose batch, tokens, or heads of q or k are zero."""
    heads = {"q_heads": (0, 2), "k_heads": (3, 0)}.get(empty, (3, 2))
    return Case(layout=layout, heads=heads, **({empty: 0} if empty in ("batch", "tokens") else {}))


@st.composite
def cases(draw, dtypes=DTYPES, memories=OWN_MEMORY) -> Case:
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    # Full rotation is drawn more often: most models use it, and the fast paths require it.
    rotary_dim = draw(st.sampled_from([head_dim, head_dim, *range(2, head_dim + 1, 2)]))
    position_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    reaches = [10, 2**17, 2**31 - 1] + ([2**63 - 1] if position_dtype == torch.int64 else [])
    return Case(
        layout=draw(st.sampled_from(LAYOUTS)),
        pairing=draw(st.sampled_from(PAIRINGS)),
        dtype=draw(st.sampled_from(dtypes)),
        method=draw(st.sampled_from(["rope", "ntk", "yarn", "mrrope_pro"])),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([1, 2, 7, 63, 65, 130])),
        heads=(draw(st.integers(1, 5)), draw(st.none() | st.integers(1, 4))),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        memory=draw(st.sampled_from(memories)),
        positions_shape=draw(st.sampled_from(["row", "broadcast", "matrix"])),
        position_dtype=position_dtype,
        reach=draw(st.sampled_from(reaches)),
        seed=draw(st.integers(0, 2**16)),
    )
