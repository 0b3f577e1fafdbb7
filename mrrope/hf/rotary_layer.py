"""The layer that runs ``rotary_cos_sin`` in transformers' slot ``rotary_pos_emb`` for a kernel.

The package ``kernels`` puts the layer's ``forward`` on the module that a modeling file's ``apply_rotary_pos_emb`` is.
``self`` is that module, whose class keeps the model's own code: it is probed once for how it uses cos and sin, and it
runs whatever the op does not take. Imports torch alone, because the package for the Hub contains a copy of this file.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ColumnUse(NamedTuple):
    """How an apply function uses the columns of cos and sin. Conventions of positions: :mod:`mrrope.hf.conventions`."""

    backwards: bool
    """The angle is negated."""
    pairing: str
    columns: str
    """``halves``, ``interleaved``: one column per component, equal within such a pair; ``pairs``: one per pair."""

    def rotate(self, heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, layout: str) -> Any:
        """Rotate q and k by the op."""
        rotary_dim = cos.shape[-1] * (2 if self.columns == "pairs" else 1)
        if self.columns == "halves" and self.pairing == "interleaved":
            cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
        *heads, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (*heads, cos, sin))
        return torch.ops.mrrope.rotary_cos_sin.default(
            heads, cos, sin, layout, self.pairing, rotary_dim, self.backwards
        )


COLUMN_USES = tuple(
    ColumnUse(backwards, pairing, columns)
    for backwards, (pairing, columns) in itertools.product(
        (False, True),
        (
            ("halves", "halves"),
            ("interleaved", "halves"),
            ("interleaved", "interleaved"),
            ("halves", "pairs"),
            ("interleaved", "pairs"),
        ),
    )
)
_FOUND: dict[type, int] = {}


def column_use_of(own: type) -> int:
    """Return the index in ``COLUMN_USES`` of what a module's own code does, or -1 where the op cannot do it."""
    if own not in _FOUND:
        with torch.no_grad():
            _FOUND[own] = next((i for i, each in enumerate(COLUMN_USES) if _follows(own, each)), -1)
    return _FOUND[own]


# What torch.compiler.assume_constant_result sets, which imports torch._dynamo: 1.2 s and 120 MB at `import mrrope`.
column_use_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _follows(own: type, use: ColumnUse) -> bool:
    """Whether the op reproduces a class's own code on random numbers, with whole heads and, if it takes them, wider."""
    random = torch.Generator(device="cpu").manual_seed(0)
    cos, sin = torch.randn(2, 1, 3, 4, generator=random, device="cpu", dtype=torch.float32)
    if use.columns == "halves":
        cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    elif use.columns == "interleaved":
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    for head_dim in (8, 12):
        heads = list(torch.randn(2, 1, 2, 3, head_dim, generator=random, device="cpu", dtype=torch.float32))
        try:
            want = own.forward(None, *heads, cos, sin)  # type: ignore[attr-defined]
        except Exception:
            # The family's own code may refuse these columns, or heads wider than they are: only the latter is a match.
            return head_dim > 8
        got = use.rotate(heads, cos, sin, "bhsd")
        if not all(w.shape == g.shape and torch.allclose(w, g, atol=1e-5) for w, g in zip(want, got, strict=True)):
            return False
    return True


def layout_of(q: torch.Tensor, cos: torch.Tensor, unsqueeze_dim: int) -> str | None:
    """Return the layout of q, given the dimension that cosines get for the heads; None where the op has no such one."""
    dim = unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + cos.dim() + 1
    return {(4, 3, 1): "bhsd", (4, 3, 2): "bshd", (4, 2, 0): "bhsd", (3, 2, 1): "thd"}.get((q.dim(), cos.dim(), dim))


def takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> bool:
    """Whether the op takes these tensors."""
    token = 2 if layout == "bhsd" else q.dim() - 3
    return (
        q.dtype in DTYPES
        and k.dtype == q.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and sin.dtype == cos.dtype
        and q.device == k.device == cos.device == sin.device
        and k.dim() == q.dim()
        and (k.shape[0], k.shape[token], k.shape[-1]) == (q.shape[0], q.shape[token], q.shape[-1])
        and cos.shape == sin.shape
        and cos.shape[-2] == q.shape[token]
        and (cos.dim() == 2 or cos.shape[0] in (1, q.shape[0]))
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


class RotaryPosEmb(nn.Module):
    """A layer without state for the slot ``rotary_pos_emb``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = column_use_of(type(self))
        layout = layout_of(q, cos, unsqueeze_dim)
        if found < 0 or layout is None or not takes(q, k, cos, sin, layout):
            own: tuple[torch.Tensor, torch.Tensor] = type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
            return own
        q, k = COLUMN_USES[found].rotate([q, k], cos, sin, layout)
        return q, k
