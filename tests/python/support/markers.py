"""Marks that skip a test: without CUDA kernels, or unless slow tests are wanted."""

import os

import pytest
import torch

import mrrope


def reason_for_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    table = mrrope.frequency_table("rope", rotary_dim=2, base=1e4, original_max_position=8)
    try:
        mrrope.rotary(torch.ones(1, 1, 2, device="cuda"), None, torch.ones(1, device="cuda").long(), table, "thd")
    except RuntimeError as error:
        if "no CUDA kernels" in str(error):
            return "this build of mrrope has no CUDA kernels"
        raise
    return None


NO_CUDA = reason_for_no_cuda()
needs_cuda = pytest.mark.skipif(NO_CUDA is not None, reason=NO_CUDA or "")
reason_to_wait = "takes minutes: MRROPE_SLOW_TESTS=1 runs it"
takes_minutes = pytest.mark.skipif("MRROPE_SLOW_TESTS" not in os.environ, reason=reason_to_wait)
