"""Run a model on a text in the case's mode; every mode returns a tensor to compare."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from transformers import PreTrainedModel, StaticCache

from fuzz.model_cases import ModelCase, to_device

NEW_TOKENS = 6
Tensor = torch.Tensor


def input_tokens(case: ModelCase) -> Tensor:
    return tiny_models.tokens(case.batch, case.length, seed=case.seed % 1000).to(case.device)


def run_model(model: PreTrainedModel, case: ModelCase) -> tuple[Tensor, Any]:
    """Return the logits, or gradients, of the case's text, and the cache if the mode has one."""
    ids = input_tokens(case)
    reset_dynamic_rope(model, ids[:1, :1])
    if case.mode == "gradients":
        return gradients(model, ids), None
    with torch.no_grad():
        if case.mode == "forward":
            return model(**to_device(case.device, tiny_models.inputs(model, ids.cpu()))).logits, None
        if case.mode in ("greedy", "beams"):
            return generate(model, ids, beams=1 if case.mode == "greedy" else 2), None
        if case.mode == "padded":
            return run_padded(model, case, ids)
        if case.mode == "cropped":
            return run_cropped(model, case, ids)
        cache = None
        if case.mode == "static":
            cache = StaticCache(config=model.config.get_text_config(), max_cache_len=case.length + 3)
        return run_in_chunks(model, ids, chunk_sizes(case), cache)


@torch.no_grad()
def reset_dynamic_rope(model: PreTrainedModel, ids: Tensor) -> None:
    """Run one token: `dynamic` keeps the frequencies of the longest text since the last short one."""
    if "dynamic" in str(getattr(model.config.get_text_config(), "rope_parameters", None)):
        model(input_ids=ids)


def chunk_sizes(case: ModelCase) -> list[int]:
    """Return the lengths of the chunks that a text is read in."""
    length = case.length
    if case.mode == "steps":
        first = max(1, length - 8)
        return [first, *[1] * (length - first)]
    if case.mode == "chat":
        half = max(1, length // 2 - 2)
        parts = [half, 1, 1, length - half - 4, 1, 1]
        return parts if min(parts) > 0 else [length]
    return [len(part) for part in torch.arange(length).split(case.chunk)]


def run_in_chunks(
    model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any, **options: Any
) -> tuple[Tensor, Any]:
    logits = []
    for part in ids.split(sizes, dim=1):
        output = model(input_ids=part, past_key_values=cache, use_cache=True, **options)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def run_cropped(model: PreTrainedModel, case: ModelCase, ids: Tensor) -> tuple[Tensor, Any]:
    """Read a text, crop its cache and continue with another text."""
    kept = max(1, case.length // 3)
    _, cache = run_in_chunks(model, ids, [case.length], None)
    cache.crop(kept)
    return run_in_chunks(model, ids.flip(1)[:, kept:], [case.length - kept], cache)


def run_padded(model: PreTrainedModel, case: ModelCase, ids: Tensor) -> tuple[Tensor, Any]:
    """Read a left-padded batch in chunks; logits of padding are zeroed."""
    mask = torch.ones_like(ids)
    for i in range(1, case.batch):
        mask[i, : min(case.length - 1, i * case.length // 4)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits, end = None, [], 0
    for size in chunk_sizes(case):
        start, end = end, end + size
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1) * mask[..., None], cache


def generate(model: PreTrainedModel, ids: Tensor, beams: int) -> Tensor:
    """Return the logits of generated tokens, with the chosen tokens in the last column; of beams, their scores."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        num_beams=beams,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    if beams > 1:
        return output.sequences_scores[:, None, None]
    logits, chosen = torch.stack(output.logits, dim=1), output.sequences[:, ids.shape[1] :]
    # Near ties may be broken differently; difference() compares up to the first such token.
    return torch.cat([logits, chosen[..., None].to(logits)], dim=-1)


def gradients(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the gradients of the input embeddings for the cross entropy of the text."""
    model.zero_grad()
    with torch.enable_grad():
        logits = model(**to_device(str(ids.device), tiny_models.inputs(model, ids.cpu()))).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    weights = model.get_input_embeddings().weight
    if weights.grad is None:
        raise ValueError("the model has no gradients for its embeddings")
    found = weights.grad.clone()
    model.zero_grad()
    return found[None]


def difference(got: Tensor, want: Tensor, mode: str) -> float:
    """Return the relative difference in the Frobenius norm; inf where shapes or non-finite values differ."""
    if got.shape != want.shape:
        return float("inf")
    if mode == "greedy":
        same = (got[..., -1] == want[..., -1]).long().cumprod(-1)
        # Step i has the same input if all tokens before it are the same.
        alike = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1)[..., None]
        got, want = got[..., :-1] * alike, want[..., :-1] * alike
    if not torch.isfinite(got).equal(torch.isfinite(want)):
        return float("inf")
    got, want = torch.nan_to_num(got, 0.0, 0.0, 0.0), torch.nan_to_num(want, 0.0, 0.0, 0.0)
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
