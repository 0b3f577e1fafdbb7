"""Calls of the ops with head tables, and what they are to give in float64."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from rotary_cases import DTYPES, OWN_MEMORY, PAIRINGS, onto, storage_of
from rotary_reference import HEAD_AXIS, TOLERANCES, components_of, pair_norms, pairs_of, unit_rotations

from mrrope.tables.position_rows import packed_rows
from mrrope.tables.query_factors import FACTOR_ROW, factor_rows, factors_in

OPS = torch.ops.mrrope
EPS = 1e-6
Q, K = 0, 1
FACTORS = pytest.mark.parametrize("query_factors", [False, True], ids=["", "factors"])


@dataclass(frozen=True)
class HeadCase:
    """One call with head tables: ``heads`` tables, and as many query and key heads for each as ``per_table`` says."""

    layout: str = "bhsd"
    pairing: str = "halves"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    tokens: int = 5
    tables: int = 3
    per_table: tuple[int, int | None] = (4, 1)
    head_dim: int = 20
    rotary_dim: int = 16
    memory: str = "contiguous"
    choice: str = "one"  # one, sequence, or index
    position_rows: int = 0
    query_factors: bool = False
    seed: int = 0

    def count(self) -> int:
        return {"one": 1, "sequence": self.batch, "index": 4}[self.choice]

    def heads_on(self, device: str) -> list[torch.Tensor]:
        """q, and k where there is one, in poisoned memory."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for per_table in self.per_table:
            if per_table is None:
                continue
            heads = self.tables * per_table
            shape = {
                "bhsd": (self.batch, heads, self.tokens, self.head_dim),
                "bshd": (self.batch, self.tokens, heads, self.head_dim),
                "thd": (self.tokens, heads, self.head_dim),
            }[self.layout]
            x = storage_of(shape, self.memory, self.dtype)
            x.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
            found.append(onto(device, x))
        return found

    def query_heads(self) -> int:
        return self.tables * self.per_table[Q]

    def packed(self) -> torch.Tensor:
        """Random phase steps and factors: any two tables differ in every word of the first row."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = 2 if self.position_rows else 1
        shape = self.count(), rows, self.tables, self.rotary_dim // 2 + 1
        words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
        words[..., -1] = (0.5 + torch.rand(shape[:-1], generator=generator, dtype=torch.float64)).view(torch.int64)
        if self.position_rows:
            words[:, 1] = packed_rows(torch.randint(self.position_rows, words[:, 1, :, 1:].shape, generator=generator))
        if not self.query_factors:
            return words
        factors = 0.5 + torch.rand(self.count(), self.query_heads(), generator=generator, dtype=torch.float64)
        behind = torch.stack([factor_rows(bits, *shape[2:]) for bits in factors.view(torch.int64)])
        return torch.cat([words, *[torch.zeros_like(words)] * (FACTOR_ROW - rows), behind], dim=1)

    def positions(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = (self.tokens,) if self.layout == "thd" else (self.batch, self.tokens)
        shape = (self.position_rows, *shape) if self.position_rows else shape
        return torch.randint(-(2**31), 2**31, shape, generator=generator)

    def index(self) -> torch.Tensor | None:
        if self.choice != "index":
            return None
        length = self.tokens if self.layout == "thd" else self.batch
        generator = torch.Generator().manual_seed(self.seed + 3)
        return torch.randint(self.count(), (length,), generator=generator, dtype=torch.int32)

    def rest(self, device: str) -> tuple[Any, ...]:
        """The op's arguments after the heads."""
        index = self.index()
        return (
            self.positions().to(device),
            self.packed().to(device),
            self.layout,
            self.pairing,
            False,
            None if index is None else index.to(device),
        )

    def rotations(self, n_heads: int, place: int) -> np.ndarray:
        """Return exp(i * angle) times the factors, in float64, ``[(batch,) tokens, heads, pairs]``."""
        table, positions = self.packed(), self.positions()
        batch = 1 if self.layout == "thd" else self.batch
        index = self.index()
        result = np.empty((batch, self.tokens, n_heads, self.rotary_dim // 2), dtype=np.complex128)
        for b in range(batch):
            for token in range(self.tokens):
                number = 0
                if self.choice == "sequence":
                    number = b
                elif index is not None:
                    number = int(index[token if self.layout == "thd" else b])
                for head in range(n_heads):
                    words = table[number, :, head * self.tables // n_heads]
                    at = (token,) if self.layout == "thd" else (b, token)
                    if self.position_rows:
                        of_pairs = torch.stack([positions[(int(row), *at)] for row in words[1, :-1] & 0xFF])
                    else:
                        of_pairs = positions[at].expand(self.rotary_dim // 2)
                    units = [unit_rotations(p, s)[0] for p, s in zip(of_pairs, words[0, :-1, None], strict=True)]
                    result[b, token, head] = np.array(units) * float(words[0, -1:].view(torch.float64))
                    if self.query_factors and place == Q:
                        factors = factors_in(table, n_heads).view(torch.float64)
                        result[b, token, head] *= float(factors[number, head])
        return result[0] if self.layout == "thd" else result

    def rotated(self, x: torch.Tensor, place: int = Q, conjugate: bool = False) -> torch.Tensor:
        """Return q or k, whichever is at that place, rotated in float64."""
        whole = x.detach().cpu().double().numpy()
        by = self.rotations(x.shape[HEAD_AXIS[self.layout]], place)
        by = np.moveaxis(by, -2, -3) if self.layout == "bhsd" else by
        dim = self.rotary_dim
        pairs = pairs_of(whole[..., :dim], self.pairing) * (by.conj() if conjugate else by)
        return torch.from_numpy(np.concatenate([components_of(pairs, self.pairing), whole[..., dim:]], axis=-1))

    def assert_near(self, actual: torch.Tensor, expected: torch.Tensor, extra: float = 0.0) -> None:
        """Assert one rounding of the float64 result, plus an arithmetic error relative to the pair's norm."""
        tolerance = TOLERANCES[actual.dtype]
        norms = pair_norms(expected, self.rotary_dim, self.pairing)
        smallest = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
        allowed = (tolerance.arithmetic + extra) * norms + tolerance.rounding * expected.abs() + smallest
        excess = (actual.detach().cpu().double() - expected).abs() - allowed
        assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"


def head_cases() -> st.SearchStrategy[HeadCase]:
    """Sizes that no vector divides, too, and every kind of choice."""
    batched = st.builds(
        HeadCase,
        layout=st.sampled_from(["bhsd", "bshd"]),
        pairing=st.sampled_from(PAIRINGS),
        dtype=st.sampled_from(DTYPES),
        batch=st.integers(1, 3),
        tokens=st.integers(1, 6),
        tables=st.integers(1, 4),
        per_table=st.tuples(st.sampled_from([1, 3, 4]), st.sampled_from([None, 1, 2])),
        head_dim=st.sampled_from([32, 33, 40, 64]),
        rotary_dim=st.sampled_from([2, 16, 30, 32]),
        memory=st.sampled_from(OWN_MEMORY),
        choice=st.sampled_from(["one", "sequence", "index"]),
        position_rows=st.sampled_from([0, 0, 1, 3]),
        query_factors=st.booleans(),
        seed=st.integers(0, 99),
    )
    packed = batched.map(
        lambda case: replace(
            case, layout="thd", batch=1, choice="one" if case.choice == "sequence" else case.choice, position_rows=0
        )
    )
    return st.one_of(batched, packed)


def norm_weights(case: HeadCase, heads: list[torch.Tensor], over: str) -> list[torch.Tensor]:
    axis = HEAD_AXIS[case.layout]
    sizes = [case.head_dim * (x.shape[axis] if over == "all_heads" else 1) for x in heads]
    generator = torch.Generator().manual_seed(case.seed + 4)
    return [torch.randn(size, generator=generator).to(heads[0]) for size in sizes]
