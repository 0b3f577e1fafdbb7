"""A pass of vLLM's compiler that fuses the RMSNorms of q and k with the rotation, into one ``qk_norm_rotary``.

Inductor fuses norms with vLLM's own rope, which it sees as arithmetic. Our op is opaque to it, so without this pass
models that norm q and k (Qwen3, OLMo 2, Gemma 3) would launch one more kernel in every layer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.ir  # noqa: F401 (registers rms_norm)
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

import mrrope.ops  # noqa: F401 (registers the ops)
from mrrope.vllm import hooks

aten = torch.ops.aten
RMS_NORM = torch.ops.vllm_ir.rms_norm.default
ROTARY = torch.ops.mrrope.rotary.default
QK_NORM_ROTARY = torch.ops.mrrope.qk_norm_rotary.default
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
ORDER_PRESERVING = (*RESHAPES, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim)
"""Ops that return the elements of their first argument in the same order."""


@dataclass(frozen=True)
class HeadNorm:
    """The RMSNorm of heads that are rotated next."""

    heads: fx.Node
    """The heads before the norm."""
    sizes: Any
    """What to reshape ``heads`` to for the op; None where they have a dimension of heads already."""
    weight: fx.Node
    weight_offset: float
    eps: float
    over: str

    @property
    def settings(self) -> tuple[float, float, str]:
        """The settings that q and k must share."""
        return self.eps, self.weight_offset, self.over


def fuse_norms(graph: fx.Graph) -> None:
    """Replace rotations of normed heads by the fused op. Norms that are left without a use stay in the graph."""
    for rotation in graph.find_nodes(op="call_function", target=ROTARY):
        arguments = _by_name(rotation)
        norms = [_norm_before(heads) for heads in arguments.pop("heads")]
        matched = [norm for norm in norms if norm is not None]
        if len(matched) < len(norms) or len({norm.settings for norm in matched}) > 1:
            continue
        with graph.inserting_before(rotation):
            heads = [_heads_before(norm, arguments["layout"]) for norm in matched]
            eps, weight_offset, over = matched[0].settings
            arguments |= {"heads": heads, "weights": [norm.weight for norm in matched], "eps": eps}
            arguments |= {"weight_offset": weight_offset, "over": over}
            fused = _call(QK_NORM_ROTARY, *(arguments[name] for name in _argument_names(QK_NORM_ROTARY)))
        rotation.replace_all_uses_with(fused)
        graph.erase_node(rotation)


def _argument_names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _by_name(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip(_argument_names(node.target), node.args, strict=False)) | node.kwargs
    return {argument.name: argument.default_value for argument in schema} | given


def _call(op: torch._ops.OpOverload, *args: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with the fake value that later passes read."""
    graph = next(arg for arg in torch.utils._pytree.tree_leaves(args) if isinstance(arg, fx.Node)).graph
    node = graph.call_function(op, args)
    node.meta["val"] = op(*fx.map_arg(args, _value))
    return node


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _norm_before(rotated: fx.Node) -> HeadNorm | None:
    """Return the norm that gives these heads, where nothing else reads its result and the fused op can replace it."""
    *reshapes, norm = _sources(rotated)
    if norm.target is not RMS_NORM or any(len(node.users) > 1 for node in (*reshapes, norm)):
        return None
    arguments = _by_name(norm)
    if arguments["variance_size"] is not None or arguments["weight"] is None:
        return None
    x = arguments["x"]
    weight, weight_offset = _weight_and_offset(arguments["weight"])
    tokens, head_count, head_dim = _token_shape(rotated)
    width = _value(x).shape[-1]
    over = {head_count * head_dim: "all_heads", head_dim: "head"}.get(width)
    if over is None or _value(weight).dtype != _value(x).dtype or not _has_shape(weight, (width,)):
        return None
    settings = weight, weight_offset, arguments["epsilon"], over
    # The farthest source skips copies, such as that of the half of a gated projection (Qwen3-Next).
    before = [node for node in reversed(_sources(x)) if _value(node).stride(-1) == 1]
    for node in before:
        if _has_shape(node, (tokens, head_count, head_dim)):
            return HeadNorm(node, None, *settings)
    flat = next((node for node in before if _has_shape(node, (tokens, head_count * head_dim))), x)
    for reshape in reshapes:
        if reshape.target in RESHAPES and _has_shape(reshape, (tokens, head_count, head_dim)):
            return HeadNorm(flat, reshape.args[1], *settings)
    return None


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return a node and those that it has its elements from, in their order, up to the one that computes them."""
    sources = [node]
    while sources[-1].target in ORDER_PRESERVING:
        source = sources[-1].args[0]
        assert isinstance(source, fx.Node)
        sources.append(source)
    return sources


def _token_shape(rotated: fx.Node) -> tuple[Any, int, int]:
    """Return tokens, heads and head_dim, of a layout with a dimension for tokens of a sequence or without."""
    shape = _value(rotated).shape
    return shape[0], shape[-2], shape[-1]


def _has_shape(node: fx.Node, shape: tuple[Any, ...]) -> bool:
    own = _value(node).shape
    return len(own) == len(shape) and all(statically_known_true(a == b) for a, b in zip(own, shape, strict=True))


def _weight_and_offset(weight: fx.Node) -> tuple[fx.Node, float]:
    """Return the stored weight and what the model adds to it in float32: 1 for Gemma, else 0."""
    if weight.target is not aten.add.Tensor or _value(weight).dtype != torch.float32:
        return weight, 0.0
    stored, offset = weight.args
    if not isinstance(stored, fx.Node) or not isinstance(offset, (int, float)):
        return weight, 0.0
    if stored.target is torch.ops.prims.convert_element_type.default:
        stored = stored.all_input_nodes[0]
    return stored, float(offset)


def _heads_before(norm: HeadNorm, layout: str) -> fx.Node:
    """Return the heads before the norm in the shape that the op takes."""
    heads = norm.heads if norm.sizes is None else _call(aten.reshape.default, norm.heads, norm.sizes)
    return heads if layout == "thd" else _call(aten.unsqueeze.default, heads, 1)


def _with_norm_fusion(configure: Callable[..., None], manager: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Append the pass, after vLLM's own and before the lowering of norms to arithmetic.

    For served models only: passes are in the keys of compiled graphs.
    """
    from vllm.compilation.passes.inductor_pass import CallableInductorPass

    configure(manager, config, *args, **kwargs)
    if not hooks.is_served(config):
        return
    # The whole module counts for the key of compiled graphs in caches.
    source = inspect.getsource(sys.modules[__name__])
    manager.add(CallableInductorPass(fuse_norms, uuid=CallableInductorPass.hash_source(source)))


def install() -> None:
    """Hook vLLM's manager of compiler passes."""
    from vllm.compilation.passes.pass_manager import PostGradPassManager

    hooks.wrap(PostGradPassManager, "configure", _with_norm_fusion)
