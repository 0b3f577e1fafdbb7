"""Bitwise comparison of tensors and of the memory around them."""

import torch
from rotary_cases import whole_memory


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(bits_of(x), bits_of(y))


def bytes_outside(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bytes of a view's storage that the view does not cover."""
    inside = torch.zeros(whole_memory(x).shape, dtype=torch.bool, device=x.device)
    inside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return whole_memory(x).view(torch.uint8).view(len(inside), x.element_size())[~inside]
