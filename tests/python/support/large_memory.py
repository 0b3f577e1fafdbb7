"""Memory for tensors that reach past 2**31 elements; tests skip where there is too little."""

import pytest
import torch

GIB = 2**30


def skip_unless_free(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory")


def addresses_past_31_bits() -> torch.Tensor:
    """Return 2**31 + 4096 elements on the CPU; of their 4 GiB only the pages that are used are allocated."""
    try:
        return torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("the system does not lend out memory it does not have")
