"""RMSNorm of q and k followed by the rotation, in float64, and the error that every dtype may have."""

import torch
from rotary_cases import Case
from rotary_reference import HEAD_AXIS, TOLERANCES, pair_norms, rotated

OVERS = ["head", "all_heads"]
EPS = 1e-6


def weights_of(case: Case, over: str, device: str) -> list[torch.Tensor]:
    """Return weights for q, and for k where there is one."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    counts = [heads * case.head_dim if over == "all_heads" else case.head_dim for heads in case.heads if heads]
    if case.heads[1] is None:
        counts = counts[:1]
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(case.dtype).to(device) for count in counts]


def normed(
    x: torch.Tensor, weight: torch.Tensor, over: str, layout: str, offset: float, eps: float = EPS
) -> torch.Tensor:
    """Return the RMSNorm of [..., heads, ..., head_dim] in plain differentiable PyTorch, in the tensors' own dtype."""
    dims = [-1] if over == "head" else [HEAD_AXIS[layout], -1]
    scale = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    weight = weight + offset
    if over == "all_heads":
        heads = x.shape[HEAD_AXIS[layout]]
        weight = weight.view(heads, 1, x.shape[-1]) if layout == "bhsd" else weight.view(heads, x.shape[-1])
    return x * scale * weight


def assert_normed(actual, x, weight, positions, table, *, over="head", layout="bhsd", pairing="halves", offset=0.0):
    """Assert one rounding of the float64 result, plus an arithmetic error relative to the pair's norm."""
    assert (actual.shape, actual.dtype, actual.device) == (x.shape, x.dtype, x.device)
    tolerance = TOLERANCES[x.dtype]
    exact = normed(x.detach().cpu().double(), weight.detach().cpu().double(), over, layout, offset)
    expected = rotated(exact, positions, table, layout, pairing)
    norms = pair_norms(expected, table.rotary_dim, pairing)
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    # The sum of squares and the inverse root add to the rotation's own error.
    arithmetic = tolerance.arithmetic + 16 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    allowed = arithmetic * norms + tolerance.rounding * expected.abs() + smallest
    excess = (actual.detach().cpu().double() - expected).abs() - allowed
    assert (excess <= 0).all(), f"{(excess > 0).sum()} components are off, by up to {excess.max():.3g} too much"
