"""The conventions by which models apply RoPE, probing which one a model follows, and the fused apply function.

Modeling code of transformers applies RoPE by a function of its module, ``apply_rotary_pos_emb`` or the like. These
functions differ in few respects: which components form a pair, whether the result is reordered, which part of the head
is rotated and in which direction, whether q and k share a call. A :class:`Convention` is one combination. Probing
compares every combination with the model's own function on random numbers, so there is no list of models, and a
function that no combination reproduces is detected.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import nn

from mrrope.hf import handoff
from mrrope.ops import decompositions
from mrrope.ops.decompositions import should_decompose
from mrrope.ops.learnable_rotary import rotated_heads

Apply = Callable[..., Any]


@dataclass(frozen=True)
class Convention:
    """One RoPE variant: pairing, layout, partial rotation, sign."""

    pairing: Literal["halves", "interleaved"]
    gathers_halves: bool = False
    """The input is interleaved and the output is in halves."""
    rotates_last: bool = False
    """With partial rotation: the last components are rotated instead of the first."""
    backwards: bool = False
    """The angle is negated."""
    layout: Literal["bhsd", "bshd"] | None = None
    """None: the call's ``unsqueeze_dim`` determines it."""

    def rotate(
        self, heads: list[torch.Tensor], positions: torch.Tensor, table: torch.Tensor, layout: str
    ) -> list[torch.Tensor]:
        """Rotate q, or q and k, as the model's own function does.

        Args:
            heads: q, or q and k.
            positions: ``[batch, tokens]``, or ``[rows, batch, tokens]`` for M-RoPE.
            table: a packed table, or a learned one, which gets gradients (:mod:`mrrope.hf.handoff`).
            layout: of the heads.
        """
        rotary_dim = 2 * (table.shape[-1] - 1)
        inputs = [x[..., -rotary_dim:] if self.rotates_last else x for x in heads]
        inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
        rotated: Any
        if handoff.is_learned(table):
            rotated = self._rotate_by_learned(inputs, positions, table, layout)
        else:
            op = torch.ops.mrrope.rotary.default
            rotate = decompositions.rotary if should_decompose(heads, layout) else op
            rotated = rotate(inputs, positions, table, layout, self.pairing, self.backwards)
        if self.gathers_halves:
            rotated = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in rotated]
        if self.rotates_last:
            pairs = zip(heads, rotated, strict=True)
            rotated = [torch.cat([x[..., :-rotary_dim], y], dim=-1) if x.shape != y.shape else y for x, y in pairs]
        return list(rotated)

    def _rotate_by_learned(
        self, heads: list[torch.Tensor], positions: torch.Tensor, table: torch.Tensor, layout: str
    ) -> list[torch.Tensor]:
        if positions.dim() == 3:
            raise ValueError("a learned table must come with one position per token, got M-RoPE's rows of positions")
        frequencies, factor = table[0, :, :-1].contiguous(), table[0, :, -1].contiguous()
        frequencies = -frequencies if self.backwards else frequencies
        query_factors = handoff.query_factors_of(table, heads[0].shape[layout.index("h")])
        return rotated_heads(heads, positions, frequencies, factor, layout, self.pairing, query_factors)


def own_code(function: Apply) -> Apply:
    """Return an apply function as its modeling module defines it.

    With the package ``kernels`` the function is an instance of a module. Its class keeps the code and the signature;
    the instance may run a kernel from the Hub, for other devices than a probe's.
    """
    while is_fused(function):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return MethodType(type(function).forward, function) if isinstance(function, nn.Module) else function


@dataclass(frozen=True)
class CallForm:
    """The parameters by which an apply function takes q, k and the embedding."""

    heads: tuple[str, ...]
    embedding: tuple[str, ...]
    places: dict[str, int]
    unsqueeze_dim: int | None
    takes_q_alone: bool = False
    """k may be left out; the function then returns q instead of a tuple."""

    @staticmethod
    def of(function: Apply) -> CallForm | None:
        """Return the form of a function, or None where its parameters are unknown ones."""
        parameters = inspect.signature(own_code(inspect.unwrap(function))).parameters
        places = {name: place for place, name in enumerate(parameters)}
        for heads in (("q", "k"), ("xq", "xk"), ("x",), ("tensor",)):
            for embedding in (("cos", "sin"), ("freqs_cis",)):
                known = {*heads, *embedding, "unsqueeze_dim", "position_ids", "rotary_dim"}
                if {*heads, *embedding} <= places.keys() <= known:
                    unsqueeze = parameters.get("unsqueeze_dim")
                    takes_q_alone = len(heads) == 2 and parameters[heads[1]].default is None
                    return CallForm(heads, embedding, places, unsqueeze.default if unsqueeze else None, takes_q_alone)
        return None

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call passed for a parameter, or None."""
        place = self.places.get(name)
        return args[place] if place is not None and place < len(args) else kwargs.get(name)

    def call(self, function: Apply, heads: list[torch.Tensor], embedding: tuple[torch.Tensor, ...]) -> Any:
        """Call a function of this form, with q and k or, where it takes it alone, with q."""
        names = dict(zip(self.heads, heads, strict=False)) | dict(zip(self.embedding, embedding, strict=True))
        return function(**names)

    def given(self, heads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return every selection of heads that a function of this form can be called with."""
        return [heads, heads[:1]] if self.takes_q_alone else [heads]

    def returned(self, heads: Sequence[torch.Tensor]) -> Any:
        """Return heads as a function of this form returns them."""
        is_alone = len(self.heads) == 1 or (self.takes_q_alone and len(heads) == 1)
        return heads[0] if is_alone else tuple(heads)


@dataclass(frozen=True)
class RotaryFunction:
    """An apply function of a modeling module, with its form and its convention."""

    module: str
    name: str
    form: CallForm
    convention: Convention
    by_token: bool = False
    """Whether its callers select tokens of the embedding (:mod:`mrrope.hf.handoff`)."""


def fused(original: Apply, form: CallForm, convention: Convention, *, by_token: bool = False) -> Apply:
    """Return the apply function that runs the op for patched models and ``original`` for all others."""

    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        embedding = [form.argument(name, args, kwargs) for name in form.embedding]
        if not handoff.is_packed(embedding):
            return original(*args, **kwargs)
        heads = [x for x in (form.argument(name, args, kwargs) for name in form.heads) if x is not None]
        # Attention that selects tokens of one sequence passes heads without a batch dimension.
        is_one_sequence = by_token and heads[0].dim() == 3
        if is_one_sequence:
            heads = [x[None] for x in heads]
        layout = convention.layout
        if layout is None:
            given = form.argument("unsqueeze_dim", args, kwargs)
            unsqueeze_dim = form.unsqueeze_dim if given is None else given
            layout = "bshd" if unsqueeze_dim == (1 if is_one_sequence else 2) else "bhsd"
        tokens = heads[-1].shape[2 if layout == "bhsd" else 1]
        rotated = convention.rotate(heads, *handoff.unpack(embedding, tokens, by_token=by_token), layout)
        return form.returned([x[0] for x in rotated] if is_one_sequence else rotated)

    apply_rotary.__wrapped__ = original  # type: ignore[attr-defined]
    apply_rotary.is_fused = True  # type: ignore[attr-defined]
    return apply_rotary


def is_fused(function: Apply) -> bool:
    """Whether :func:`fused` made a function."""
    return getattr(function, "is_fused", False) is True


def fused_in(function: Apply) -> Apply | None:
    """Return the fused function that a function is or wraps, by ``__wrapped__`` or in its closure."""
    inner = inspect.unwrap(function, stop=is_fused)
    kept = (cell.cell_contents for cell in getattr(inner, "__closure__", None) or ())
    return inner if is_fused(inner) else next(filter(is_fused, kept), None)


def apply_functions(module: ModuleType) -> dict[str, Apply]:
    """Return the functions of a modeling module that apply RoPE to text, by name."""
    return {
        name: function
        for name, function in vars(module).items()
        if name.startswith("apply_rotary") and callable(function) and not name.endswith(("_vision", "_2d"))
    }


def possible_conventions(form: CallForm) -> list[Convention]:
    """Return every convention that a function of this form can follow."""
    orders: list[tuple[Literal["halves", "interleaved"], bool]]
    orders = [("halves", False), ("interleaved", False), ("interleaved", True)]
    layouts: tuple[Literal["bhsd", "bshd"] | None, ...] = ("bhsd", "bshd") if form.unsqueeze_dim is None else (None,)
    return [
        Convention(pairing, gathers_halves, rotates_last, backwards, layout)
        for backwards, (pairing, gathers_halves), rotates_last, layout in itertools.product(
            (False, True), orders, (False, True), layouts
        )
    ]


def find_convention(
    function: Apply,
    form: CallForm,
    embed: Callable[[torch.Tensor], Any],
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    by_token: bool = False,
) -> Convention | None:
    """Return the convention under which the op reproduces ``function``, or None.

    Args:
        function: a model's own apply function.
        form: its parameters.
        embed: from x to the model's own embedding at ``positions``, on the device that ``function`` is probed on.
        positions: of four tokens.
        table: the model's own frequencies, packed.
        by_token: whether the embedding is packed by token.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, device="cpu")
    rotary_dim = 2 * (table.shape[-1] - 1)
    # The numbers of heads, tokens and components differ, so that no layout is mistaken for another.
    for extra in (6, 0):
        shape = {"bhsd": (1, 2, 4, rotary_dim + extra), "bshd": (1, 4, 2, rotary_dim + extra)}
        for convention in possible_conventions(form):
            heads = [random(shape[convention.layout or "bhsd"]) for _ in form.heads]
            try:
                embedding = embed(heads[0])
                embedding = embedding if isinstance(embedding, tuple) else (embedding,)
                want = [form.call(function, _copied(given, embedding), embedding) for given in form.given(heads)]
            except (RuntimeError, ValueError, IndexError):
                continue  # the function rejects these shapes
            packed = handoff.pack(positions, table, in_one_tensor=len(embedding) == 1, by_token=by_token)
            replacement = fused(function, form, convention, by_token=by_token)
            got = [form.call(replacement, given, packed) for given in form.given(heads)]
            if all(map(_agree, want, got)):
                return convention
    return None


def _copied(heads: list[torch.Tensor], embedding: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return heads for a function that may write to them, on the device of the embedding."""
    return [x.to(embedding[0].device, copy=True) for x in heads]


def _agree(want: Any, got: Any) -> bool:
    wanted = want if isinstance(want, tuple) else (want,)
    found = got if isinstance(got, tuple) else (got,)
    return len(wanted) == len(found) and all(
        w.shape == f.shape and torch.allclose(w.cpu(), f, rtol=0.0, atol=1e-4)
        for w, f in zip(wanted, found, strict=True)
    )
