"""The op ``mla_rotary``: rotates q and assembles the key of multi-head latent attention, in one pass over memory."""

from __future__ import annotations

import torch

from mrrope.ops import Tables, checked_index, require_tensors, table_without_factors


def mla_rotary(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    table: Tables,
    *,
    layout: str = "bhsd",
    pairing: str = "interleaved",
    table_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the rope part of q, and join k_nope and the rotated k_rope to the key. Differentiable.

    Heads of multi-head latent attention (MLA: DeepSeek-V2 and V3, Kimi) are ``[nope | rope]``: the last
    ``table.rotary_dim`` components are rotated, those before are copied. Equal to rotating ``k_rope`` and the rope part
    of q, expanding the former to all heads, and concatenating. The gradient of k_rope is the sum over the heads, added
    up in a fixed order in float32 (float64 for float64) and rounded once.

    Args:
        q: As in ``rotary``, with ``[nope | rope]`` heads.
        k_nope: Like ``q``, with any number of heads, and without the rope part. A view of the up-projection that also
            holds the values needs no copy.
        k_rope: The rope part that all heads of the key share: ``[batch, tokens, rotary_dim]``, in layout ``thd``
            ``[tokens, rotary_dim]``, or with a dimension of one head where ``layout`` has the heads.
        positions: As in ``rotary``, one per token.
        table: As in ``rotary``, but for one head: not ``HeadTables`` of several.
        layout: As in ``rotary``.
        pairing: As in ``rotary``. ``interleaved`` is that of DeepSeek's weights; pairs stay where they are, while
            transformers moves them to ``halves``. Scores are the same, since q and the key are in the same order.
        table_index: As in ``rotary``.

    Returns:
        The rotated q, with q's strides where those are dense, and the key, contiguous: k_nope's shape with
        ``rotary_dim`` more components.

    Raises:
        TypeError: An argument has the wrong type or dtype. Every message names the argument.
        ValueError: A shape, a stride or an option is invalid.
        IndexError: ``table_index`` is out of range. On CUDA the indices are not read by the host.
        RuntimeError: The tensors are on different devices.
    """
    require_tensors(q=q, k_nope=k_nope, k_rope=k_rope, positions=positions)
    rotated: tuple[torch.Tensor, torch.Tensor] = torch.ops.mrrope.mla_rotary.default(
        q,
        k_nope,
        k_rope,
        positions,
        table_without_factors(table, q.device),
        layout,
        pairing,
        table_index=checked_index(table_index),
    )
    return rotated
