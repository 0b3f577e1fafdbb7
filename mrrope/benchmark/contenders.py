"""Who rotates: this package, and transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mrrope.benchmark.cases import Case, Heads
from mrrope.benchmark.timing import COPY, COPY_BY_KERNEL
from mrrope.ops.rotary import rotary, rotary_

Turned = tuple[torch.Tensor, torch.Tensor]
MOST_DECODED = 256


@dataclass(frozen=True)
class Contender:
    """Rotates heads, in place or not, and answers with q and k by head; ``takes`` tells what cases it can do."""

    name: str
    rotate: Callable[[Heads], Any]
    takes: Callable[[Case], bool] = lambda case: True


def copy(heads: Heads) -> object:
    to, source = heads.copies
    return to.copy_(source)


def copy_by_kernel(heads: Heads) -> object:
    to, source = heads.copies
    return torch.bitwise_not(source.view(torch.int32), out=to.view(torch.int32))


def ours_in_place(heads: Heads) -> Turned:
    shared, case = heads.shared, heads.case
    if case.backward:
        packed = shared.table.packed(heads.q.device)
        torch.ops.mrrope.rotary_.default([heads.q, heads.k], shared.positions, packed, heads.layout, case.pairing, True)
    else:
        rotary_(heads.q, heads.k, shared.positions, shared.table, heads.layout, case.pairing)
    return heads.turned()


def ours(heads: Heads) -> Turned:
    shared, case = heads.shared, heads.case
    if case.backward:
        packed = shared.table.packed(heads.q.device)
        q, k = torch.ops.mrrope.rotary.default(
            [heads.q, heads.k], shared.positions, packed, heads.layout, case.pairing, True
        )
    else:
        q, k = rotary(heads.q, heads.k, shared.positions, shared.table, heads.layout, case.pairing)
    return heads.by_head(q), heads.by_head(k)


def ours_by_index(heads: Heads) -> Turned:
    """Decoding, every token is of another sequence, and has a table of its own choice; else it is one long sequence."""
    shared = heads.shared
    if heads.case.tokens > MOST_DECODED:
        rotary_(heads.q, heads.k, shared.positions, shared.tables, heads.layout, table_index=shared.index[:1])
    else:
        q, k = (heads.by_token(x)[0] for x in (heads.q, heads.k))
        rotary_(q, k, shared.positions, shared.tables, "thd", table_index=shared.index)
    return heads.turned()


def transformers_eager(heads: Heads) -> Turned:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = apply_rotary_pos_emb(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)
    return q, k


@functools.cache
def _compiled() -> Callable[..., Turned]:
    """Compiled for the shape of every case by itself; torch's compiler takes seconds to import."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    compiled: Callable[..., Turned] = torch.compile(apply_rotary_pos_emb, dynamic=False)
    return compiled


def transformers_compiled(heads: Heads) -> Turned:
    return _compiled()(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)


def is_whole_and_halved(case: Case) -> bool:
    """As Llama rotates: what most others do."""
    return case.pairing == "halves" and case.rotary_dim == case.head_dim and not case.backward


COPIES = (Contender(COPY, copy), Contender(COPY_BY_KERNEL, copy_by_kernel))
OURS = (
    Contender("mrrope in place", ours_in_place),
    Contender("mrrope", ours),
    Contender(
        "mrrope by table_index", ours_by_index, lambda case: case == Case(case.tokens, case.q_heads, case.k_heads)
    ),
)
TRANSFORMERS = (
    Contender("transformers compiled", transformers_compiled, is_whole_and_halved),
    Contender("transformers eager", transformers_eager, is_whole_and_halved),
)
