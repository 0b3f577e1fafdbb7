"""The cases of ``mrrope bench`` and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from mrrope.benchmark import baseline
from mrrope.benchmark.timing import copy_buffers
from mrrope.tables.frequency_table import FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables

LAYOUTS = ("projected", "bhsd", "bshd", "thd")
"""``projected`` has the shape of bhsd and the memory order of bshd, as a model's q and k projections have."""
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    tokens: int
    q_heads: int = 32
    k_heads: int = 8
    dtype: str = "bfloat16"
    head_dim: int = 128
    rotary_dim: int = 128
    layout: str = "projected"
    pairing: str = "halves"
    backward: bool = False

    @property
    def element_type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def bytes(self) -> int:
        """Bytes read and written, each element once."""
        return 2 * self.tokens * (self.q_heads + self.k_heads) * self.head_dim * self.element_type.itemsize

    @property
    def name(self) -> str:
        usual = Case(self.tokens)
        parts = [f"{self.tokens} x {self.q_heads}/{self.k_heads}"]
        parts += [f"{self.head_dim} wide"] if self.head_dim != usual.head_dim else []
        parts += [f"{self.rotary_dim} rotated"] if self.rotary_dim != self.head_dim else []
        parts += [str(value) for value in (self.dtype, self.layout, self.pairing) if value not in vars(usual).values()]
        return ", ".join(parts + ["backward"] * self.backward)

    @property
    def tables(self) -> tuple[FrequencyTable, ...]:
        """A ladder of scales; the last is the one for ops that take one table.

        The attention factor is 1: repeated in-place rotation would otherwise overflow float16 within a second.
        """
        return tuple(
            frequency_table(
                "mrrope_pro",
                rotary_dim=self.rotary_dim,
                base=5e5,
                original_max_position=8192,
                scale=scale,
                attention_factor=1.0,
            )
            for scale in SCALES
        )


def _wide(head_dim: int, **options: int | str) -> Case:
    return Case(8192, head_dim=head_dim, rotary_dim=head_dim, **options)  # type: ignore[arg-type]


CASES = {
    "cuda": [
        *(Case(tokens) for tokens in (1, 16, 64, 256, 1024, 8192, 131072)),
        Case(131072, 4, 1),
        Case(8192, 64, 8),
        *(Case(8192, layout=layout) for layout in LAYOUTS[1:]),
        *(_wide(head_dim) for head_dim in (64, 80, 96, 256)),
        *(Case(tokens, 9, 3, head_dim=64, rotary_dim=64) for tokens in (1, 64, 1024, 8192, 131072)),
        Case(8192, rotary_dim=64),
        Case(8192, pairing="interleaved"),
        Case(8192, dtype="float16"),
        Case(8192, dtype="float32"),
        Case(8192, backward=True),
        Case(64, layout="thd"),
        Case(64, 4, 1),
    ],
    "cpu": [
        *(Case(tokens, dtype=dtype) for tokens in (1, 256, 4096) for dtype in ("float32", "bfloat16", "float16")),
        Case(4096, dtype="float32", layout="bhsd"),
        Case(4096, dtype="float32", rotary_dim=64),
        Case(4096, dtype="float32", pairing="interleaved"),
        Case(4096, dtype="float32", backward=True),
    ],
}


class Positions:
    """Inputs that all layers of a model share, hot in L2: positions, tables and the cos/sin layouts of the peers."""

    def __init__(self, case: Case, device: str, first: int = 0) -> None:
        self.case = case
        self.device = device
        self.first = first
        self.table = case.tables[-1].to(device)
        self.tables = case.tables
        self.positions = torch.arange(first, first + case.tokens, device=device)
        self.index = torch.full((case.tokens,), len(SCALES) - 1, device=device, dtype=torch.int32)
        # A table for each key head, as packed for the ops: all alike, so that errors compare, but not shared in memory.
        self.head_tables = self.table.packed(torch.device(device)).repeat(1, 1, case.k_heads, 1)

    @cached_property
    def query_factor_tables(self) -> torch.Tensor:
        """The head tables with a factor of 1 for each query head, packed: repeated rotation overflows by others."""
        tables = HeadTables([self.table] * self.case.k_heads, query_factors=[1.0] * self.case.q_heads)
        return tables.packed(torch.device(self.device))

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For transformers: [1, tokens, rotary_dim] each, both halves, in the dtype of the heads."""
        cos, sin = baseline.cos_sin(self.positions, self.table, self.case.element_type)
        return cos[None], sin[None]

    @cached_property
    def cache(self) -> torch.Tensor:
        """For vLLM and FlashInfer: [positions, rotary_dim], cosines then sines, float32, from position 0 on."""
        cos, sin = baseline.cos_sin(
            torch.arange(self.first + self.case.tokens, device=self.device), self.table, torch.float32
        )
        half = self.case.rotary_dim // 2
        return torch.cat([cos[:, :half], sin[:, :half]], dim=-1)

    @cached_property
    def rounded_cache(self) -> torch.Tensor:
        """``cache`` in the dtype of the heads."""
        return self.cache.to(self.case.element_type)

    @cached_property
    def angles(self) -> torch.Tensor:
        """For TransformerEngine: [tokens, 1, 1, rotary_dim], float32."""
        angles = self.positions[:, None].double() * self.table.inv_freq.to(self.device)
        return torch.cat([angles, angles], dim=-1).float()[:, None, None]


class Heads:
    """q and k in a layout, and buffers for a copy of the same bytes."""

    def __init__(self, case: Case, shared: Positions) -> None:
        self.case = case
        self.shared = shared

        def heads(count: int) -> torch.Tensor:
            by_token = case.layout != "bhsd"
            shape = (1, case.tokens, count) if by_token else (1, count, case.tokens)
            x = torch.randn((*shape, case.head_dim), device=shared.device, dtype=case.element_type)
            if case.layout == "thd":
                return x[0]
            return x.transpose(1, 2) if case.layout == "projected" else x

        self.q, self.k = heads(case.q_heads), heads(case.k_heads)
        self.copies = copy_buffers(case.bytes, shared.device)

    @property
    def layout(self) -> str:
        """The layout argument of the op."""
        return "bhsd" if self.case.layout == "projected" else self.case.layout

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """A view [1, heads, tokens, head_dim]."""
        if self.layout == "thd":
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.layout == "bshd" else x

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """A view [1, tokens, heads, head_dim]."""
        return self.by_head(x).transpose(1, 2)

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k by head, for ops that rotate in place."""
        return self.by_head(self.q), self.by_head(self.k)
