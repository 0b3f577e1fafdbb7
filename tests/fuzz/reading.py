"""The ways of a model to read or write a text, each with logits to compare."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from transformers import PreTrainedModel, StaticCache

from fuzz.model_cases import ModelCase, on

NEW_TOKENS = 6
Tensor = torch.Tensor


def text_of(case: ModelCase) -> Tensor:
    return tiny_models.tokens(case.batch, case.length, seed=case.seed % 1000).to(case.device)


def read(model: PreTrainedModel, case: ModelCase) -> tuple[Tensor, Any]:
    """What a model makes of the case's text in the case's way, and the cache that it read with, if it did."""
    ids = text_of(case)
    forget_lengths(model, ids[:1, :1])
    if case.way == "gradients":
        return gradients(model, ids), None
    with torch.no_grad():
        if case.way == "forward":
            return model(**on(case.device, tiny_models.inputs(model, ids.cpu()))).logits, None
        if case.way in ("greedy", "beams"):
            return generated(model, ids, beams=1 if case.way == "greedy" else 2), None
        if case.way == "padded":
            return padded(model, case, ids)
        if case.way == "cropped":
            return cropped(model, case, ids)
        cache = None
        if case.way == "static":
            cache = StaticCache(config=model.config.get_text_config(), max_cache_len=case.length + 3)
        return in_parts(model, ids, sizes_of(case), cache)


@torch.no_grad()
def forget_lengths(model: PreTrainedModel, ids: Tensor) -> None:
    """Frequencies of `dynamic` depend on the longest text that was read since the last short one."""
    if "dynamic" in str(getattr(model.config.get_text_config(), "rope_parameters", None)):
        model(input_ids=ids)


def sizes_of(case: ModelCase) -> list[int]:
    """The lengths of the parts that a text is read in."""
    length = case.length
    if case.way == "steps":
        first = max(1, length - 8)
        return [first, *[1] * (length - first)]
    if case.way == "two turns":
        half = max(1, length // 2 - 2)
        parts = [half, 1, 1, length - half - 4, 1, 1]
        return parts if min(parts) > 0 else [length]
    return [len(part) for part in torch.arange(length).split(case.chunk)]


def in_parts(model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any, **options: Any) -> tuple[Tensor, Any]:
    logits = []
    for part in ids.split(sizes, dim=1):
        output = model(input_ids=part, past_key_values=cache, use_cache=True, **options)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def cropped(model: PreTrainedModel, case: ModelCase, ids: Tensor) -> tuple[Tensor, Any]:
    """All of a text, of which the cache then forgets the end, to read another."""
    kept = max(1, case.length // 3)
    _, cache = in_parts(model, ids, [case.length], None)
    cache.crop(kept)
    return in_parts(model, ids.flip(1)[:, kept:], [case.length - kept], cache)


def padded(model: PreTrainedModel, case: ModelCase, ids: Tensor) -> tuple[Tensor, Any]:
    """A batch padded on the left, in parts; what is padding gives zeros."""
    mask = torch.ones_like(ids)
    for i in range(1, case.batch):
        mask[i, : min(case.length - 1, i * case.length // 4)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits, end = None, [], 0
    for size in sizes_of(case):
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


def generated(model: PreTrainedModel, ids: Tensor, beams: int) -> Tensor:
    """The scores of what a model writes; the tokens it chose are in its last column."""
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
    # A near tie may go either way, and what follows is another text: only what both have read counts.
    return torch.cat([logits, chosen[..., None].to(logits)], dim=-1)


def gradients(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of the input embeddings, for the loss of predicting the text."""
    model.zero_grad()
    with torch.enable_grad():
        logits = model(**on(str(ids.device), tiny_models.inputs(model, ids.cpu()))).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    weights = model.get_input_embeddings().weight
    if weights.grad is None:
        raise ValueError("the model has no gradients for its embeddings")
    found = weights.grad.clone()
    model.zero_grad()
    return found[None]


def difference(got: Tensor, want: Tensor, way: str) -> float:
    """Relative, in Frobenius norm, of what can be compared."""
    if got.shape != want.shape:
        return float("inf")
    if way == "greedy":
        same = (got[..., -1] == want[..., -1]).long().cumprod(-1)
        # Step i was read by both alike if all tokens before it are the same.
        alike = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1)[..., None]
        got, want = got[..., :-1] * alike, want[..., :-1] * alike
    if not torch.isfinite(got).equal(torch.isfinite(want)):
        return float("inf")
    got, want = torch.nan_to_num(got, 0.0, 0.0, 0.0), torch.nan_to_num(want, 0.0, 0.0, 0.0)
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
