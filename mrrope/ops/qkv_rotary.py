"""The op ``qkv_rotary``: the projection to q, k and v with the rotation of q and k fused into it."""

from __future__ import annotations

from numbers import Integral

import torch

from mrrope.ops import Tables, check_factors, packed_table, require_tensors, require_tensors_or_none
from mrrope.tables.query_factors import has_query_factors

LAYOUTS = ("bhsd", "bshd", "thd")


def qkv_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    table: Tables,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    layout: str = "bhsd",
    pairing: str = "halves",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project x to q, k and v, and rotate q and k by their positions. Differentiable.

    Equals ``torch.nn.functional.linear``, a split into heads, and ``rotary``. On sm_90 GPUs float16 and bfloat16 run
    as one GEMM that rotates in its epilogue and rounds once, if that is faster. Otherwise the fallback runs the ops
    unfused. Under autocast x, weight and bias are cast as ``linear`` casts them.

    Args:
        x: ``[batch, tokens, inputs]``; for layout ``thd``, ``[tokens, inputs]``.
        weight: ``[outputs, inputs]``: the rows of q's heads, then of k's, then of v's, as ``pack_qkv`` returns them.
        bias: ``[outputs]``, or None.
        positions: As in ``rotary``.
        table: As in ``rotary``; a list holds one table per sequence.
        num_q_heads: Number of heads of q.
        num_kv_heads: Number of heads of k, and of v.
        layout: Layout of the results, as in ``rotary``.
        pairing: As in ``rotary``. ``interleave_heads`` converts weights for ``halves`` to weights for ``interleaved``.

    Returns:
        q, k and v: views of one tensor with a row ``[outputs]`` per token.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        RuntimeError: The tensors are on different devices.
    """
    require_tensors(x=x, weight=weight, positions=positions)
    require_tensors_or_none(bias=bias)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    rank = 2 if layout == "thd" else 3
    if x.dim() != rank:
        form = "[tokens, inputs]" if layout == "thd" else "[batch, tokens, inputs]"
        raise ValueError(f"x must be {form} for layout {layout}, got a tensor of {x.dim()} dimensions")
    _require_integer("num_q_heads", num_q_heads)
    _require_integer("num_kv_heads", num_kv_heads)
    words = packed_table(table, x.device)
    if has_query_factors(words):
        check_factors(num_q_heads, positions, table)
    packed = torch.ops.mrrope.qkv_rotary.default(x, weight, bias, positions, words, num_q_heads, num_kv_heads, pairing)
    q, k, v = split_qkv(packed, num_q_heads, num_kv_heads)
    if layout == "bhsd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def split_qkv(
    packed: torch.Tensor, num_q_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as views ``[..., heads, head_dim]`` of packed rows ``[..., outputs]``."""
    count = num_q_heads + 2 * num_kv_heads
    heads = packed.view(*packed.shape[:-1], count, packed.shape[-1] // count)
    return _narrowed(heads, -2, num_q_heads, num_kv_heads)


def pack_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Concatenate the weights or biases of three projections into the one that ``qkv_rotary`` takes.

    Args:
        q: Weight ``[outputs, inputs]`` or bias ``[outputs]`` of the projection to q.
        k: The same for k, with q's inputs, dtype and device.
        v: The same for v, of k's shape.

    Returns:
        The rows of q, k and v. ``unpack_qkv`` is the inverse.

    Raises:
        TypeError: A part is not a tensor, or differs from q in dtype or device.
        ValueError: A part has no rows or other inputs than q, or k and v differ in shape.
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
    """Split packed weights or a packed bias into q, k and v; the inverse of ``pack_qkv``.

    Args:
        packed: Weight or bias as ``pack_qkv`` returns it.
        num_q_heads: Number of heads of q.
        num_kv_heads: Number of heads of k, and of v.

    Returns:
        Views of q's, k's and v's rows.

    Raises:
        TypeError: ``packed`` is not a tensor, or a number of heads is not an integer.
        ValueError: The rows of ``packed`` are not a multiple of the number of heads, or a number of heads is below 1.
    """
    _require_rows("packed", packed)
    _require_heads("num_q_heads", num_q_heads)
    _require_heads("num_kv_heads", num_kv_heads)
    head_dim, rest = divmod(packed.shape[0], num_q_heads + 2 * num_kv_heads)
    if rest:
        raise ValueError(
            f"packed must have a multiple of {num_q_heads + 2 * num_kv_heads} rows for {num_q_heads} heads of q and "
            f"{num_kv_heads} each of k and v, got {packed.shape[0]}"
        )
    return _narrowed(packed, 0, num_q_heads * head_dim, num_kv_heads * head_dim)


def _narrowed(packed: torch.Tensor, dim: int, q: int, kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of q, k and v along ``dim``. Views of torch.split could not be written in place under autograd."""
    return packed.narrow(dim, 0, q), packed.narrow(dim, q, kv), packed.narrow(dim, q + kv, kv)


def interleave_heads(weight: torch.Tensor, num_heads: int, rotary_dim: int | None = None) -> torch.Tensor:
    """Permute the weights or bias of q or k from ``pairing="halves"`` to ``pairing="interleaved"``.

    Row i of a head's first half moves to row 2i, row i of its second half to row 2i + 1. With q and k permuted alike
    attention scores do not change.

    Args:
        weight: Weight ``[heads * head_dim, inputs]`` or bias ``[heads * head_dim]``.
        num_heads: Number of heads in ``weight``.
        rotary_dim: Rows per head that are permuted; all by default.

    Returns:
        The permuted copy. ``deinterleave_heads`` is the inverse.

    Raises:
        TypeError: ``weight`` is not a tensor, or a number is not an integer.
        ValueError: The rows are not a multiple of ``num_heads``, or ``rotary_dim`` is odd or exceeds a head.
    """
    return _permuted_heads(weight, num_heads, rotary_dim, to_interleaved=True)


def deinterleave_heads(weight: torch.Tensor, num_heads: int, rotary_dim: int | None = None) -> torch.Tensor:
    """Permute the weights or bias of q or k from ``pairing="interleaved"`` to ``pairing="halves"``.

    Args:
        weight: As in ``interleave_heads``.
        num_heads: As in ``interleave_heads``.
        rotary_dim: As in ``interleave_heads``.

    Returns:
        The permuted copy.

    Raises:
        TypeError: As in ``interleave_heads``.
        ValueError: As in ``interleave_heads``.
    """
    return _permuted_heads(weight, num_heads, rotary_dim, to_interleaved=False)


def _permuted_heads(
    weight: torch.Tensor, num_heads: int, rotary_dim: int | None, *, to_interleaved: bool
) -> torch.Tensor:
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
    pairs = order[:rotary_dim].view(2, -1) if to_interleaved else order[:rotary_dim].view(-1, 2)
    order = torch.cat([pairs.t().flatten(), order[rotary_dim:]])
    return weight.view(num_heads, head_dim, *weight.shape[1:])[:, order].flatten(0, 1)


def _require_rows(name: str, value: torch.Tensor) -> None:
    require_tensors(**{name: value})
    if value.dim() == 0:
        raise ValueError(f"{name} must have rows, got a tensor of 0 dimensions")


def _require_integer(name: str, value: object) -> None:
    if not isinstance(value, (int, Integral, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _require_heads(name: str, value: int) -> None:
    _require_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
