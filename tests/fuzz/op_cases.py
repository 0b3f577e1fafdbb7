"""Random op calls: the fields that vary, and the tensors made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from rotary_cases import POISON, onto, storage_of
from rotary_reference import HEAD_AXIS

import mrrope
from fuzz.shrinking import choice
from mrrope.tables.frequency_table import METHOD_TRAITS, OpTable, packed_stack
from mrrope.tables.position_rows import packed_rows

OPS = (
    "rotary",
    "rotary_",
    "rescale_cache_",
    "rotary_and_cache_",
    "qk_norm_rotary",
    "qk_norm_rotary_",
    "qk_norm_rotary_and_cache_",
    "qkv_rotary",
    "learnable_rotary",
    "mla_rotary",
    "mla_rotary_and_cache_",
    "rotary_cos_sin",
    "chain",
)
CACHING = ("rotary_and_cache_", "qk_norm_rotary_and_cache_")
ROTATING = ("rotary", "rotary_", "qk_norm_rotary", "qk_norm_rotary_")
IN_PLACE = ("rotary_", "rescale_cache_", *CACHING, "qk_norm_rotary_", "mla_rotary_and_cache_", "chain")
WITH_KEYS = (*CACHING, "qkv_rotary", "chain")  # k has at least one head
WITH_QUERY_FACTORS = (*ROTATING, *CACHING, "qkv_rotary")
WITH_HEAD_TABLES = (*ROTATING, *WITH_KEYS, "rescale_cache_", "learnable_rotary")
DIFFERENTIABLE = (
    "rotary", "rotary_", "qk_norm_rotary", "qkv_rotary", "learnable_rotary", "mla_rotary", "rotary_cos_sin"
)  # fmt: skip
COMPILED = ("rotary", "rotary_", "qk_norm_rotary", "mla_rotary", "rotary_cos_sin")
WITH_POSITION_ROWS = (*ROTATING, *CACHING, "rescale_cache_")
# The ops that take q, or a view of it, as this argument.
ALIASES = {
    "k": (*ROTATING, *CACHING, "mla_rotary_and_cache_", "rotary_cos_sin"),
    "v": (*CACHING, "mla_rotary_and_cache_"),
    "gate": ("qk_norm_rotary_and_cache_",),
}
METHODS = tuple(name for name, method in METHOD_TRAITS.items() if method.needs in (None, "beta"))
# Limit of a case's size, so that its float64 reference takes a few milliseconds; SHRINK_ORDER reduces larger cases.
MAX_COMPONENTS = {"cpu": 10_000, "cuda": 1_000_000}
# From this many rows on, qkv_rotary runs its fused kernel on a GPU that has it. Drawn separately: it is slower.
MANY_TOKENS = 2048
# Sizes of large cases, drawn separately. On a GPU they reach the plans of large launches: eight heads per thread take
# from 2^22 components (norms, several positions) to 2^25 (norms of 16 bits), without speculated table index 2^26.
MAX_TOKENS = 2**17
LARGE_SIZES = {"cpu": (2**17, 2**19), "cuda": (2**23, 2**25, 2**26, 2**26)}
SHRINK_ORDER = (("tokens", 130), ("q_heads", 8), ("tokens", 65), ("k_heads", 4), ("tokens", 33), ("q_heads", 4),
           ("tokens", 7), ("inputs", 24), ("head_dim", 128), ("k_heads", 2), ("head_dim", 64),
           ("tokens", 2), ("inputs", 8))  # fmt: skip


@dataclass(frozen=True)
class OpCase:
    """A call of one op, or a chain of in-place calls on the same memory."""

    device: str = choice("cpu", "cuda")
    op: str = choice(*OPS)
    fault: str = choice("")  # the invalid argument, one of fuzz.invalid_arguments.FAULTS
    mode: str = choice("eager", "inference", "stream", "graph", "compile")
    dtype: str = choice("float32", "float64", "bfloat16", "float16")
    layout: str = choice("bhsd", "bshd", "thd")
    pairing: str = choice("halves", "interleaved")
    batch: int = choice(1, 2, 3, 0)
    tokens: int = choice(1, 2, 3, 5, 7, 33, 65, 130, 1000, 0)
    q_heads: int = choice(1, 2, 3, 4, 5, 8, 32)
    k_heads: int = choice(1, 2, 3, 4, 8, 0)
    has_k: bool = choice(True, True, True, False)
    head_dim: int = choice(2, 4, 6, 16, 18, 34, 64, 64, 80, 96, 128, 128, 192, 256, 512)
    rotary_dim: int = choice(2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 256, 512, 512, 512, 512)
    memory: str = choice("contiguous", "transposed", "padded", "sliced", "unaligned", "packed", "packed", "expanded")
    magnitude: float = choice(1.0, 1.0, 100.0, 1e-4)
    positions: str = choice("row", "broadcast", "matrix", "strided")
    position_dtype: str = choice("int64", "int32")
    reach: int = choice(0, 10, 2**12, 2**17, 2**31 - 1, 2**63 - 1)
    position_rows: int = choice(0, 0, 0, 0, 1, 2, 3, 4, 6)
    method: str = choice(*METHODS)
    table_form: str = choice("plain", "plain", "relative", "inverse")
    scale: float = choice(1.0, 2.0, 8.0, 37.5)
    tables: str = choice("one", "one", "each", "index")
    table_count: int = choice(1, 2, 3, 5)
    table_heads: int = choice(1, 1, 1, 2, 3, 4)
    query_factors: bool = choice(False, False, False, True)
    table_dtype: str = choice("float32", "float64")
    conjugate: bool = choice(False, False, False, True)
    negated: bool = choice(False, False, False, False, True)
    gradient: str = choice("none", "none", "none", "contiguous", "expanded", "transposed")
    over: str = choice("head", "all_heads")
    weight_offset: float = choice(0.0, 1.0)
    eps: float = choice(1e-6, 1e-5, 0.0, 1.0)
    paged: bool = choice(False, True)
    cache_layout: str = choice("nhd", "hnd")
    cache_memory: str = choice("contiguous", "transposed", "padded", "sliced", "unaligned")
    float8: bool = choice(False, True)
    scales: str = choice("none", "one", "one in a row", "each")
    slot_dtype: str = choice("int64", "int32")
    q_out: bool = choice(False, True)
    float8_dtype: str = choice("float8_e4m3fn", "float8_e5m2")
    norms: str = choice("both", "both", "q", "k", "none")
    gate: bool = choice(False, True)
    q_float8: bool = choice(False, True)
    q_scales: str = choice("none", "one", "each", "computed")
    layers: int = choice(1, 2, 3)
    table_sets: bool = choice(False, True)
    blocks: bool = choice(False, True)
    bias: bool = choice(False, True)
    inputs: int = choice(1, 2, 8, 24, 64, 96)
    steps: int = choice(1, 2, 3, 5)
    columns: str = choice("component", "pair")  # what cos and sin of rotary_cos_sin have a column for
    columns_dtype: str = choice("heads", "float32")
    columns_memory: str = choice("contiguous", "padded", "sliced", "unaligned", "expanded")
    special: str = choice("none", "none", "none", "heads", "columns", "both")  # where there are NaNs and infinities
    alias: str = choice(*[""] * 9, "k", "v", "gate")  # the argument that is q
    alias_form: str = choice("itself", "view", "heads")  # q, another view of it, or its last heads
    size: int = choice(0)  # one of LARGE_SIZES: there are as many tokens as make so many components
    seed: int = choice(0)

    def normalized(self) -> OpCase:
        """Return the nearest case that the op accepts."""
        changes: dict[str, Any] = {"rotary_dim": min(self.rotary_dim, self.head_dim)}
        op, layout = self.op, self.layout
        if op not in WITH_POSITION_ROWS or layout == "thd":
            changes["position_rows"] = 0
        if op not in WITH_HEAD_TABLES or (op == "rescale_cache_" and changes.get("position_rows", self.position_rows)):
            changes["table_heads"] = 1
        if op != "rescale_cache_" or changes.get("position_rows", self.position_rows):
            changes["table_sets"] = False
        is_row_table = op in CACHING and changes.get("position_rows", self.position_rows) > 0
        if op not in WITH_QUERY_FACTORS or is_row_table or self.fault:
            changes["query_factors"] = False
        if op not in ("rotary", "rotary_"):
            changes |= {"conjugate": False, "negated": False}
        if self.fault or (self.alias and op not in ALIASES[self.alias]):
            changes["alias"] = ""
        alias = changes.get("alias", self.alias)
        if not alias:
            changes["alias_form"] = "itself"
        if alias == "gate":
            changes["gate"] = True
        if op != "rotary_cos_sin":
            changes |= {"columns": "component", "columns_dtype": "heads", "columns_memory": "contiguous"}
            changes["special"] = "none"
        if self.size:
            changes["special"] = "none"  # drawn on the host
        if op in ("qkv_rotary", "chain"):
            changes["size"] = 0
        if op not in DIFFERENTIABLE or self.mode != "eager" or alias:
            changes["gradient"] = "none"
        if op not in (*ROTATING, "learnable_rotary", "rotary_cos_sin") or alias:
            changes["has_k"] = True
        if op == "chain":
            changes["fault"] = ""
        if op in WITH_KEYS:
            changes["k_heads"] = max(1, self.k_heads)
        if self.memory == "expanded" and (op in IN_PLACE or op == "qkv_rotary"):
            changes["memory"] = "contiguous"
        if (self.tables == "index" and op in ("qkv_rotary", "rescale_cache_", "chain")) or op == "chain":
            changes["tables"] = "each" if op == "rescale_cache_" else "one"
        if layout == "thd" and changes.get("tables", self.tables) == "each":
            changes["tables"] = "one"
        if self.batch == 0 and changes.get("tables", self.tables) == "each":
            changes["tables"] = "one"
        if self.dtype == "float64":
            changes |= {"float8": False, "q_float8": False}
        if not changes.get("q_float8", self.q_float8):
            changes["q_scales"] = "none"
        if not changes.get("float8", self.float8):
            changes["scales"] = "none"
        if layout == "thd":
            changes["blocks"] = False
        if self.position_dtype == "int32":
            changes["reach"] = min(self.reach, 2**31 - 1)
        if self.device == "cpu" and self.mode in ("stream", "graph"):
            changes["mode"] = "eager"
        if self.mode == "graph" and op in ("rescale_cache_", "chain"):
            changes["mode"] = (
                "stream"  # rescale_cache_ copies its table indices from the host, which a graph cannot capture
            )
        if self.mode == "compile" and op not in COMPILED:
            changes["mode"] = "eager"
        case = replace(self, **changes)
        for name, largest in SHRINK_ORDER:
            if case.components > MAX_COMPONENTS[self.device] and case.tokens != MANY_TOKENS and not case.size:
                case = replace(case, **{name: min(largest, getattr(case, name))})
        if case.alias and case.alias_form == "heads":
            case = replace(case, k_heads=min(case.q_heads, case.k_heads))
        if case.rotary_dim > case.head_dim:
            case = replace(case, rotary_dim=case.head_dim)
        tables = case.k_heads if case.has_table_per_key_head else case.table_heads
        q_heads, k_heads = (heads - heads % tables for heads in (case.q_heads, case.k_heads))
        q_heads, k_heads = max(tables, q_heads), max(tables, k_heads) if op in WITH_KEYS else k_heads
        if case.alias and op == "mla_rotary_and_cache_":
            q_heads = 1  # its k_rope and latent have no heads
        elif case.alias in ("k", "v") and case.alias_form != "heads":
            q_heads = k_heads = k_heads or q_heads
        case = replace(case, q_heads=q_heads, k_heads=k_heads)
        if case.size:
            per_token = replace(case, batch=max(1, case.batch), tokens=1)
            case = replace(per_token, tokens=min(MAX_TOKENS, -(-case.size // per_token.components)))
        return case

    @property
    def has_table_per_key_head(self) -> bool:
        """Whether ``HeadTables`` are given; the ops themselves take a table for every few key heads, too."""
        return self.op in CACHING and self.table_heads > 1

    @property
    def components(self) -> int:
        heads = self.q_heads + 2 * self.k_heads
        inputs = self.inputs if self.op == "qkv_rotary" else 1
        sequences = 1 if self.layout == "thd" else self.batch
        return (
            max(sequences * self.tokens, inputs) * heads * self.head_dim * (self.layers if "rescale" in self.op else 1)
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sequences(self) -> int:
        return 1 if self.layout == "thd" else self.batch

    def heads_shape(self, heads: int) -> tuple[int, ...]:
        return {
            "bhsd": (self.batch, heads, self.tokens, self.head_dim),
            "bshd": (self.batch, self.tokens, heads, self.head_dim),
            "thd": (self.tokens, heads, self.head_dim),
        }[self.layout]

    def numpy_random(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])

    def make_table(self, which: int = 0) -> mrrope.FrequencyTable:
        """Return the ``which``-th table of this case."""
        method = METHODS[(METHODS.index(self.method) + which) % len(METHODS)]
        return cached_table(method, self.rotary_dim, self.scale, self.table_form)

    def make_tables(self, count: int, heads: int) -> list[mrrope.FrequencyTable]:
        """Return ``heads`` neighbouring tables for each of ``count``; some of these have one table for all heads."""
        is_one = self.numpy_random(10).random(count) < 0.2
        numbers = [heads * i + (0 if is_one[i] else head) for i in range(count) for head in range(heads)]
        return [self.make_table(number) for number in numbers]

    def make_query_factors(self, count: int) -> torch.Tensor | None:
        """Return a factor for every head of q by each of ``count`` tables; None where there are none."""
        if not self.query_factors:
            return None
        return torch.from_numpy(self.numpy_random(11).uniform(0.5, 2.0, size=(count, self.q_heads)))

    def make_rows(self, tables: int) -> torch.Tensor | None:
        """Return the row of positions of every table's pairs; None where a token has one position."""
        if not self.position_rows:
            return None
        return torch.from_numpy(
            self.numpy_random(3).integers(0, self.position_rows, size=(tables, self.rotary_dim // 2))
        )

    def run(self) -> None:
        """Check the call.

        Raises:
            fuzz.shrinking.CaseError: A check fails.
        """
        from fuzz.op_checks import check

        check(self)


@lru_cache(maxsize=4096)
def cached_table(method: str, rotary_dim: int, scale: float, form: str) -> mrrope.FrequencyTable:
    def plain(method: str) -> mrrope.FrequencyTable:
        options = {"beta": 4.0} if method == "llama3" else {}
        return mrrope.frequency_table(
            method, rotary_dim=rotary_dim, base=1e4, original_max_position=2048, scale=scale, **options
        )

    if form == "inverse":
        return plain(method).inverse()
    return plain(method).relative_to(plain("rope")) if form == "relative" else plain(method)


class RowTables(OpTable):
    """The table of every head for tokens with several positions; any of these rotates a pair."""

    def __init__(self, tables: Sequence[mrrope.FrequencyTable], row_of_pair: torch.Tensor, rows: int) -> None:
        words = torch.stack([packed_stack(tables, torch.device("cpu")), packed_rows(row_of_pair)])
        super().__init__((words[:, 0] if len(tables) == 1 else words)[None])
        self.axes = rows
        self.tables = tables

    @property
    def rotary_dim(self) -> int:
        return self.tables[0].rotary_dim

    def _words_of_heads(self) -> list[list[int]]:
        words = self.packed(torch.device("cpu"))[0]
        return words.reshape(2, len(self.tables), -1).transpose(0, 1).flatten(1).tolist()


def by_heads(
    tables: Sequence[mrrope.FrequencyTable],
    heads: int,
    row_of_pair: torch.Tensor | None = None,
    rows: int = 0,
    query_factors: torch.Tensor | None = None,
) -> list[OpTable]:
    """Return every ``heads`` neighbouring tables as the ops take them: as one table where all of them are equal."""
    groups = [slice(i, i + heads) for i in range(0, len(tables), heads)]
    if row_of_pair is not None:
        return [RowTables(tables[group], row_of_pair[group], rows) for group in groups]
    distinct = [tables[g][:1] if len(set(tables[g])) == 1 else tables[g] for g in groups]
    if query_factors is not None:
        return [mrrope.HeadTables(of, query_factors=f) for of, f in zip(distinct, query_factors.tolist(), strict=True)]
    return [of[0] if len(of) == 1 else mrrope.HeadTables(of) for of in distinct]


class CaseTensors:
    """The tensors of a case, each a view into poisoned memory."""

    def __init__(self, case: OpCase) -> None:
        self.case = case
        self.generator = torch.Generator(case.device).manual_seed(case.seed)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.case.device) * self.case.magnitude
        return values.to(dtype or self.case.torch_dtype)

    def view(self, shape: tuple[int, ...], memory: str) -> torch.Tensor:
        """Return a random tensor of this shape in this kind of memory."""
        with torch.device(self.case.device):
            view = storage_of(shape, memory, self.case.torch_dtype)
        distinct = view[:1] if memory == "expanded" else view
        distinct.copy_(self.random(tuple(distinct.shape)))
        return view

    def heads(self, *counts: int) -> list[torch.Tensor]:
        """Return random heads; with packed memory, as views of one projection."""
        case = self.case
        if case.memory != "packed":
            return [self.view(case.heads_shape(count), case.memory) for count in counts]
        rows = (case.tokens,) if case.layout == "thd" else (case.batch, case.tokens)
        whole = self.random((*rows, sum(counts) + 1, case.head_dim))
        whole[..., -1, :] = POISON
        parts, start = [], 0
        for count in counts:
            part = whole.narrow(-2, start, count)
            parts.append(part.transpose(1, 2) if case.layout == "bhsd" else part)
            start += count
        return parts

    def token_rows(self, dim: int) -> torch.Tensor:
        """Return a random row per token, without heads."""
        case = self.case
        shape = (case.tokens, dim) if case.layout == "thd" else (case.batch, case.tokens, dim)
        return self.view(shape, case.memory if case.memory in ("contiguous", "padded", "unaligned") else "padded")

    def alias_of(self, q: torch.Tensor) -> torch.Tensor:
        """Return q itself, another view of it, or a view of its last heads."""
        if self.case.alias_form == "heads" and self.case.alias != "gate":
            return q.narrow(HEAD_AXIS[self.case.layout], self.case.q_heads - self.case.k_heads, self.case.k_heads)
        return q if self.case.alias_form == "itself" else q[:]

    def output_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of an output of x's shape, with the case's strides."""
        if self.case.gradient == "expanded":
            return self.random((1,) * x.dim()).expand(x.shape)
        gradient = self.random(tuple(x.shape))
        is_transposed = self.case.gradient == "transposed"
        return gradient.transpose(-1, -2).contiguous().transpose(-1, -2) if is_transposed else gradient

    def positions(self) -> torch.Tensor:
        case = self.case
        rows = {"row": (), "broadcast": (1,), "matrix": (case.batch,), "strided": (case.batch,)}[case.positions]
        shape = (case.tokens,) if case.layout == "thd" else (*rows, case.tokens)
        if case.position_rows:
            shape = (case.position_rows, 1 if case.positions in ("row", "broadcast") else case.batch, case.tokens)
        values = case.numpy_random(1).integers(-case.reach, case.reach, size=shape, dtype=np.int64, endpoint=True)
        positions = torch.from_numpy(values).to(getattr(torch, case.position_dtype))
        if case.positions == "strided":
            positions = torch.stack([positions, positions + 1], dim=-1)[..., 0]
            return onto(case.device, positions)
        return positions.to(case.device)

    def table_index(self, stream: int) -> torch.Tensor:
        """Return a random table index per sequence or packed token."""
        case = self.case
        size = case.tokens if case.layout == "thd" else case.batch
        numbers = case.numpy_random(2, stream).integers(0, case.table_count, size=size, dtype=np.int32)
        return torch.from_numpy(numbers).to(case.device)
