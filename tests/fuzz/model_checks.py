"""Patch a random model and compare its results with stock code."""

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
from fuzz.model_runs import NEW_TOKENS, difference, run_model
from fuzz.shrinking import CaseError, draw, unexpected_error
from mrrope.hf.patch import is_patched
from mrrope.hf.rotary_embedding import RotaryTables, TableRotaryEmbedding
from mrrope.hf.swapped_table import SwappedTable, TableSwap

# Tolerance: this many times the effect of one rounding of embeddings and frequencies, and at least MIN_TOLERANCE.
ROUNDINGS = 16.0
MIN_TOLERANCE = 2e-6
MAX_SCALE = 4.0


def random_case(rng: random.Random, device: str) -> ModelCase:
    return draw(ModelCase, rng, device=device, family=rng.choice(tiny_models.causal_lm_families()))


def failures_in(cases: list[ModelCase]) -> list[CaseError | None]:
    """Return the failure of each case, or None."""
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
    """Raise the :class:`CaseError` of a case that fails."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(model, case)
        except (CaseError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise unexpected_error("a model", error) from error
        finally:
            if is_patched(model):
                mrrope.unpatch(model)


def compare(model: PreTrainedModel, case: ModelCase) -> None:
    try:
        stock = stock_results(model, case)
    except torch.AcceleratorError:
        raise
    except Exception:
        if case.mode != "forward":  # the family's own code does not support this mode
            compare(model, replace(case, mode="forward"))
        return
    tolerance = tolerance_of(model, case)
    try:
        patch(model, case, case.scale)
    except ValueError as error:
        if " must " not in str(error):
            raise
        require(torch.equal(run_model(model, case)[0], stock), case, "changes though it refuses a patch", str(error))
        return
    rotaries = [module for module in model.modules() if isinstance(module, TableRotaryEmbedding)]
    tables = {rotary.original: RotaryTables(rotary.settings, rotary.tables) for rotary in rotaries}
    if case.scale == "auto":
        compare_auto_scale(model, case, tables, tolerance)
    else:
        got, _ = run_model(model, case)
        if case.method == "rope" or case.scale == 1.0:
            off = difference(got, stock, case.mode)
            require(off <= tolerance, case, "is not stock without an extension", f"{off:.2g} > {tolerance:.2g}")
        if tables and all(len(of_layers) == 1 for each in tables.values() for of_layers in each.by_layer_type.values()):
            mrrope.unpatch(model)
            with stock_code_with(tables):
                want, _ = run_model(model, case)
            off = difference(got, want, case.mode)
            require(
                off <= tolerance, case, "differs from its own code by the same table", f"{off:.2g} > {tolerance:.2g}"
            )
    if is_patched(model):
        mrrope.unpatch(model)
    require(torch.equal(run_model(model, case)[0], stock), case, "is not stock to the bit when unpatched", case.mode)


def stock_results(model: PreTrainedModel, case: ModelCase) -> torch.Tensor:
    """Return the results of stock code; raises where the family does not support the mode or the length.

    The CPU decides first: codegen, gptj and roformer index a table of positions, and an index past its end is an
    exception on a CPU, but on a GPU a device assert that no later case survives.
    """
    on_cpu = replace(case, device="cpu")
    found, _ = run_model(on_cpu.model(), on_cpu)
    return found if case.device == "cpu" else run_model(model, case)[0]


def patch(model: PreTrainedModel, case: ModelCase, scale: Any) -> None:
    options = {"max_scale": MAX_SCALE} if scale == "auto" else {}
    flags = {name: getattr(case, name) for name in ("local_layers", "fuse_norms")}
    mrrope.patch(model, case.method, scale=scale, **options, **flags)


def compare_auto_scale(
    model: PreTrainedModel, case: ModelCase, tables: dict[Any, RotaryTables], tolerance: float
) -> None:
    """Check that an announced length fixes the scale, and that cached keys are re-rotated without one."""
    followed = [
        [(each.settings[layer_type].original_max_position, native)]
        + [(table.original_max_position * table.scale, table) for table in longer]
        for each in tables.values()
        for layer_type, (native, *longer) in each.by_layer_type.items()
        if longer
    ]
    if not followed:
        return
    length = case.length + (NEW_TOKENS if case.mode in ("greedy", "beams") else 0)
    covering = {next((t.scale for reach, t in steps if length <= reach), steps[-1][1].scale) for steps in followed}
    native = all(length <= steps[0][0] for steps in followed)
    is_chunked = case.mode in ("chunks", "steps", "chat")
    key_error = cached_key_error(model, case) if is_chunked else 0.0
    with mrrope.expecting(model, length):
        got, _ = run_model(model, case)
    mrrope.unpatch(model)
    if not native and len(covering) == 1:
        patch(model, case, covering.pop())
        want, _ = run_model(model, case)
        mrrope.unpatch(model)
        off = difference(got, want, case.mode)
        require(
            off <= tolerance,
            case,
            "differs, by auto, from the scale that covers the text",
            f"{off:.2g} > {tolerance:.2g}",
        )
    elif native:
        off = difference(got, run_model(model, case)[0], case.mode)
        require(
            off <= tolerance, case, "is not stock, by auto, within its native length", f"{off:.2g} > {tolerance:.2g}"
        )
    # Stock code of some hybrids, such as Bamba, computes other states in chunks than in one forward.
    if key_error > tolerance:
        require(
            cached_key_error(model, case) > tolerance,
            case,
            "keeps, by auto, keys of other scales in its cache",
            f"{key_error:.2g} > {tolerance:.2g}",
        )


def cached_key_error(model: PreTrainedModel, case: ModelCase) -> float:
    """Return the difference of the first layer's cached keys between a text read in chunks and in one forward."""
    _, cache = run_model(model, case)
    _, whole = run_model(model, replace(case, mode="chunks", chunk=case.length))
    got, want = first_keys(cache), first_keys(whole)
    if got is None or want is None:
        return 0.0
    held = min(got.shape[-2], want.shape[-2])
    return difference(got[..., -held:, :], want[..., -held:, :], case.mode)


def first_keys(cache: Any) -> torch.Tensor | None:
    """Return the keys of the first layer that caches keys; they depend on tokens and positions only."""
    for layer in getattr(cache, "layers", []):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.numel():
            return keys
    return None


@contextlib.contextmanager
def stock_code_with(tables: dict[Any, RotaryTables]) -> Iterator[None]:
    """Put the tables' frequencies into the model's own rotary embeddings."""
    with contextlib.ExitStack() as undone:
        for rotary, each in tables.items():
            SwappedTable().apply(rotary, TableSwap(each))
            undone.callback(SwappedTable().undo, rotary)
            if hasattr(rotary, "rope_init_fn"):  # some compute their frequencies at every call
                (table,) = next(iter(each.by_layer_type.values()))
                found = rotary.inv_freq if hasattr(rotary, "inv_freq") else None, table.attention_factor
                undone.callback(setattr, rotary, "rope_init_fn", rotary.rope_init_fn)
                rotary.rope_init_fn = lambda *_, found=found, **__: found
        yield


def tolerance_of(model: PreTrainedModel, case: ModelCase) -> float:
    """Return the allowed difference, from the effect of rounding the embeddings and frequencies of this case."""
    plain = replace(case, mode=case.mode if case.mode == "gradients" else "forward")
    want, _ = run_model(model, plain)
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
        off = difference(run_model(model, plain)[0], want, "forward")
    finally:
        handle.remove()
        for x, old in zip(frequencies, before, strict=True):
            x.copy_(old)
    return ROUNDINGS * off + MIN_TOLERANCE


def require(holds: bool, case: ModelCase, what: str, detail: str) -> None:
    if not holds:
        raise CaseError(f"a model {what}", f"{case.family}, {detail}")
