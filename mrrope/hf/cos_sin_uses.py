"""Find where the source of a module computes with cosines and sines instead of passing them to an apply function.

Custom attention may rotate by itself, which the op cannot replace. Attention that only selects tokens, such as those of
a block of keys, can be served: it gets positions and tables by token (:mod:`mrrope.hf.handoff`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class CosSinUse:
    """An expression of cosines or sines in the source of a module."""

    expression: str
    selects_tokens: bool
    """It selects tokens, and the result goes to an apply function."""


@functools.cache
def cos_sin_uses(module_class: type) -> list[CosSinUse]:
    """Return the expressions by which the source of a class computes with cosines and sines."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(module_class)))
    except (OSError, TypeError):
        return []
    unpacked = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id="position_embeddings")):
                unpacked |= {target.id for target in targets if isinstance(target, ast.Name)}
    selections = _token_selections(tree)
    uses = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value) | ast.Attribute(value=value):
                operands = [value]
            case ast.BinOp(left=left, right=right):
                operands = [left, right]
            case _:
                continue
        names = [operand.id for operand in operands if isinstance(operand, ast.Name)]
        if any(name in unpacked or _is_cos_or_sin(name) for name in names):
            uses.append(CosSinUse(ast.unparse(node), node in selections))
    return uses


def _is_cos_or_sin(name: str) -> bool:
    return bool({"cos", "sin"} & set(name.split("_")))


def _token_selections(tree: ast.AST) -> set[ast.AST]:
    """Return the subscripts of tokens whose value is only passed to an apply function or kept as cosines or sines."""
    passed_on: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name.startswith("apply_rotary"):
                passed_on += [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                passed_on += [v for t, v in zip(targets, values, strict=False) if _is_cos_or_sin(ast.unparse(t))]
            case ast.Assign(targets=[target], value=value) if _is_cos_or_sin(ast.unparse(target)):
                passed_on.append(value)
    return {subscript for node in passed_on if (subscript := _selected_tokens(node)) is not None}


def _selected_tokens(node: ast.AST) -> ast.AST | None:
    """Return the subscript in ``x[sequence, tokens, :]`` or ``x[sequence].index_select(0, tokens)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="index_select"), args=[ast.Constant(value=0), _]):
            node = value
    match node:
        case ast.Subscript(slice=ast.Tuple(elts=[_, _, ast.Slice(lower=None, upper=None, step=None)])):
            return node
        case ast.Subscript(slice=ast.Name() | ast.Slice() | ast.Constant(value=int())):
            return node
    return None
