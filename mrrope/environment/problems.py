"""What is wrong in an environment, and the command that solves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrrope.torch_library import minor_of

REBUILD = "pip install --force-reinstall --no-deps ."
"""Run in a checkout; it compiles against the torch of the environment."""
OLDEST_DRIVER = {"12": 525, "13": 580}
"""By CUDA's major version: within it, code of a newer minor version runs with an older driver."""


def problems(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each problem of a report and its solution."""
    yield from _of_torch_and_build(report)
    yield from _of_gpus(report)
    yield from _of_packages(report)


def _major(version: str) -> str:
    return version.split(".")[0]


def _of_torch_and_build(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch, build = report["torch"], report["build"]
    if torch["version"] is None:
        yield f"torch cannot be imported ({torch['error']})", "pip install --force-reinstall torch"
    if report["mrrope"]["metadata"] is None:
        yield "mrrope is not installed: it has no metadata, so that vLLM does not find its plugin", "pip install ."
    if build["error"]:
        yield f"the compiled module mrrope._core cannot be imported ({build['error']})", f"in a checkout: {REBUILD}"
        return
    if torch["version"] is None:
        return
    if minor_of(torch["version"]) not in build["torch"]:
        yield (
            f"mrrope was built for torch {', '.join(build['torch'])}, and torch {torch['version']} runs: C++ is "
            "compatible within a minor version only",
            f"pip install 'torch=={build['torch'][-1]}.*', or in a checkout: {REBUILD}",
        )
    elif build["library_error"]:
        yield f"the library of the ops does not load ({build['library_error']})", f"in a checkout: {REBUILD}"


def _of_gpus(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch, build, gpus = report["torch"], report["build"], report["gpus"]
    if not gpus or torch["version"] is None or build["error"]:
        return
    if torch["cuda"] is None:
        yield (
            f"there is a GPU, and torch {torch['version']} is a build without CUDA",
            f"pip install --force-reinstall torch=={minor_of(torch['version'])}.* from an index with CUDA builds "
            "(https://pytorch.org/get-started)",
        )
        return
    hidden = report["variables"].get("CUDA_VISIBLE_DEVICES")
    if not torch["cuda_available"] and hidden is not None and torch["warning"] is None:
        yield f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU from torch", "unset CUDA_VISIBLE_DEVICES"
    elif not torch["cuda_available"]:
        yield (
            f"there is a GPU, and torch does not start CUDA ({torch['warning'] or 'without a warning'})",
            f"install a driver for CUDA {torch['cuda']} (https://www.nvidia.com/drivers)",
        )
    if build["without_cuda"]:
        yield (
            f"there is a GPU, and mrrope was built without CUDA kernels: {build['without_cuda']}",
            f"where nvcc is, in a checkout: {REBUILD}",
        )
        return
    needed, driver = OLDEST_DRIVER.get(_major(build["nvcc"])), report["driver"]
    if needed and driver and _major(driver).isdigit() and int(_major(driver)) < needed:
        yield (
            f"mrrope's kernels are built with CUDA {build['nvcc']}, which needs driver {needed} or newer, got {driver}",
            f"install a newer driver (https://www.nvidia.com/drivers), or in a checkout, with CUDACXX set to the nvcc "
            f"of CUDA {_major(torch['cuda'])}: {REBUILD}",
        )
    seen = set()
    for gpu in gpus:
        capability = gpu["compute_capability"]
        if capability is None or tuple(capability) in seen:
            continue
        seen.add(tuple(capability))
        number = f"{capability[0]}.{capability[1]}"
        if gpu["code"] == "none":
            yield (
                f"the build has no kernel for {gpu['name']} (sm_{capability[0]}{capability[1]})",
                f"in a checkout: TORCH_CUDA_ARCH_LIST='{number}{'a' if capability[0] == 9 else ''}' {REBUILD}",
            )
        elif capability[0] == 9 and not build["wgmma"]:
            yield (
                f"qkv_rotary is not fused on {gpu['name']}: the build has no code for sm_90a",
                f"in a checkout: TORCH_CUDA_ARCH_LIST='9.0a' {REBUILD}",
            )


def _of_packages(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for package in report["packages"]:
        name, version = package["name"], package["version"]
        if version and not package["installed"]:
            yield f"{name} has metadata and no module", f"pip install --force-reinstall {name}"
        elif package["in_range"] is False and name != "vllm":
            yield f"{name} must be {package['requires']}, got {version}", package["install"]
    vllm = next(package for package in report["packages"] if package["name"] == "vllm")
    plugin = report["vllm_plugin"]
    if not vllm["version"]:
        return
    if plugin["error"]:
        yield f"the plugin of vLLM cannot be imported ({plugin['error']})", f"in a checkout: {REBUILD}"
    elif not plugin["registered"]:
        yield "vLLM does not find the plugin: its entry point is not registered", f"in a checkout: {REBUILD}"
    elif plugin["knows_installed"] is False:
        yield (
            f"the plugin knows vLLM {plugin['known']}, got {vllm['version']}: it installs nothing",
            f"pip install 'vllm=={plugin['known'].split()[-1]}.*'",
        )
    if not plugin["allowed"]:
        yield "VLLM_PLUGINS does not name mrrope: vLLM leaves the plugin out", "unset VLLM_PLUGINS"
