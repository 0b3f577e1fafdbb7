"""The report as data, and as text."""

from __future__ import annotations

import importlib
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrrope.environment import gpus, packages
from mrrope.environment.problems import problems
from mrrope.torch_library import PACKAGE, library_for

FORMAT = "mrrope.env/2"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_PLUGINS")
COLUMN = 20


def collect() -> dict[str, Any]:
    """Versions, build, kernels, GPUs, and what to fix. A part that cannot be found out is None."""
    torch, torch_report = _torch()
    build = _build(torch)
    driver, found_gpus = gpus.gpus_of_driver()
    if torch_report["cuda_available"]:
        try:
            found_gpus = gpus.gpus_of_torch(torch)
        except RuntimeError as error:  # the first use of CUDA: the device may be busy or in an error state
            torch_report.update(cuda_available=False, warning=_first_line(str(error)))
    for gpu in found_gpus:
        capability = gpu["compute_capability"]
        known = capability is not None and build["error"] is None
        nothing = {"code": None, "architecture": None, "ops": None}
        gpu.update(gpus.kernels_on(tuple(capability), build) if known else nothing)
    report: dict[str, Any] = {
        "format": FORMAT,
        "mrrope": {
            "version": (PACKAGE / "VERSION").read_text().strip(),
            "metadata": packages.installed_version("mrrope"),
            "location": str(PACKAGE),
        },
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": _platform(),
        "torch": torch_report,
        "build": build,
        "driver": driver,
        "gpus": found_gpus,
        "packages": packages.optional_packages(),
        "vllm_plugin": packages.vllm_plugin(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    report["to_fix"] = [{"problem": problem, "fix": fix} for problem, fix in problems(report)]
    return report


def _platform() -> dict[str, Any]:
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        distribution = None
    return {
        "system": platform.platform(),
        "distribution": distribution,
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def _torch() -> tuple[Any, dict[str, Any]]:
    """torch, or None, and its part of the report."""
    report = dict.fromkeys(("version", "cuda", "cuda_available", "threads", "warning", "error"))
    try:
        torch = importlib.import_module("torch")
        # With a driver that is too old, torch warns and reports that CUDA is not available.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        report.update(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            cuda_available=available,
            threads=torch.get_num_threads(),
            warning=_first_line(str(caught[0].message)) if caught else None,
        )
    except Exception as error:  # a library that is missing raises OSError, a broken file anything
        return None, report | {"error": _first_line(f"{type(error).__name__}: {error}")}
    return torch, report


def _build(torch: Any) -> dict[str, Any]:
    """What the compiled parts were built with, and whether the ops' library loads."""
    try:
        core = importlib.import_module("mrrope._core")
    except ImportError as error:
        return {"error": _first_line(str(error))}
    library: Path | None = None
    library_error: str | None = "it needs torch"
    if torch is not None:
        library, library_error = library_for(torch.__version__), None
        try:
            torch.ops.load_library(library)  # no effect where it is loaded
        except OSError as error:
            library_error = _first_line(str(error.__cause__ or error))  # the cause is the loader's own error
    used = core.cpu_instruction_set()
    return {
        **core.build_info(),
        "instruction_set": used,
        "library": library.name if library else None,
        "library_error": library_error,
        "error": None,
    }


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def as_text(report: dict[str, Any]) -> str:
    """The report for people: sections of aligned lines."""
    sections = [
        ("", _version_lines(report)),
        ("build", _build_lines(report["build"])),
        ("GPU", _gpu_lines(report)),
        ("optional packages", _package_lines(report)),
    ]
    lines: list[str] = []
    for title, pairs in sections:
        lines += ["", title] if title else []
        lines += [f"  {name:{COLUMN}} {value}" for name, value in pairs]
    lines += ["", "to fix"]
    for number, item in enumerate(report["to_fix"], 1):
        lines += [f"  {number}. {item['problem']}", f"     {item['fix']}"]
    return "\n".join(["mrrope env", *lines, *([] if report["to_fix"] else ["  nothing"])])


def _version_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    mrrope, torch, system = report["mrrope"], report["torch"], report["platform"]
    yield "mrrope", f"{mrrope['version']} in {mrrope['location']}"
    yield "Python", report["python"]
    if torch["version"] is None:
        yield "torch", f"cannot be imported: {torch['error']}"
    else:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
        available = "a GPU is available" if torch["cuda_available"] else "no GPU is available"
        yield "torch", f"{torch['version']}, {cuda}, {available}, {torch['threads']} CPU threads"
    yield "platform", ", ".join(filter(None, (system["system"], system["distribution"])))
    yield "CPU", f"{system['cpu'] or system['machine']}, {system['cpus']} cores"
    yield from report["variables"].items()


def _build_lines(build: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if build["error"]:
        yield "compiled module", f"cannot be imported: {build['error']}"
        return
    yield "built for torch", ", ".join(build["torch"])
    yield "compiler", build["compiler"]
    library = f"{build['library']} loads"
    yield "ops' library", f"does not load: {build['library_error']}" if build["library_error"] else library
    yield "CPU backend", f"{', '.join(build['instruction_sets'])}; this processor runs {build['instruction_set']}"
    if build["without_cuda"]:
        yield "CUDA kernels", f"none: {build['without_cuda']}"
        return
    yield "CUDA kernels", f"nvcc {build['nvcc']}, CUTLASS {build['cutlass'] or 'unknown'}"
    yield "machine code", ", ".join(f"sm_{name}" for name in build["machine_code"]) or "none"
    yield "PTX", ", ".join(f"compute_{name}" for name in build["ptx"]) or "none"
    yield "fused qkv_rotary", "for sm_90a" if build["wgmma"] else "not in this build, which has no sm_90a"


def _gpu_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "driver", report["driver"] or "not found"
    if not report["gpus"]:
        yield "GPUs", "none; every op runs on the CPU"
    for index, gpu in enumerate(report["gpus"]):
        capability = gpu["compute_capability"]
        name = f"sm_{capability[0]}{capability[1]}" if capability else "compute capability unknown"
        memory = f"{gpu['memory_gib']} GiB" if gpu["memory_gib"] else "memory unknown"
        yield f"GPU {index}", f"{gpu['name']}, {name}, {memory}"
        if gpu["code"] == "none":
            yield "  ops", "no kernel for it in this build"
        elif gpu["ops"]:
            yield "  qkv_rotary", gpu["ops"]["qkv_rotary"]
            yield "  other ops", gpu["ops"]["rotary"]


def _package_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for package in report["packages"]:
        if not (package["version"] or package["installed"]):
            yield package["name"], f"not installed; {package['for']}: {package['install']}"
            continue
        text = package["version"] or "version unknown"
        if package["name"] == "vllm":
            plugin = report["vllm_plugin"]
            registered = "registered" if plugin["registered"] else "not registered"
            knows = {True: "knows this version", False: "does not know this version", None: "is not loaded"}
            text += f"; the plugin is {registered} and {knows[plugin['knows_installed']]}"
        yield package["name"], text
