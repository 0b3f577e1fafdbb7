"""What was compiled is what this machine can compile."""

import os
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

import mrrope

LIBRARY = Path(mrrope.__file__).with_name("libmrrope_torch.so")


# The ops are registered for CUDA in every build, with an error in the kernels' place where there are none.
@pytest.mark.skipif(
    "MRROPE_CUDA=OFF" in os.environ.get("CMAKE_ARGS", ""), reason="CMAKE_ARGS asks for a build without CUDA"
)
@pytest.mark.skipif(
    CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists(),
    reason="torch was built without CUDA, or there is no nvcc",
)
def test_cuda_kernels_are_compiled_where_nvcc_is() -> None:
    assert b".nv_fatbin" in LIBRARY.read_bytes(), f"{LIBRARY} has no CUDA code, though {CUDA_HOME} has nvcc"
