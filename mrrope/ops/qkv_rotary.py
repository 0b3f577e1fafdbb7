"""The projection to q, k and v with the rotation of q and k in it, where models do one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from mrrope.ops import packed_table
from mrrope.tables import FrequencyTable

LAYOUTS = ("bhsd", "bshd", "thd")


def qkv_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    table: FrequencyTable | Sequence[FrequencyTable],
    num_q_heads: int,
    num_kv_heads: int,
    *,
    layout: str = "bhsd",
    pairing: str = "halves",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projects x to q, k and v, and rotates q and k by their positions; differentiable.

    The same as :func:`torch.nn.functional.linear`, a split into heads, and :func:`rotary`. On a GPU of sm_90, float16
    and bfloat16 are rotated inside the matrix product, where that is faster, and rounded once; elsewhere it is the two
    ops after each other. Under autocast x, weight and bias are cast as linear casts them.

    Args:
        x: ``[batch, tokens, inputs]``; for layout ``thd``, ``[tokens, inputs]``.
        weight: ``[outputs, inputs]``, the rows of q's heads, then those of k's, then those of v's, as
            :func:`pack_qkv` puts them together.
        bias: ``[outputs]``, or None.
        positions: int32 or int64, any value: ``[tokens]``, ``[1, tokens]`` or ``[batch, tokens]``.
        table: the frequencies; its ``rotary_dim`` may be less than the head's. Or one table for each sequence.
        num_q_heads, num_kv_heads: how many heads q has, and how many each of k and v.
        layout: of the results: ``bhsd``, ``bshd`` or ``thd``, as :func:`rotary` has them.
        pairing: which components turn together: ``halves``, as in Llama, or ``interleaved``, as in GPT-J.
            :func:`interleave_heads` turns weights of the one into weights of the other.

    Returns:
        q, k and v: views of one tensor that holds a row ``[outputs]`` for each token.
    """
    for name, value in (("x", x), ("weight", weight), ("positions", positions)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias must be a tensor or None, got {type(bias).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    rank = 2 if layout == "thd" else 3
    if x.dim() != rank:
        form = "[tokens, inputs]" if layout == "thd" else "[batch, tokens, inputs]"
        raise ValueError(f"x must be {form} for layout {layout}, got a tensor of {x.dim()} dimensions")
    _require_integer("num_q_heads", num_q_heads)
    _require_integer("num_kv_heads", num_kv_heads)
    packed = torch.ops.mrrope.qkv_rotary.default(
        x, weight, bias, positions, packed_table(table, x.device), num_q_heads, num_kv_heads, pairing
    )
    q, k, v = split_qkv(packed, num_q_heads, num_kv_heads)
    if layout == "bhsd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def split_qkv(
    packed: torch.Tensor, num_q_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of q, of k and of v in rows that hold them all, as views ``[..., heads, head_dim]``."""
    count = num_q_heads + 2 * num_kv_heads
    heads = packed.view(*packed.shape[:-1], count, packed.shape[-1] // count)
    return _parts(heads, -2, num_q_heads, num_kv_heads)


def pack_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Weights, or biases, of three projections as the one that :func:`qkv_rotary` takes.

    :func:`unpack_qkv` gives them back.
    """
    for name, part in (("q", q), ("k", k), ("v", v)):
        _require_rows(name, part)
        if (part.dtype, part.device) != (q.dtype, q.device):
            raise TypeError(f"{name} must be {q.dtype} on {q.device}, as q is, got {part.dtype} on {part.device}")
        if part.shape[1:] != q.shape[1:]:
            raise ValueError(f"{name} must have q's inputs, {tuple(q.shape[1:])}, got {tuple(part.shape[1:])}")
    if k.shape != v.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    return torch.cat([q, k, v])


def unpack_qkv(
    packed: torch.Tensor, num_q_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three parts of packed weights, or of a packed bias, as views: the inverse of :func:`pack_qkv`."""
    _require_rows("packed", packed)
    _require_heads("num_q_heads", num_q_heads)
    _require_heads("num_kv_heads", num_kv_heads)
    head_dim, rest = divmod(packed.shape[0], num_q_heads + 2 * num_kv_heads)
    if rest:
        raise ValueError(
            f"packed must have a multiple of {num_q_heads + 2 * num_kv_heads} rows for {num_q_heads} heads of q and "
            f"{num_kv_heads} each of k and v, got {packed.shape[0]}"
        )
    return _parts(packed, 0, num_q_heads * head_dim, num_kv_heads * head_dim)


def _parts(packed: torch.Tensor, dim: int, q: int, kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of q, k and v along ``dim``, that may be written to each by itself: those of torch.split may not."""
    return packed.narrow(dim, 0, q), packed.narrow(dim, q, kv), packed.narrow(dim, q + kv, kv)


def interleave_heads(weight: torch.Tensor, num_heads: int, rotary_dim: int | None = None) -> torch.Tensor:
    """Weights, or a bias, of q or k whose heads pair halves, reordered so that they pair neighbours.

    Row i of a head's first half goes to row 2 i, row i of its second half to row 2 i + 1. With q and k reordered alike
    attention scores do not change, and ``pairing="interleaved"`` rotates what ``pairing="halves"`` rotated before.
    Rows past ``rotary_dim``, where that is less than a head's, stay. :func:`deinterleave_heads` undoes it.
    """
    return _reordered(weight, num_heads, rotary_dim, interleaves=True)


def deinterleave_heads(weight: torch.Tensor, num_heads: int, rotary_dim: int | None = None) -> torch.Tensor:
    """The inverse of :func:`interleave_heads`."""
    return _reordered(weight, num_heads, rotary_dim, interleaves=False)


def _reordered(weight: torch.Tensor, num_heads: int, rotary_dim: int | None, *, interleaves: bool) -> torch.Tensor:
    _require_rows("weight", weight)
    _require_heads("num_heads", num_heads)
    head_dim, rest = divmod(weight.shape[0], num_heads)
    if rest:
        raise ValueError(f"weight must have a multiple of num_heads ({num_heads}) rows, got {weight.shape[0]}")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    _require_integer("rotary_dim", rotary_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and from 2 to {head_dim}, the rows of a head, got {rotary_dim}")
    order = torch.arange(head_dim, device=weight.device)
    pairs = order[:rotary_dim].view(2, -1) if interleaves else order[:rotary_dim].view(-1, 2)
    order = torch.cat([pairs.t().flatten(), order[rotary_dim:]])
    return weight.view(num_heads, head_dim, *weight.shape[1:])[:, order].flatten(0, 1)


def _require_rows(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dim() == 0:
        raise ValueError(f"{name} must have rows, got a tensor of 0 dimensions")


def _require_integer(name: str, value: object) -> None:
    if not isinstance(value, (int, Integral, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _require_heads(name: str, value: int) -> None:
    _require_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
