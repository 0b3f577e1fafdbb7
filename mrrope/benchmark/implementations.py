"""The contenders that are always there: mrrope and transformers. Third-party ops are in peers.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mrrope.benchmark.workloads import Case, Heads
from mrrope.ops.rotary import rotary, rotary_

RotatedHeads = tuple[torch.Tensor, torch.Tensor]
MAX_DECODE_TOKENS = 256
"""Up to here tokens belong to different sequences (a decode step), beyond it to one sequence (prefill)."""


@dataclass(frozen=True)
class Contender:
    """An implementation of the rotation."""

    name: str
    rotate: Callable[[Heads], Any]
    """Rotates q and k, in place or not, and returns both as [1, heads, tokens, head_dim]."""
    takes: Callable[[Case], bool] = lambda case: True
    """Whether it supports a case."""


def ours_in_place(heads: Heads) -> RotatedHeads:
    shared, case = heads.shared, heads.case
    if case.backward:
        packed = shared.table.packed(heads.q.device)
        torch.ops.mrrope.rotary_.default([heads.q, heads.k], shared.positions, packed, heads.layout, case.pairing, True)
    else:
        rotary_(heads.q, heads.k, shared.positions, shared.table, heads.layout, case.pairing)
    return heads.rotated()


def ours(heads: Heads) -> RotatedHeads:
    shared, case = heads.shared, heads.case
    if case.backward:
        packed = shared.table.packed(heads.q.device)
        q, k = torch.ops.mrrope.rotary.default(
            [heads.q, heads.k], shared.positions, packed, heads.layout, case.pairing, True
        )
    else:
        q, k = rotary(heads.q, heads.k, shared.positions, shared.table, heads.layout, case.pairing)
    return heads.by_head(q), heads.by_head(k)


def ours_by_index(heads: Heads) -> RotatedHeads:
    """By ``table_index``: one table per sequence in a decode step, one for all tokens of a prefill."""
    shared = heads.shared
    if heads.case.tokens > MAX_DECODE_TOKENS:
        rotary_(heads.q, heads.k, shared.positions, shared.tables, heads.layout, table_index=shared.index[:1])
    else:
        q, k = (heads.by_token(x)[0] for x in (heads.q, heads.k))
        rotary_(q, k, shared.positions, shared.tables, "thd", table_index=shared.index)
    return heads.rotated()


def ours_by_head(heads: Heads) -> RotatedHeads:
    """Rotate by a table for each key head; query heads use their key head's."""
    shared = heads.shared
    torch.ops.mrrope.rotary_.default(
        [heads.q, heads.k], shared.positions, shared.head_tables, heads.layout, heads.case.pairing
    )
    return heads.rotated()


def ours_by_query_head(heads: Heads) -> RotatedHeads:
    """Rotate by the same tables, with a factor for each query head."""
    shared = heads.shared
    torch.ops.mrrope.rotary_.default(
        [heads.q, heads.k], shared.positions, shared.query_factor_tables, heads.layout, heads.case.pairing
    )
    return heads.rotated()


def ours_by_cos_sin(heads: Heads) -> RotatedHeads:
    """By the model's cosines and sines, out of place: ``rotary_cos_sin``."""
    case = heads.case
    cos, sin = (x[0, :, : case.rotary_dim // 2] for x in heads.shared.cos_sin)
    q, k = torch.ops.mrrope.rotary_cos_sin.default(
        [heads.q, heads.k], cos, sin, heads.layout, case.pairing, case.rotary_dim, case.backward
    )
    return heads.by_head(q), heads.by_head(k)


def transformers_eager(heads: Heads) -> RotatedHeads:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = apply_rotary_pos_emb(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)
    return q, k


@functools.cache
def _compiled() -> Callable[..., RotatedHeads]:
    """Return transformers' rotation, compiled. Made at the first call: importing torch's compiler takes seconds."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    compiled: Callable[..., RotatedHeads] = torch.compile(apply_rotary_pos_emb, dynamic=False)
    return compiled


def transformers_compiled(heads: Heads) -> RotatedHeads:
    return _compiled()(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)


def _rotate_halves(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """The algorithm of the stock kernel for transformers' slot, kernels-community/rotary.

    Elementwise over both halves of the heads, with cosines and sines broadcast over them, in float32.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.float(), sin.float()
    out[..., :half] = first * cos - second * sin
    out[..., half:] = first * sin + second * cos


@functools.cache
def _compiled_halves() -> Callable[..., None]:
    compiled: Callable[..., None] = torch.compile(_rotate_halves, dynamic=False)
    return compiled


def stock_kernel(heads: Heads) -> RotatedHeads:
    """The stock kernel's algorithm, compiled by Inductor: out of place, one launch for q and one for k."""
    cos, sin = (x[:, None, :, : heads.case.rotary_dim // 2] for x in heads.shared.cos_sin)
    q, k = heads.by_head(heads.q), heads.by_head(heads.k)
    rotated = torch.empty_like(q), torch.empty_like(k)
    for x, out in zip((q, k), rotated, strict=True):
        _compiled_halves()(x, out, cos, sin)
    return rotated


def is_llama_style(case: Case) -> bool:
    """Whether a case is Llama's rotation, the only one that most others support."""
    return case.pairing == "halves" and case.rotary_dim == case.head_dim and not case.backward


def is_usual_of_any_heads(case: Case) -> bool:
    """Whether a case differs from the usual in its sizes only, with groups of query heads for head tables."""
    usual = Case(case.tokens, case.q_heads, case.k_heads, head_dim=case.head_dim, rotary_dim=case.head_dim)
    return case == usual and case.q_heads % case.k_heads == 0


OURS = (
    Contender("mrrope in place", ours_in_place),
    Contender("mrrope", ours),
    Contender(
        "mrrope by table_index", ours_by_index, lambda case: case == Case(case.tokens, case.q_heads, case.k_heads)
    ),
    Contender("mrrope by head", ours_by_head, is_usual_of_any_heads),
    Contender("mrrope by query head", ours_by_query_head, is_usual_of_any_heads),
    Contender("mrrope by cos/sin", ours_by_cos_sin),
)
TRANSFORMERS = (
    Contender("stock kernel's algorithm", stock_kernel, is_llama_style),
    Contender("transformers compiled", transformers_compiled, is_llama_style),
    Contender("transformers eager", transformers_eager, is_llama_style),
)
