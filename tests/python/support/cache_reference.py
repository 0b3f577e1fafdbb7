"""Heads and caches in the order of tokens and slots, and checks of caches and of the rounding to float8."""

import torch
from rotary_reference import TOLERANCES, pair_norms, rotated
from tensor_bits import bytes_outside, same_bits

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def by_token(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return heads as [tokens of all sequences, heads, head_dim]."""
    x = x.transpose(1, 2) if layout == "bhsd" else x
    return x if layout == "thd" else x.flatten(0, 1)


def by_slot(cache: torch.Tensor, cache_layout: str) -> torch.Tensor:
    """Return a cache as [slots of all blocks, heads, head_dim]; float8 as bytes."""
    x = cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache
    return (x.transpose(1, 2) if cache_layout == "hnd" else x).flatten(0, 1)


def assert_other_slots_unchanged(
    cache: torch.Tensor, before: torch.Tensor, slots: torch.Tensor, cache_layout: str = "nhd"
) -> None:
    """Assert that a cache, and the memory around it, has its old bytes in all but these slots."""
    rows, old_rows = by_slot(cache, cache_layout), by_slot(before, cache_layout)
    others = torch.ones(len(rows), dtype=torch.bool, device=slots.device)
    others[slots] = False
    assert same_bits(rows[others], old_rows[others])
    assert same_bits(bytes_outside(cache), bytes_outside(before))


def divisor(scale: torch.Tensor | None) -> torch.Tensor:
    """Return a scale, one or one per head, in a shape that broadcasts with [tokens, heads, head_dim]."""
    return torch.ones(1) if scale is None else scale.reshape(-1, 1)


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)


def nearest_float8(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return saturated(x / divisor(scale).to(x.device), dtype).to(dtype)


def half_ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half of the distance between neighbours of x in a float8 dtype."""
    info = torch.finfo(dtype)
    return (x.abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)


def assert_rotated_float8(actual, heads, positions, table, pairing, scale) -> None:
    """Assert one rounding of the exact rotation, divided by the scale and saturated, of [tokens, heads, head_dim]."""
    dim, dtype = table.rotary_dim, actual.dtype
    exact = rotated(heads, positions, table, "thd", pairing) / divisor(scale).cpu().double()
    expected = saturated(exact, dtype)
    actual = actual.float().cpu().double()
    allowed = half_ulp(expected, dtype) + TOLERANCES[torch.float32].arithmetic * pair_norms(exact, dim, pairing)
    assert ((actual - expected).abs() <= allowed)[..., :dim].all()
    tail = nearest_float8(heads.float(), scale, dtype)[..., dim:].float().cpu().double()
    assert torch.equal(actual[..., dim:], tail)
