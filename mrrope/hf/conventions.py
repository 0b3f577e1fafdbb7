"""How a model's own code applies RoPE, found by trying it, and the fused op in its place.

Modeling code of transformers calls a function of its module, ``apply_rotary_pos_emb`` or the like, with what the
rotary embedding gave it. Those functions differ in a few ways only: which components make a pair, whether the result is
reordered, which part of the head turns and in which direction, whether q and k come together. A :class:`Convention` is
one combination. The right one is found by comparing results on random numbers, so that no list of models is kept, and a
function that no combination reproduces is known to be one.

A patched rotary embedding hands out integers, positions and a packed table, where the original hands out cosines and
sines; by that the fused function tells a patched model's calls from all others, which it passes on.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import nn

from mrrope.ops import decompositions
from mrrope.ops.decompositions import should_decompose

Apply = Callable[..., Any]

PACKED_TABLE_DTYPE = torch.int64


@dataclass(frozen=True)
class Convention:
    """One way of applying RoPE."""

    pairing: Literal["halves", "interleaved"]
    gathers_halves: bool = False
    """The pairs come interleaved and leave as halves."""
    turns_last: bool = False
    """Where only a part of the head turns: its last components, not its first."""
    backwards: bool = False
    """By the negated angle."""
    layout: Literal["bhsd", "bshd"] | None = None
    """None: the call's ``unsqueeze_dim`` tells."""

    def rotate(
        self, heads: list[torch.Tensor], positions: torch.Tensor, table: torch.Tensor, layout: str
    ) -> list[torch.Tensor]:
        """Rotates q, or q and k, as the model's own function would."""
        rotary_dim = 2 * (table.shape[-1] - 1)
        turning = [x[..., -rotary_dim:] if self.turns_last else x for x in heads]
        turning = [x if x.stride(-1) == 1 else x.contiguous() for x in turning]
        op = torch.ops.mrrope.rotary.default
        rotate = decompositions.rotary if should_decompose(heads, layout) else op
        turned = rotate(turning, positions, table, layout, self.pairing, self.backwards)
        if self.gathers_halves:
            turned = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in turned]
        if self.turns_last:
            pairs = zip(heads, turned, strict=True)
            turned = [torch.cat([x[..., :-rotary_dim], y], dim=-1) if x.shape != y.shape else y for x, y in pairs]
        return list(turned)

    def norm_and_rotate(
        self,
        heads: list[torch.Tensor],
        norms: list[DeferredNorm],
        positions: torch.Tensor,
        table: torch.Tensor,
        layout: str,
    ) -> list[torch.Tensor]:
        """The same for heads that are still to be normed, by norms that are alike."""
        if self.turns_last or self.gathers_halves:
            raise ValueError("norms must not be deferred where the rotation takes heads apart")
        kinds = {*filter(None, (norm.over(x, layout) for norm, x in zip(norms, heads, strict=True)))}
        if len(kinds) > 1:
            apart = zip(heads, norms, strict=True)
            return [y for x, norm in apart for y in self.norm_and_rotate([x], [norm], positions, table, layout)]
        op = torch.ops.mrrope.qk_norm_rotary.default
        norm_and_rotate = decompositions.qk_norm_rotary if should_decompose(heads, layout) else op
        turned: list[torch.Tensor] = norm_and_rotate(
            [x if x.stride(-1) == 1 else x.contiguous() for x in heads],
            [norm.weight for norm in norms],
            positions,
            table,
            norms[0].eps,
            norms[0].weight_offset,
            kinds.pop() if kinds else "head",
            layout,
            self.pairing,
            self.backwards,
        )
        return list(turned)


@dataclass(frozen=True)
class DeferredNorm:
    """An RMSNorm that was left to the rotation: x / rms(x) * (weight + weight_offset)."""

    weight: torch.Tensor
    eps: float
    weight_offset: float

    def over(self, heads: torch.Tensor, layout: str) -> str | None:
        """What one mean is taken of, as the op calls it; None where there is one head, and it makes no difference."""
        head_dim, count = heads.shape[-1], heads.shape[1 if layout == "bhsd" else 2]
        if self.weight.shape[0] == head_dim:
            return "head" if count > 1 else None
        if self.weight.shape[0] == head_dim * count:
            return "all_heads"
        raise ValueError(f"norms must be deferred to whole heads, got {tuple(heads.shape)} for {self.weight.shape[0]}")

    def is_like(self, other: DeferredNorm) -> bool:
        """Whether one call of the op can do both."""
        return (self.eps, self.weight_offset) == (other.eps, other.weight_offset)


class NotedTable:
    """A packed table on its way through one call of an attention module, with a note for where it is used."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def give(self, turned: list[torch.Tensor]) -> None:
        """Told what came out of the rotation."""

    def expect_nothing_waiting(self) -> None:
        """Raises where something was left to a rotation that did not happen."""


class TableAfterProjection(NotedTable):
    """What the projection rotated by this table already, and the model's own rotation is still to pass on."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        self.rotated: set[str] = set()

    def hand_out(self, roles: str, x: torch.Tensor) -> None:
        """Takes note that ``x``, which is q, k, v or several of them by its roles, comes from the op."""
        self.rotated.update({"q", "k"}.intersection(roles))

    def take(self, role: str, heads: torch.Tensor) -> bool:
        """Whether ``heads`` come rotated."""
        is_rotated = role in self.rotated
        self.rotated.discard(role)
        return is_rotated

    def expect_nothing_waiting(self) -> None:
        """Raises where a projection rotated for a rotation that did not happen."""
        if self.rotated:
            raise RuntimeError(
                f"the projection rotated {' and '.join(sorted(self.rotated))}, which this call does not rotate by "
                "itself: mrrope.patch the model without fuse_projection, and report this"
            )


class TableAfterNorms(NotedTable):
    """The norms to be done where the table is used."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        self.waiting: dict[str, DeferredNorm] = {}

    def wait(self, role: str, norm: DeferredNorm, x: torch.Tensor) -> None:
        """Takes note that ``x``, which is q or k by its role, is still to be normed."""
        self.waiting[role] = norm

    def take(self, role: str | None, heads: torch.Tensor) -> DeferredNorm | None:
        """What is still to be done to ``heads``; without a role, the first that waits."""
        if role is None:
            role = next(iter(self.waiting), "")
        return self.waiting.pop(role, None)

    def expect_nothing_waiting(self) -> None:
        """Raises where a norm was left to a rotation that did not happen."""
        if self.waiting:
            raise RuntimeError(
                f"the norm of {' and '.join(self.waiting)} was left to a rotation that this call did not come to: "
                "mrrope.unpatch the model, and report this"
            )


def own_code(function: Apply) -> Apply:
    """A function as its modeling module defines it.

    With the package ``kernels`` it is an instance of a module. Its class keeps the code and the signature; the instance
    may run a kernel from the Hub by now, for other devices than a probe's.
    """
    while is_fused(function):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return MethodType(type(function).forward, function) if isinstance(function, nn.Module) else function


@dataclass(frozen=True)
class CallForm:
    """Where a function takes q, k and the embedding: places among its parameters, by name."""

    heads: tuple[str, ...]
    embedding: tuple[str, ...]
    places: dict[str, int]
    unsqueeze_dim: int | None

    @staticmethod
    def of(function: Apply) -> CallForm | None:
        """The form of a function, or None where its parameters are not understood."""
        parameters = inspect.signature(own_code(inspect.unwrap(function))).parameters
        places = {name: place for place, name in enumerate(parameters)}
        for heads in (("q", "k"), ("xq", "xk"), ("x",), ("tensor",)):
            for embedding in (("cos", "sin"), ("freqs_cis",)):
                known = {*heads, *embedding, "unsqueeze_dim", "position_ids", "rotary_dim"}
                if {*heads, *embedding} <= places.keys() <= known:
                    unsqueeze = parameters.get("unsqueeze_dim")
                    return CallForm(heads, embedding, places, unsqueeze.default if unsqueeze else None)
        return None

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call passed for a parameter; None where it left it out."""
        place = self.places.get(name)
        return args[place] if place is not None and place < len(args) else kwargs.get(name)

    def call(self, function: Apply, heads: list[torch.Tensor], embedding: tuple[torch.Tensor, ...]) -> Any:
        """Calls a function of this form."""
        names = dict(zip(self.heads, heads, strict=True)) | dict(zip(self.embedding, embedding, strict=True))
        return function(**names)


@dataclass(frozen=True)
class RotaryFunction:
    """A function of a modeling module that applies what a rotary embedding gives, and how it does."""

    module: str
    name: str
    form: CallForm
    convention: Convention


def packed_embedding(positions: torch.Tensor, table: torch.Tensor, *, single: bool) -> tuple[torch.Tensor, ...]:
    """What a patched rotary embedding hands out: (positions, table) in place of (cosines, sines), or both in one tensor
    in place of one of complex numbers."""
    if not single:
        return positions, table
    batch = max(positions.shape[0], table.shape[0] if table.dim() == 2 else 1)
    return (torch.cat([positions.expand(batch, -1), table.expand(batch, -1)], dim=1),)


def fused(original: Apply, form: CallForm, convention: Convention) -> Apply:
    """The function that rotates by the op where a patched model calls, and leaves other calls to the original."""

    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        embedding = [form.argument(name, args, kwargs) for name in form.embedding]
        if not isinstance(embedding[0], torch.Tensor) or embedding[0].dtype != PACKED_TABLE_DTYPE:
            return original(*args, **kwargs)
        heads = [x for x in (form.argument(name, args, kwargs) for name in form.heads) if x is not None]
        layout = convention.layout
        if layout is None:
            unsqueeze_dim = form.argument("unsqueeze_dim", args, kwargs)
            layout = "bshd" if (form.unsqueeze_dim if unsqueeze_dim is None else unsqueeze_dim) == 2 else "bhsd"
        tokens = heads[-1].shape[2 if layout == "bhsd" else 1]
        if len(embedding) == 2:
            positions, table = embedding
        else:
            positions, table = embedding[0][:, :tokens], embedding[0][:, tokens:].contiguous()
        if isinstance(table, TableAfterNorms):
            turned = _rotate_after_norms(convention, form, heads, positions, table, layout)
        elif isinstance(table, TableAfterProjection):
            turned = _rotate_after_projection(convention, heads, positions, table, layout)
        else:
            turned = convention.rotate(heads, positions, table, layout)
        return turned[0] if len(form.heads) == 1 else tuple(turned)

    apply_rotary.__wrapped__ = original  # type: ignore[attr-defined]
    apply_rotary.is_fused = True  # type: ignore[attr-defined]
    return apply_rotary


def is_fused(function: Apply) -> bool:
    """Whether :func:`fused` made a function."""
    return getattr(function, "is_fused", False) is True


def fused_in(function: Apply) -> Apply | None:
    """The fused function that a function is, or wraps: a wrapper keeps it as ``__wrapped__`` or in its closure."""
    inner = inspect.unwrap(function, stop=is_fused)
    kept = (cell.cell_contents for cell in getattr(inner, "__closure__", None) or ())
    return inner if is_fused(inner) else next(filter(is_fused, kept), None)


def _rotate_after_norms(
    convention: Convention,
    form: CallForm,
    heads: list[torch.Tensor],
    positions: torch.Tensor,
    table: TableAfterNorms,
    layout: str,
) -> list[torch.Tensor]:
    roles = [None] if len(form.heads) == 1 else ["q", "k"][: len(heads)]
    norms = [table.take(role, x) for role, x in zip(roles, heads, strict=True)]
    waiting = [norm for norm in norms if norm is not None]
    if len(waiting) == len(heads) and all(norm.is_like(waiting[0]) for norm in waiting):
        turned = convention.norm_and_rotate(heads, waiting, positions, table.table, layout)
    else:
        turned = []
        for x, norm in zip(heads, norms, strict=True):
            if norm is None:
                turned += convention.rotate([x], positions, table.table, layout)
            else:
                turned += convention.norm_and_rotate([x], [norm], positions, table.table, layout)
    table.give(turned)
    return turned


def _rotate_after_projection(
    convention: Convention,
    heads: list[torch.Tensor],
    positions: torch.Tensor,
    table: TableAfterProjection,
    layout: str,
) -> list[torch.Tensor]:
    roles = ["q", "k"][: len(heads)]
    are_rotated = [table.take(role, x) for role, x in zip(roles, heads, strict=True)]
    left = [x for x, is_rotated in zip(heads, are_rotated, strict=True) if not is_rotated]
    turning = iter(convention.rotate(left, positions, table.table, layout) if left else [])
    turned = [x if is_rotated else next(turning) for x, is_rotated in zip(heads, are_rotated, strict=True)]
    table.give(turned)
    return turned


def apply_functions(module: ModuleType) -> dict[str, Apply]:
    """The functions of a modeling module that apply RoPE to text."""
    return {
        name: function
        for name, function in vars(module).items()
        if name.startswith("apply_rotary") and callable(function) and not name.endswith(("_vision", "_2d"))
    }


@functools.cache
def takes_embedding_apart(module_class: type) -> str | None:
    """Where a class computes with cosines and sines itself, beside handing them on: the expression that does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(module_class)))
    except (OSError, TypeError):
        return None
    unpacked = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id="position_embeddings")):
                unpacked |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value) | ast.Attribute(value=value):
                operands = [value]
            case ast.BinOp(left=left, right=right):
                operands = [left, right]
            case _:
                continue
        for operand in operands:
            if not isinstance(operand, ast.Name):
                continue
            if operand.id in unpacked or {"cos", "sin"} & set(operand.id.split("_")):
                return ast.unparse(node)
    return None


def candidates(form: CallForm) -> list[Convention]:
    """Every convention that a function of this form may follow."""
    orders: list[tuple[Literal["halves", "interleaved"], bool]]
    orders = [("halves", False), ("interleaved", False), ("interleaved", True)]
    layouts: tuple[Literal["bhsd", "bshd"] | None, ...] = ("bhsd", "bshd") if form.unsqueeze_dim is None else (None,)
    return [
        Convention(pairing, gathers_halves, turns_last, backwards, layout)
        for backwards, (pairing, gathers_halves), turns_last, layout in itertools.product(
            (False, True), orders, (False, True), layouts
        )
    ]


def find_convention(
    function: Apply,
    form: CallForm,
    embed: Callable[[torch.Tensor], Any],
    positions: torch.Tensor,
    table: torch.Tensor,
) -> Convention | None:
    """The convention under which the op does what ``function`` does with a model's own embedding.

    ``embed(x)`` is that embedding at ``positions``, for four tokens, on the device that ``function`` is probed on;
    ``table`` holds its frequencies, packed.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, device="cpu")
    rotary_dim = 2 * (table.shape[-1] - 1)
    # Heads, tokens and components differ in number, so that no layout is mistaken for another.
    for extra in (6, 0):
        shape = {"bhsd": (1, 2, 4, rotary_dim + extra), "bshd": (1, 4, 2, rotary_dim + extra)}
        for convention in candidates(form):
            heads = [random(shape[convention.layout or "bhsd"]) for _ in form.heads]
            try:
                embedding = embed(heads[0])
                embedding = embedding if isinstance(embedding, tuple) else (embedding,)
                want = form.call(function, [x.to(embedding[0].device, copy=True) for x in heads], embedding)
            except (RuntimeError, ValueError, IndexError):
                continue  # the function takes no such shapes
            packed = packed_embedding(positions, table, single=len(embedding) == 1)
            got = form.call(fused(function, form, convention), heads, packed)
            if _agree(want, got):
                return convention
    return None


def _agree(want: Any, got: Any) -> bool:
    wanted = want if isinstance(want, tuple) else (want,)
    found = got if isinstance(got, tuple) else (got,)
    return len(wanted) == len(found) and all(
        w.shape == f.shape and torch.allclose(w.cpu(), f, rtol=0.0, atol=1e-4)
        for w, f in zip(wanted, found, strict=True)
    )
