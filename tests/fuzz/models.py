"""Patching a random model, and every comparison of what it reads then."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tiny_models
import torch
from transformers import PreTrainedModel

import mrrope
from fuzz.model_cases import ModelCase
from fuzz.reading import difference, read
from fuzz.shrinking import CaseError, draw, raised
from mrrope.hf.patch import is_patched
from mrrope.hf.rotary_embedding import SwappedTable, TableRotaryEmbedding

# How many times the effect of one rounding, of embeddings and of frequencies, two right readings may be apart.
ROUNDINGS = 16.0
LEAST_TOLERANCE = 2e-6
MAX_SCALE = 4.0


def random_case(rng: random.Random, device: str) -> ModelCase:
    return draw(ModelCase, rng, device=device, family=rng.choice(tiny_models.causal_lm_families()))


def failures_in(cases: list[ModelCase]) -> list[CaseError | None]:
    """Of each case, what went wrong."""
    found: list[CaseError | None] = []
    for case in cases:
        try:
            check(case)
        except CaseError as failure:
            found.append(failure)
        else:
            found.append(None)
    return found


def check(case: ModelCase) -> None:
    """Raises the :class:`CaseError` of a case, if it has one."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(model, case)
        except CaseError:
            raise
        except Exception as error:
            raise raised("a model", error) from error
        finally:
            if is_patched(model):
                mrrope.unpatch(model)


def compare(model: PreTrainedModel, case: ModelCase) -> None:
    way = case.way
    try:
        stock, _ = read(model, case)
    except Exception:
        if way != "forward":  # the family's own code has no such way to read
            compare(model, replace(case, way="forward"))
        return
    tolerance = tolerance_of(model, case)
    try:
        patch(model, case, case.scale)
    except ValueError as error:
        if " must " not in str(error):
            raise
        require(torch.equal(read(model, case)[0], stock), case, "changes though it refuses a patch", str(error))
        return
    tables = {module.original: module.ladders for module in model.modules() if isinstance(module, TableRotaryEmbedding)}
    if case.scale == "auto":
        compare_following(model, case, tables, tolerance)
    else:
        got, _ = read(model, case)
        if case.method == "rope" or case.scale == 1.0:
            off = difference(got, stock, way)
            require(off <= tolerance, case, "is not stock without an extension", f"{off:.2g} > {tolerance:.2g}")
        if tables and not any(len(ladder.tables) > 1 for ladders in tables.values() for ladder in ladders.values()):
            mrrope.unpatch(model)
            with own_code(tables):
                want, _ = read(model, case)
            off = difference(got, want, way)
            require(
                off <= tolerance, case, "differs from its own code by the same table", f"{off:.2g} > {tolerance:.2g}"
            )
    if is_patched(model):
        mrrope.unpatch(model)
    require(torch.equal(read(model, case)[0], stock), case, "is not stock to the bit when unpatched", case.way)


def patch(model: PreTrainedModel, case: ModelCase, scale: Any) -> None:
    options = {"max_scale": MAX_SCALE} if scale == "auto" else {}
    flags = {name: getattr(case, name) for name in ("local_layers", "fuse_projection", "fuse_norms")}
    mrrope.patch(model, case.method, scale=scale, **options, **flags)


def compare_following(model: PreTrainedModel, case: ModelCase, tables: dict[Any, Any], tolerance: float) -> None:
    """Told the length, a model reads all by the scale that covers it; not told, it turns its first keys to that."""
    ladders = [ladder for by_layer in tables.values() for ladder in by_layer.values() if len(ladder.tables) > 1]
    if not ladders:
        return
    length = case.length + (6 if case.way in ("greedy", "beams") else 0)
    covering = {
        next((t.scale for t, reach in zip(ladder.tables, ladder.reaches, strict=True) if length <= reach),
             ladder.tables[-1].scale)
        for ladder in ladders
    }  # fmt: skip
    native = all(length <= ladder.reaches[0] for ladder in ladders)
    in_parts = case.way in ("chunks", "steps", "two turns")
    off_keys = keys_off(model, case) if in_parts else 0.0
    with mrrope.expecting(model, length):
        got, _ = read(model, case)
    mrrope.unpatch(model)
    if not native and len(covering) == 1:
        patch(model, case, covering.pop())
        want, _ = read(model, case)
        mrrope.unpatch(model)
        off = difference(got, want, case.way)
        require(
            off <= tolerance,
            case,
            "differs, by auto, from the scale that covers the text",
            f"{off:.2g} > {tolerance:.2g}",
        )
    elif native:
        off = difference(got, read(model, case)[0], case.way)
        require(
            off <= tolerance, case, "is not stock, by auto, within its native length", f"{off:.2g} > {tolerance:.2g}"
        )
    # Stock code of some hybrids, as Bamba's, gives other states in parts than at once.
    if off_keys > tolerance:
        require(
            keys_off(model, case) > tolerance,
            case,
            "keeps, by auto, keys of other scales in its cache",
            f"{off_keys:.2g} > {tolerance:.2g}",
        )


def keys_off(model: PreTrainedModel, case: ModelCase) -> float:
    """How far the first cached keys of a text read in parts are from those of the same text read at once."""
    _, cache = read(model, case)
    _, whole = read(model, replace(case, way="chunks", chunk=case.length))
    got, want = first_keys(cache), first_keys(whole)
    if got is None or want is None:
        return 0.0
    held = min(got.shape[-2], want.shape[-2])
    return difference(got[..., -held:, :], want[..., -held:, :], case.way)


def first_keys(cache: Any) -> torch.Tensor | None:
    """Those of the first layer that keeps keys: they depend on tokens and positions alone."""
    for layer in getattr(cache, "layers", []):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.numel():
            return keys
    return None


@contextlib.contextmanager
def own_code(tables: dict[Any, Any]) -> Iterator[None]:
    """The model's own code, with other frequencies in its rotary embeddings."""
    with contextlib.ExitStack() as undone:
        for rotary, ladders in tables.items():
            undone.callback(SwappedTable(rotary, ladders).undo, rotary)
            if hasattr(rotary, "rope_init_fn"):  # some compute their frequencies anew at every call
                (table,) = next(iter(ladders.values())).tables
                found = rotary.inv_freq if hasattr(rotary, "inv_freq") else None, table.attention_factor
                undone.callback(setattr, rotary, "rope_init_fn", rotary.rope_init_fn)
                rotary.rope_init_fn = lambda *_, found=found, **__: found
        yield


def tolerance_of(model: PreTrainedModel, case: ModelCase) -> float:
    """By how much two right readings may differ: what roundings of embeddings and frequencies do to this one."""
    plain = replace(case, way=case.way if case.way == "gradients" else "forward")
    want, _ = read(model, plain)
    generator = torch.Generator(case.device).manual_seed(0)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=generator, device=x.device) * 2 - 1
        return x * (1 + noise.to(x.dtype) * torch.finfo(x.dtype).eps)

    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return rounded(output)

    handle = model.get_input_embeddings().register_forward_hook(hook)
    frequencies = [x for name, x in model.named_buffers() if name.endswith("inv_freq")]
    before = [x.clone() for x in frequencies]
    try:
        for x in frequencies:
            x.copy_(rounded(x))
        off = difference(read(model, plain)[0], want, "forward")
    finally:
        handle.remove()
        for x, old in zip(frequencies, before, strict=True):
            x.copy_(old)
    return ROUNDINGS * off + LEAST_TOLERANCE


def require(holds: bool, case: ModelCase, what: str, detail: str) -> None:
    if not holds:
        raise CaseError(f"a model {what}", f"{case.family}, {detail}")
