"""``mrrope env``: real runs with packages missing, broken or of another version; rules of GPU code compatibility."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MRROPE

import mrrope
from mrrope import _core
from mrrope.benchmark.peers import PEERS
from mrrope.environment import gpus, packages
from mrrope.environment.problems import problems
from mrrope.environment.report import as_text, collect
from mrrope.torch_library import library_for, minor_of

ROOT = Path(__file__).parents[3]
KEYS = {
    "format",
    "mrrope",
    "python",
    "platform",
    "torch",
    "build",
    "driver",
    "gpus",
    "packages",
    "vllm_plugin",
    "variables",
    "to_fix",
}
OPTIONAL = ("transformers", "gguf", "matplotlib", "tqdm", "accelerate")
H200: dict[str, Any] = {"name": "NVIDIA H200", "compute_capability": [9, 0], "memory_gib": 139.8}
BUILD: dict[str, Any] = {"machine_code": ["80", "90a"], "ptx": ["90"], "wgmma": True}


@pytest.fixture(autouse=True)
def outside_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The checkout's package need not be compiled, and Python looks in the current folder first."""
    monkeypatch.chdir(tmp_path_factory.mktemp("outside"))


def run_env(*arguments: str, before: str = "", path: list[Path] | None = None, **variables: str) -> str:
    """Run the command in a process; ``before`` is Python that runs first, ``path`` replaces site-packages."""
    command = [*MRROPE, "env", *arguments]
    environment = os.environ | variables
    if before:
        command[2] = f"{before}\n{command[2]}"
    if path is not None:
        command.insert(1, "-S")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run_json(**options: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run_env("--json", **options))
    return report


def by_name(report: dict[str, Any]) -> dict[str, Any]:
    return {package["name"]: package for package in report["packages"]}


def texts(report: dict[str, Any]) -> str:
    return "\n".join(f"{item['problem']}: {item['fix']}" for item in report["to_fix"])


def add_distribution(folder: Path, name: str, version: str, module: str = "", **files: str) -> None:
    """Write a distribution as pip installs it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{files.pop('also', '')}")
    for file, text in files.items():
        (info / f"{file}.txt").write_text(text)
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text(module)


@pytest.fixture(scope="module")
def bare_site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages without mrrope's metadata and the optional packages, as links."""
    folder = tmp_path_factory.mktemp("bare")
    hidden = re.compile(rf"({'|'.join(OPTIONAL)}|mrrope|vllm)\b(?!_)", re.IGNORECASE)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not hidden.match(entry.name):
            (folder / entry.name).symlink_to(entry)
    (folder / "mrrope").symlink_to(Path(mrrope.__file__).parent)
    return folder


def test_json_has_the_documented_keys() -> None:
    report = run_json()
    assert report.keys() == KEYS
    assert report["format"] == "mrrope.env/2"
    assert report["mrrope"]["version"] == mrrope.__version__
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["cuda_available"] == torch.cuda.is_available()
    assert report["build"]["library_error"] is None
    page = (ROOT / "docs" / "environment.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(report)


def test_text_names_versions_and_sections() -> None:
    text = run_env()
    for part in (mrrope.__version__, torch.__version__, "\nbuild\n", "\nGPU\n", "\noptional packages\n", "\nto fix\n"):
        assert part in text


def test_missing_packages_are_named_with_their_command(bare_site_packages: Path) -> None:
    text = run_env(path=[bare_site_packages])
    for package in packages.OPTIONAL_PACKAGES:
        if package.name in OPTIONAL:
            assert re.search(rf"{package.name} +not installed; .*{re.escape(package.install)}", text)
    assert "mrrope is not installed" in text


def test_broken_and_old_packages_are_reported(bare_site_packages: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf-0.18.0.dist-info").mkdir()  # no METADATA, no module
    add_distribution(tmp_path, "tqdm", "4.66.0")
    shutil.rmtree(tmp_path / "tqdm")
    add_distribution(tmp_path, "matplotlib", "3.10.0", module="raise RuntimeError('broken')")
    add_distribution(tmp_path, "transformers", "4.57.0")
    shutil.rmtree(tmp_path / "transformers")
    (tmp_path / "transformers.py").write_text("")
    add_distribution(
        tmp_path,
        "mrrope",
        "0.1.0",
        also='Provides-Extra: eval\nRequires-Dist: transformers<6,>=5.17; extra == "eval"\n',
    )
    shutil.rmtree(tmp_path / "mrrope")
    report = run_json(path=[tmp_path, bare_site_packages])
    found = by_name(report)
    assert (found["gguf"]["version"], found["gguf"]["installed"]) == (None, False)
    assert (found["tqdm"]["version"], found["tqdm"]["installed"]) == ("4.66.0", False)
    assert (found["matplotlib"]["version"], found["matplotlib"]["installed"]) == ("3.10.0", True)
    assert "tqdm has metadata and no module: pip install --force-reinstall tqdm" in texts(report)
    if found["transformers"]["in_range"] is not None:  # packaging is installed
        assert "transformers must be <6,>=5.17, got 4.57.0: pip install 'mrrope[eval]'" in texts(report)


@pytest.mark.parametrize(
    ("version", "variables", "expected"),
    [
        ("0.25.1", {}, None),
        ("0.33.0", {}, None),
        ("0.24.0", {}, "the plugin knows vLLM 0.25 to 0.33, got 0.24.0"),
        ("0.25.1", {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS does not name mrrope"),
    ],
)
def test_vllm_is_judged_by_its_metadata(
    bare_site_packages: Path, tmp_path: Path, version: str, variables: dict[str, str], expected: str | None
) -> None:
    add_distribution(tmp_path, "vllm", version, module="raise RuntimeError('vllm was imported')")
    entry_point = "[vllm.general_plugins]\nmrrope = mrrope.vllm.plugin:register\n"
    add_distribution(tmp_path, "mrrope", "0.1.0", entry_points=entry_point)
    shutil.rmtree(tmp_path / "mrrope")
    report = run_json(path=[tmp_path, bare_site_packages], **variables)
    assert report["vllm_plugin"]["registered"]
    assert report["vllm_plugin"]["error"] is None
    assert report["vllm_plugin"]["knows_installed"] == (version != "0.24.0")
    assert (expected or "") in texts(report)
    assert expected or "vLLM" not in texts(report)


def test_a_vllm_without_the_entry_point_is_reported(bare_site_packages: Path, tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm", "0.25.1")
    assert "its entry point is not registered" in texts(run_json(path=[tmp_path, bare_site_packages]))


def test_another_torch_than_the_builds_is_reported() -> None:
    fake = (
        "import mrrope._core as core; built = core.build_info(); "
        "core.build_info = lambda: built | {'torch': ['2.8', '2.9']}"
    )
    text = run_env(before=f"import mrrope; {fake}")
    assert f"mrrope was built for torch 2.8, 2.9, and torch {torch.__version__} runs" in text
    assert "pip install 'torch==2.9.*', or in a checkout: pip install --force-reinstall --no-deps ." in text


def copy_of_the_package(folder: Path) -> Path:
    """A copy whose libraries are links, for changes to them."""
    package = folder / "mrrope"
    original = Path(mrrope.__file__).parent
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("__pycache__", "lib*.so"))
    for library in original.glob("lib*.so"):
        (package / library.name).symlink_to(library)
    return package


def failed_import(folder: Path, before: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", f"{before}\nimport mrrope"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert failed.returncode
    return failed.stderr


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0+cu130", "3.0.0a0+git1234"])
def test_import_with_a_torch_that_is_not_in_the_package(tmp_path: Path, version: str) -> None:
    """The message names the versions that are, and what to do."""
    copy_of_the_package(tmp_path)
    message = failed_import(tmp_path, f"import torch; torch.__version__ = {version!r}")
    built = ", ".join(_core.build_info()["torch"])
    assert f"ImportError: mrrope's ops are built for torch {built}, and torch {version} runs: install one of" in message
    assert "or build mrrope from source" in message


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.11.0", "libmrrope_torch2.11.so"),
        ("2.11.0+cu130", "libmrrope_torch2.11.so"),
        ("2.15.1+cpu", "libmrrope_torch2.15.so"),
        ("2.9.0a0+git1234", "libmrrope_torch2.9.so"),
    ],
)
def test_the_library_for_a_version_of_torch(version: str, name: str) -> None:
    assert library_for(version).name == name


def test_a_library_that_does_not_load_is_reported(tmp_path: Path) -> None:
    """``import mrrope`` names the cause; the folder of this command runs without it."""
    library = library_for(torch.__version__, copy_of_the_package(tmp_path))
    library.unlink()
    library.write_text("no library")
    message = failed_import(tmp_path)
    assert f"ImportError: mrrope's ops for torch {minor_of(torch.__version__)} do not load" in message
    command = re.search(r"`python (.*)` reports what to fix", message)
    assert command is not None
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, command[1]], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"ops' library +does not load: ", done.stdout)
    assert "the library of the ops does not load" in done.stdout


def test_no_torch_and_no_compiled_module_is_a_report_too(tmp_path: Path) -> None:
    package = tmp_path / "mrrope"
    shutil.copytree(Path(mrrope.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-S", str(package / "environment"), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout)
    assert report.keys() == KEYS
    assert report["torch"]["version"] is None
    assert "torch cannot be imported" in texts(report)
    assert "mrrope._core cannot be imported" in texts(report)
    assert "cannot be imported" in as_text(report)


def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, str(Path(mrrope.__file__).parent / "environment")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "mrrope env: interrupted\n")


def test_wrong_arguments_are_an_error() -> None:
    done = subprocess.run([*MRROPE, "env", "--yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2


# GPUs


@pytest.mark.parametrize(
    ("capability", "machine_code", "ptx", "expected"),
    [
        ((9, 0), ["80", "90a"], ["90"], ("machine code", "sm_90a")),
        ((8, 0), ["80", "90a"], ["90"], ("machine code", "sm_80")),
        ((8, 9), ["80", "90a"], ["90"], ("machine code", "sm_80")),
        ((8, 9), ["80", "86"], [], ("machine code", "sm_86")),
        ((10, 0), ["80", "90a"], ["90"], ("PTX", "compute_90")),
        ((12, 0), ["80", "90a"], ["90"], ("PTX", "compute_90")),
        ((12, 0), ["100"], ["80", "90"], ("PTX", "compute_90")),
        ((10, 3), ["100f"], [], ("machine code", "sm_100f")),
        ((10, 3), ["100a"], ["100a"], ("none", None)),
        ((7, 5), ["80", "90a"], ["90"], ("none", None)),
        ((9, 0), [], ["90a"], ("PTX", "compute_90a")),
    ],
)
def test_code_for_a_gpu(
    capability: tuple[int, int], machine_code: list[str], ptx: list[str], expected: tuple[str, str | None]
) -> None:
    assert gpus.code_for(capability, {"machine_code": machine_code, "ptx": ptx}) == expected


def test_paths_of_the_ops() -> None:
    on_hopper = gpus.kernels_on((9, 0), BUILD)["ops"]
    assert on_hopper["qkv_rotary"] == gpus.FUSED
    assert on_hopper["rotary"] == "sm_90a"
    assert gpus.kernels_on((9, 0), BUILD | {"wgmma": False})["ops"]["qkv_rotary"] == gpus.UNFUSED
    on_blackwell = gpus.kernels_on((10, 0), BUILD)["ops"]
    assert on_blackwell["qkv_rotary"] == gpus.UNFUSED
    assert on_blackwell["rotary"] == "compute_90, compiled by the driver at first use"
    assert set(gpus.kernels_on((7, 5), BUILD)["ops"].values()) == {None}


def test_every_public_op_is_listed() -> None:
    registered = torch._C._dispatch_get_all_op_names()
    assert set(gpus.OPS) == {name for name in mrrope.__all__ if f"mrrope::{name}" in registered}


def test_every_extra_and_peer_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)dev = ", text, re.DOTALL)
    assert extras is not None
    rows = {(package.name, package.extra) for package in packages.OPTIONAL_PACKAGES}
    required = {
        (re.split(r"[\[<>=]", requirement)[0], line.split(" = ")[0])
        for line in extras[1].splitlines()
        for requirement in re.findall(r'"([^"]+)"', line)
    }
    assert required - rows == {("gguf", "eval")}  # it has an extra of its own
    assert {(name, extra) for name, extra in rows if extra} <= required
    assert {peer.package for peer in PEERS} <= {package.module for package in packages.OPTIONAL_PACKAGES}


def test_gpus_by_nvidia_smi(tmp_path: Path) -> None:
    """A program of that name, where torch finds no GPU: it is listed, with the reason that torch does not use it."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.65.06, NVIDIA H200, 9.0, 143771'\necho '580.65.06, MIG, [N/A], [N/A]'\n")
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    report = run_json(**variables)
    assert report["driver"] == "580.65.06"
    assert [gpu["name"] for gpu in report["gpus"]] == ["NVIDIA H200", "MIG"]
    first, second = report["gpus"]
    assert (first["compute_capability"], first["memory_gib"]) == ([9, 0], 140.4)
    assert second["compute_capability"] is second["memory_gib"] is second["ops"] is None
    assert report["to_fix"]
    assert "NVIDIA H200, sm_90, 140.4 GiB" in as_text(report)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert run_json(**variables)["gpus"] == []


def report_with(**parts: Any) -> dict[str, Any]:
    """A report of an environment with an H200 where nothing is to fix, with some values changed."""
    build = {"torch": ["2.11"], "nvcc": "13.0.88", "without_cuda": None, "error": None, "library_error": None, **BUILD}
    build |= parts.get("build", {})
    gpu = H200 | parts.get("gpu", {})
    return collect() | {
        "mrrope": {"version": "0.1.0", "metadata": "0.1.0", "location": ""},
        "torch": {"version": "2.11.0", "cuda": "13.0", "cuda_available": True, "warning": None, "error": None}
        | parts.get("torch", {}),
        "build": build,
        "driver": parts.get("driver", "580.65.06"),
        "gpus": [gpu | gpus.kernels_on(tuple(gpu["compute_capability"]), build)],
        "variables": parts.get("variables", {}),
        "packages": [{"name": "vllm", "version": None, "installed": False, "in_range": None}],
    }


@pytest.mark.parametrize(
    ("parts", "problem", "fix"),
    [
        ({"torch": {"cuda": None, "cuda_available": False}}, "is a build without CUDA", "torch==2.11.*"),
        ({"torch": {"cuda_available": False, "warning": "driver too old"}}, "(driver too old)", "driver for CUDA 13.0"),
        (
            {"torch": {"cuda_available": False}, "variables": {"CUDA_VISIBLE_DEVICES": ""}},
            "hides every GPU",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            {"torch": {"cuda": "12.8"}, "driver": "570.86.10"},
            "built with CUDA 13.0.88, which needs driver 580 or newer, got 570.86.10",
            "nvcc of CUDA 12",
        ),
        (
            {"build": {"without_cuda": "there was no nvcc", "nvcc": None, "machine_code": [], "ptx": []}},
            "built without CUDA kernels: there was no nvcc",
            "where nvcc is",
        ),
        (
            {"gpu": {"name": "T4", "compute_capability": [7, 5]}},
            "no kernel for T4 (sm_75)",
            "TORCH_CUDA_ARCH_LIST='7.5' pip install",
        ),
        (
            {"build": {"machine_code": ["80"], "wgmma": False}},
            "qkv_rotary is not fused on NVIDIA H200",
            "TORCH_CUDA_ARCH_LIST='9.0a' pip install",
        ),
    ],
)
def test_problems_of_gpus(parts: dict[str, Any], problem: str, fix: str) -> None:
    assert list(problems(report_with())) == []
    assert list(problems(report_with(torch={"cuda": "12.8"}))) == []  # the driver decides
    ((found, solution),) = problems(report_with(**parts))
    assert problem in found
    assert fix in solution
