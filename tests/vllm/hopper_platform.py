"""Make vLLM believe in a Hopper GPU, so that its CUDA code is configured and compiled on a machine without one."""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def pretend() -> None:
    """Install the platform; before anything else of vLLM is imported. A machine with a GPU needs none of it."""
    if torch.cuda.is_available():
        return
    load_empty_driver()
    # Otherwise vLLM puts a placeholder in Triton's place, which modules of 0.33 cannot be imported with.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def has_device_capability(cls, capability: "tuple[int, int] | int", device_id: int = 0) -> bool:
            number = capability if isinstance(capability, int) else 10 * capability[0] + capability[1]
            return number <= 90

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

    vllm.platforms._current_platform = Hopper()


def load_empty_driver() -> None:
    """Load a libcuda.so.1 without functions: vLLM's extension modules link the driver, and nothing here calls it."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder) / "libcuda.so.1"
        command = ["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null", "-o", driver]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    # The modules' functions of the driver are looked up when they are called, and not on import.
    sys.setdlopenflags(os.RTLD_LAZY)
