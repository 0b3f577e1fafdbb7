"""Models whose attention projects to q, k and v and then rotates, made to do both in one op.

An attention module of such a model calls its projections, ``q_proj``, ``k_proj`` and ``v_proj`` or one ``qkv_proj`` for
all, and a little later the function that applies RoPE. With ``fuse_projection`` its forward runs on a stand-in for
itself, whose first projection runs the op for all of them; the others hand out their part of its result, and the
function that applies RoPE is told by a note with the table that q and k are rotated already.

The weights of three projections are laid side by side in memory, where the op takes them for one; the parameters stay
the model's own, as views, so that they are saved, loaded and moved as ever, and take no more memory.

Whether an attention module does the same is found by trying. What changes later is looked at in every call: a
projection that has hooks, is replaced, wrapped or sharded, computes in another dtype, or whose weights want gradients,
projects by its own code, and what it gives is rotated after.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mrrope.hf.conventions import Convention, TableAfterProjection
from mrrope.hf.fusion import attention_proxy
from mrrope.hf.fusion.attention_proxy import StandIn, agree, random
from mrrope.hf.fusion.class_swap import change_class, change_class_back
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.ops.qkv_rotary import pack_qkv, split_qkv, unpack_qkv

logger = logging.getLogger(__name__)

PROJECTION = "_mrrope_projection"
"""Where an attention module keeps how its projections are fused."""
SEPARATE = ("q_proj", "k_proj", "v_proj")
PACKED = ("qkv_proj",)
FORMS = (SEPARATE, PACKED)
SIDE_BY_SIDE = {"weight": "_mrrope_packed_weight", "bias": "_mrrope_packed_bias"}
"""The buffers, not saved, that the parameters of three projections are views of."""
FEW_ROWS = 256
"""Up to so many on a GPU the op projects and rotates apart anyway, and the stand-ins take Python longer than they save.
"""
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FusedProjection:
    """How one attention module projects."""

    names: tuple[str, ...]
    num_q_heads: int
    num_kv_heads: int
    pairing: str

    def modules(self, attention: nn.Module) -> list[Any]:
        """The projections, as they are now."""
        return [getattr(attention, name, None) for name in self.names]

    def link(self, attention: nn.Module) -> bool:
        """Lays the weights of three projections side by side, if they make one; tells whether they do."""
        self.forget(attention)
        modules = self.modules(attention)
        if not self._fits(modules):
            return False
        if len(modules) == 1:
            return True
        with _as_made(modules[0].weight):
            for kind, name in SIDE_BY_SIDE.items():
                parameters = [getattr(module, kind) for module in modules]
                if parameters[0] is None:
                    continue
                packed = _shared_as(parameters, pack_qkv(*(parameter.detach() for parameter in parameters)))
                attention.register_buffer(name, packed, persistent=False)
                parts = unpack_qkv(packed, self.num_q_heads, self.num_kv_heads)
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.data = part
        return True

    def unlink(self, attention: nn.Module) -> None:
        """Gives every projection's weights memory of their own again."""
        self.forget(attention)
        if len(self.names) == 1:
            return
        for module in self.modules(attention):
            for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                # What wraps a projection, as adapters do, may have parameters of other kinds.
                if type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() > parameter.nbytes:
                    with _as_made(parameter):
                        parameter.data = _shared_as([parameter], parameter.detach().clone())

    def forget(self, attention: nn.Module) -> None:
        """Drops the buffers; the parameters keep the memory as long as they need it."""
        for name in SIDE_BY_SIDE.values():
            attention._buffers.pop(name, None)
            attention._non_persistent_buffers_set.discard(name)

    def is_linked(self, attention: nn.Module) -> bool:
        """Whether the projections' weights lie side by side: moving, copying or replacing them parts them."""
        modules = self.modules(attention)
        if not self._fits(modules):
            return False
        if len(modules) == 1:
            return True
        for kind, name in SIDE_BY_SIDE.items():
            parameters = [getattr(module, kind) for module in modules]
            packed = attention._buffers.get(name)
            if (packed is None) != (parameters[0] is None):
                return False
            if packed is None or torch.compiler.is_compiling():
                continue  # where code is compiled, addresses are not known
            place = packed.data_ptr()
            for parameter in parameters:
                if parameter.data_ptr() != place:
                    return False
                place += parameter.nbytes
        return True

    def weight_and_bias(self, attention: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of all projections as one."""
        if len(self.names) == 1:
            (module,) = self.modules(attention)
            return module.weight, module.bias
        weight, bias = (attention._buffers.get(name) for name in SIDE_BY_SIDE.values())
        assert weight is not None
        return weight, bias

    def may_fuse(self, attention: nn.Module, x: torch.Tensor) -> bool:
        """Whether the op may do the projections' work on ``x``."""
        modules = self.modules(attention)
        has_gradients = torch.is_grad_enabled() and len(modules) > 1
        if x.dim() != 3 or x.device.type == "meta" or torch.is_autocast_enabled(x.device.type):
            return False
        if not all(_is_plain(module, x) for module in modules):
            return False
        if has_gradients and any(p.requires_grad for module in modules for p in module.parameters(recurse=False)):
            return False
        return self.is_linked(attention) or (not torch.compiler.is_compiling() and self.link(attention))

    def _fits(self, modules: list[Any]) -> bool:
        """Whether projections, any of which may be another by now, make one."""
        if not all(type(module) is nn.Linear for module in modules):
            return False
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        if not all(map(_is_here, (*weights, *biases))):
            return False
        if len(modules) == 1:
            return True
        (q, k, v), first = (weight.shape for weight in weights), weights[0]
        return (
            q[0] * self.num_kv_heads == k[0] * self.num_q_heads
            and q[1] == k[1]
            and k == v
            and len({bias is None for bias in biases}) == 1
            and all(p is None or (p.dtype == first.dtype and p.device == first.device) for p in (*weights, *biases))
        )


def _is_here(tensor: torch.Tensor | None) -> bool:
    """Whether a parameter's values, if there is one, lie in this process's memory, as they are: not sharded, quantised
    or left out, nor a tensor that stands in for the parameter, as in torch.func.functional_call."""
    return tensor is None or (type(tensor) is nn.Parameter and not tensor.is_meta)


def _shared_as(parameters: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Values to be the parameters' own, in memory that other processes see, if that is where those are."""
    is_shared = all(parameter.is_shared() for parameter in parameters)  # type: ignore[no-untyped-call]
    return values.share_memory_() if is_shared else values  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _as_made(parameter: torch.Tensor) -> Iterator[None]:
    """Where a parameter can be given other memory: what gets it in another mode can be neither trained nor run."""
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        yield


def _is_plain(module: Any, x: torch.Tensor) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        and module.weight.dtype == x.dtype
        and module.weight.device == x.device
    )


class OneCall:
    """The projections of one call: the first one does the work of all."""

    def __init__(
        self, attention: nn.Module, projection: FusedProjection, positions: torch.Tensor, table: TableAfterProjection
    ) -> None:
        self.attention = attention
        self.projection = projection
        self.positions = positions
        self.table = table
        self.x: torch.Tensor | None = None
        self.parts: list[torch.Tensor] | None = None

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What the projection of this name gives for ``x``; q and k rotated, with a note that they are."""
        if self.x is None:
            self.x = x
            if self.projection.may_fuse(self.attention, x):
                self.parts = self._project_all(x)
        if self.parts is None or x is not self.x:
            result: torch.Tensor = getattr(self.attention, name)(x)
            return result
        part = self.parts[self.projection.names.index(name)]
        self.table.hand_out(name.removesuffix("_proj"), part)
        return part

    def _project_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        projection = self.projection
        weight, bias = projection.weight_and_bias(self.attention)
        heads = projection.num_q_heads, projection.num_kv_heads
        packed: torch.Tensor = torch.ops.mrrope.qkv_rotary.default(
            x, weight, bias, self.positions, self.table.table, *heads, projection.pairing
        )
        if len(projection.names) == 1:
            return [packed]
        return [part.flatten(-2) for part in split_qkv(packed, *heads)]


class ProjectionInOneCall(StandIn):
    """Hands out its part of what one op does for all; else a projection as it is."""

    def __init__(self, module: nn.Module, call: OneCall, name: str) -> None:
        super().__init__(module)
        object.__setattr__(self, "_mrrope_call", call)
        object.__setattr__(self, "_mrrope_name", name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._mrrope_call.project(self._mrrope_name, x)  # type: ignore[no-any-return]


class WithOneProjection(StandIn):
    """Hands out projections that are done by one op."""

    def __init__(self, call: OneCall) -> None:
        super().__init__(call.attention)
        object.__setattr__(self, "_mrrope_call", call)

    def __getattr__(self, name: str) -> Any:
        call: OneCall = vars(self)["_mrrope_call"]
        value = super().__getattr__(name)
        return ProjectionInOneCall(value, call, name) if name in call.projection.names else value


def _begin(
    attention: nn.Module, projection: FusedProjection, positions: torch.Tensor, table: torch.Tensor
) -> tuple[WithOneProjection, TableAfterProjection]:
    noted = TableAfterProjection(table)
    return WithOneProjection(OneCall(attention, projection, positions, noted)), noted


@functools.cache
def class_that_fuses(original: type[nn.Module]) -> type[nn.Module]:
    """The class of an attention module, but with one projection in calls of a patched model."""
    fusing = attention_proxy.class_on_stand_ins(original, PROJECTION, _begin, class_that_fuses)
    fused_forward, reduce = fusing.forward, fusing.__reduce_ex__

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        is_plain = not torch.compiler.is_compiling() and _takes_longer_fused(hidden_states)
        return (original.forward if is_plain else fused_forward)(self, *args, **kwargs)

    def ensure_linked(self: nn.Module) -> None:
        projection: FusedProjection | None = vars(self).get(PROJECTION)
        if projection is not None and not projection.is_linked(self):
            projection.link(self)

    def applied(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # Moving a model, or casting it, gives every parameter memory of its own.
        projection: FusedProjection | None = vars(self).get(PROJECTION)
        if projection is not None:
            projection.forget(self)
        original._apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        if projection is not None:
            projection.link(self)
        return self

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # What torch.save finds side by side it loads so; in its old format the values come last, too late to be copied.
        ensure_linked(self)
        return reduce(self, protocol)

    def set_state(self: nn.Module, state: Any) -> None:
        # So does copying it; a compiled copy could not lay them side by side any more.
        original.__setstate__(self, state)  # type: ignore[no-untyped-call]
        ensure_linked(self)

    fusing.forward = forward
    fusing._apply = applied  # type: ignore[method-assign]
    fusing.__reduce_ex__ = reduced  # type: ignore[method-assign,assignment]
    fusing.__setstate__ = set_state  # type: ignore[method-assign]
    return fusing


def _takes_longer_fused(x: torch.Tensor) -> bool:
    return x.is_cuda and x.shape[:-1].numel() <= FEW_ROWS


# --- which, and whether ---


class UnfusableProjectionError(Exception):
    """Why the op cannot project for a model's attention modules."""


def projections_fused_in(module: nn.Module) -> FusedProjection | None:
    """How :func:`fuse_projections` changed this attention module, if it did."""
    return vars(module).get(PROJECTION)


def fuse_again(module: nn.Module, projection: FusedProjection) -> None:
    """Undoes :func:`restore_projections`; whatever the projections are by now, every call looks at them anyway."""
    projection.link(module)
    change_class(module, PROJECTION, projection, class_that_fuses)


def restore_projections(module: nn.Module) -> None:
    """Undoes what :func:`fuse_projections` did to an attention module."""
    projection: FusedProjection = vars(module)[PROJECTION]
    projection.unlink(module)
    change_class_back(module, PROJECTION)


def fuse_projections(model: nn.Module) -> None:
    """Makes the attention modules of a patched model project and rotate by one op.

    Raises :class:`UnfusableProjectionError` where one of them cannot; those before it are fused then.
    """
    rotaries = [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]
    candidates = [module for module in model.modules() if _may_be_attention(module)]
    if not candidates:
        raise UnfusableProjectionError(
            "none of its modules takes position_embeddings and has q_proj, k_proj and v_proj, or qkv_proj"
        )
    uses = Counter(parameter for attention in candidates for parameter in _projected_by(attention))
    for attention in candidates:
        if any(uses[parameter] > 1 for parameter in _projected_by(attention)):
            raise UnfusableProjectionError(f"{type(attention).__name__} has projections that share their weights")
        for why in _fuse(attention, rotaries):
            raise UnfusableProjectionError(f"{type(attention).__name__} {why}")
    if not any(map(projections_fused_in, candidates)):
        raise UnfusableProjectionError("none of its attention modules rotates")


def _may_be_attention(module: nn.Module) -> bool:
    has_projections = any(all(isinstance(getattr(module, name, None), nn.Module) for name in names) for names in FORMS)
    return has_projections and "position_embeddings" in inspect.signature(type(module).forward).parameters


def _names_in(attention: nn.Module) -> tuple[str, ...]:
    return next(names for names in FORMS if all(hasattr(attention, name) for name in names))


def _projected_by(attention: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all projections, one by one."""
    for name in _names_in(attention):
        yield from getattr(attention, name).parameters()


def _fuse(attention: nn.Module, rotaries: list[TableRotaryEmbedding]) -> Iterator[str]:
    """Fuses one attention module's projections, or tells why not."""
    names = _names_in(attention)
    if why := _why_not(attention, names):
        yield why
        return
    conventions = {convention for rotary in rotaries for convention in _conventions_of(attention, rotary)}
    if len(conventions) != 1 or not _is_plain_convention(*conventions):
        yield "rotates in a way that a projection cannot take over"
        return
    heads = _heads_of(attention, names)
    if heads is None:
        yield f"has projections that do not come to whole heads of {getattr(attention, 'head_dim', None)}"
        return
    projection = FusedProjection(names, *heads, next(iter(conventions)).pairing)
    projection.link(attention)
    found = {outcome for rotary in rotaries for outcome in _tried(attention, projection, rotary)}
    if "the same" in found:
        change_class(attention, PROJECTION, projection, class_that_fuses)
        return
    projection.unlink(attention)
    # Layers that do not rotate, as some models have, project as they did.
    if found != {"does not rotate"}:
        yield "does more than split heads between its projection and the rotation, or gives other results fused"


def _why_not(attention: nn.Module, names: tuple[str, ...]) -> str | None:
    for name in names:
        module = getattr(attention, name)
        if type(module) is not nn.Linear:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            return f"has a {name} that is quantised or wrapped: {kind}, where a plain torch.nn.Linear is needed"
        if module.weight.dtype not in FLOATING or attention_proxy.is_sharded(module.weight) or module.weight.is_meta:
            return f"has a {name} whose weights are not all there: {module.weight.dtype} on {module.weight.device}"
    first, *others = (
        (f"{name}.{kind}", parameter)
        for name in names
        for kind, parameter in getattr(attention, name).named_parameters()
    )
    for other, parameter in others:
        if (parameter.dtype, parameter.device) != (first[1].dtype, first[1].device):
            kinds = (f"{name} of {p.dtype} on {p.device}" for name, p in (first, (other, parameter)))
            return f"has a {' and a '.join(kinds)}, where all must be alike"
    biases = {name for name in names if getattr(attention, name).bias is not None}
    if biases and len(biases) < len(names):
        return f"has a bias in {' and '.join(sorted(biases))} only"
    if not attention_proxy.can_be_tried(attention):
        return "cannot be tried by itself: it has hooks, or takes more than hidden states and position embeddings"
    return None


def _conventions_of(attention: nn.Module, rotary: TableRotaryEmbedding) -> Iterator[Convention]:
    """How the functions of an attention module's own modeling module apply what a rotary embedding gives."""
    own = [function for function in rotary.functions if function.module == type(attention).__module__]
    for function in own or rotary.functions:
        if len(function.form.heads) == 2 and len(function.form.embedding) == 2:
            yield function.convention


def _is_plain_convention(convention: Convention) -> bool:
    return not (convention.gathers_halves or convention.turns_last or convention.backwards)


def _heads_of(attention: nn.Module, names: tuple[str, ...]) -> tuple[int, int] | None:
    """How many heads q has, and k and v each."""
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int):
        return None
    outputs = [getattr(attention, name).out_features for name in names]
    if names == SEPARATE:
        q, k, v = outputs
        return (q // head_dim, k // head_dim) if k == v and q % head_dim == 0 and k % head_dim == 0 else None
    config: Any = getattr(attention, "config", None)
    q, kv = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(q, int) and isinstance(kv, int) and outputs[0] == (q + 2 * kv) * head_dim:
        return q, kv
    return None


class TriedProjection(TableAfterProjection):
    """Sees whether the rotation gets what the op gave, untouched, and keeps what q and k were rotated to."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        self.given: dict[str, tuple[torch.Tensor, int]] = {}
        self.untouched: set[str] = set()
        self.turned: list[torch.Tensor] = []

    def hand_out(self, roles: str, x: torch.Tensor) -> None:
        super().hand_out(roles, x)
        self.given |= dict.fromkeys(roles, (x, x._version))

    def take(self, role: str, heads: torch.Tensor) -> bool:
        is_rotated = super().take(role, heads)
        if is_rotated:
            x, version = self.given[role]
            if x.untyped_storage().data_ptr() == heads.untyped_storage().data_ptr() and heads._version == version:
                self.untouched.add(role)
        return is_rotated

    def give(self, turned: list[torch.Tensor]) -> None:
        self.turned.extend(turned)


Outcome = Literal["the same", "other", "does not rotate"]


@torch.inference_mode(mode=False)  # where tensors do not tell whether they were written to
@torch.no_grad()
def _tried(attention: nn.Module, projection: FusedProjection, rotary: TableRotaryEmbedding) -> set[Outcome]:
    """What comes of fusing an attention module's projection, by trying, for each kind of layer."""
    (first, *_) = projection.modules(attention)
    hidden_states = random(1, attention_proxy.TRIED_TOKENS, first.in_features).to(first.weight)
    with attention_proxy.left_as_it_was(attention):
        attention.eval()
        embeddings = list(attention_proxy.tried_embeddings(rotary, hidden_states))
        return {_outcome(attention, projection, hidden_states, *packed) for packed in embeddings}


def _large_scale(modules: list[Any], hidden_states: torch.Tensor) -> float:
    """By how much to multiply hidden states, so that their dtype still holds what is projected and rotated."""
    largest = max(float(module(hidden_states).abs().max()) for module in modules)
    return min(1e3, torch.finfo(hidden_states.dtype).max / (4 * max(largest, 1.0)))


def _outcome(
    attention: nn.Module,
    projection: FusedProjection,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    packed: torch.Tensor,
) -> Outcome:
    # Large ones too, where models that clip q and k would clip. What comes after them is then no measure.
    for scale in (1.0, _large_scale(projection.modules(attention), hidden_states)):
        tables, outputs = [], []
        for is_fused in (False, True):
            table = TriedProjection(packed)
            call = OneCall(attention, projection, positions, table)
            runs = WithOneProjection(call) if is_fused else attention
            try:
                output = attention_proxy.try_call(attention, runs, scale * hidden_states, (positions, table))
            except Exception:  # its own code may raise anything where it is not called as it expects
                logger.debug("%s cannot be tried", type(attention).__name__, exc_info=True)
                return "other"
            tables.append(table)
            outputs.append(output)
        plain, fused = tables
        if not plain.turned:
            return "does not rotate"
        if fused.untouched != {"q", "k"} or len(plain.turned) != len(fused.turned):
            return "other"
        if not all(agree(got, want) for got, want in zip(fused.turned, plain.turned, strict=True)):
            return "other"
        if scale == 1.0 and not agree(outputs[1], outputs[0]):
            return "other"
    return "the same"
