"""GPUs and driver, and which of the build's kernels run on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

OPS = (
    "rotary",
    "rotary_",
    "rotary_and_cache_",
    "qk_norm_rotary",
    "qk_norm_rotary_",
    "qk_norm_rotary_and_cache_",
    "mla_rotary",
    "mla_rotary_and_cache_",
    "qkv_rotary",
    "learnable_rotary",
    "rotary_cos_sin",
    "rescale_cache_",
)
QUERY = ("driver_version", "name", "compute_cap", "memory.total")
FUSED = "fused (wgmma), where the shape allows"
UNFUSED = "fallback: cuBLAS, then rotary"


def gpus_of_driver() -> tuple[str | None, list[dict[str, Any]]]:
    """The driver's version and its GPUs, by nvidia-smi; torch sees none of them where its CUDA does not start."""
    program = shutil.which("nvidia-smi")
    lines: list[str] = []
    if program:
        command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        try:
            output = subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
            lines = output.decode(errors="replace").splitlines()
        except (OSError, subprocess.SubprocessError):
            lines = []
    rows = [row for line in lines if len(row := [value.strip() for value in line.split(",")]) == len(QUERY)]
    gpus = []
    for _, name, capability, mebibytes in rows:
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(
            {
                "name": name,
                "compute_capability": [int(numbers[1]), int(numbers[2])] if numbers else None,
                "memory_gib": round(int(mebibytes) / 1024, 1) if mebibytes.isdigit() else None,
            }
        )
    return (rows[0][0] if rows else _driver_of_kernel_module()), gpus


def _driver_of_kernel_module() -> str | None:
    """The driver's version as its kernel module reports it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return version[1] if version else None


def gpus_of_torch(torch: Any) -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    gpus = []
    for device in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(device)
        gpus.append(
            {
                "name": properties.name,
                "compute_capability": [properties.major, properties.minor],
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return gpus


def _parts(architecture: str) -> tuple[int, int, str]:
    """Major, minor and suffix: 90a is (9, 0, "a")."""
    number = architecture.rstrip("af")
    return int(number[:-1]), int(number[-1]), architecture[len(number) :]


def _runs_on(architecture: str, capability: tuple[int, int], *, is_ptx: bool) -> bool:
    """Whether code for an architecture runs on a GPU: the compatibility rules of the CUDA programming guide."""
    major, minor, suffix = _parts(architecture)
    if suffix == "a":
        return (major, minor) == capability
    if suffix == "f" or not is_ptx:
        return major == capability[0] and minor <= capability[1]
    return (major, minor) <= capability


def code_for(capability: tuple[int, int], build: dict[str, Any]) -> tuple[str, str | None]:
    """Kind and architecture of the code that runs on a GPU: machine code, else PTX, else none."""
    for kind, list_name, is_ptx in (("machine code", "machine_code", False), ("PTX", "ptx", True)):
        fitting = [name for name in build[list_name] if _runs_on(name, capability, is_ptx=is_ptx)]
        if fitting:
            prefix = "compute_" if is_ptx else "sm_"
            return kind, prefix + max(fitting, key=_parts)
    return "none", None


def kernels_on(capability: tuple[int, int], build: dict[str, Any]) -> dict[str, Any]:
    """What runs on a GPU: kind and architecture of the code, and the path of every op."""
    kind, architecture = code_for(capability, build)
    path = {"machine code": architecture, "PTX": f"{architecture}, compiled by the driver at first use"}.get(kind)
    ops: dict[str, str | None] = dict.fromkeys(OPS, path)
    if kind != "none":
        # As current_device() in kernels/device_properties.cpp: wgmma is in Hopper only.
        ops["qkv_rotary"] = FUSED if build["wgmma"] and capability[0] == 9 else UNFUSED
    return {"code": kind, "architecture": architecture, "ops": ops}
