"""Wheels: the list of torch versions, what the wheel asks for, and what is fetched to build it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "wheels"))
import fetch_torch  # noqa: E402


def test_every_minor_is_listed_once_with_its_first_version() -> None:
    first = int(fetch_torch.VERSIONS[0].split(".")[1])
    assert [f"2.{first + i}.0" for i in range(len(fetch_torch.VERSIONS))] == fetch_torch.VERSIONS


def requirement_for(folder: Path, *versions: str) -> str:
    """What a package asks for that is built for these versions of torch."""
    for name in ("setup.py", "mrrope/VERSION", "cmake/cutlass-requirement.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    torchs = [folder / f"torch{version}" for version in versions]
    for torch, version in zip(torchs, versions, strict=True):
        torch.mkdir()
        (torch / "version.py").write_text(f"__version__ = '{version}+cu130'\n")
    environment = os.environ | {"MRROPE_TORCH_FOLDERS": ":".join(map(str, torchs)), "CUTLASS_PATH": str(folder)}
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.splitlines()[-1]
    (requires,) = folder.glob("*.egg-info/requires.txt")
    return requires.read_text().strip()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("2.11.0", "2.15.0", "2.13.1"), "torch<2.16,>=2.11"),
        (("2.13.0",), "torch==2.13.*"),
        (("2.10.0", "2.11.0"), "mrrope needs torch 2.11 or newer, found 2.10 in "),
    ],
)
def test_a_package_asks_for_the_torch_it_was_built_for(
    tmp_path: Path, versions: tuple[str, ...], expected: str
) -> None:
    assert requirement_for(tmp_path, *versions).startswith(expected)


def test_a_folder_without_torch_is_refused(tmp_path: Path) -> None:
    environment = os.environ | {"MRROPE_TORCH_FOLDERS": str(tmp_path)}
    command = [sys.executable, "setup.py", "--quiet", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"MRROPE_TORCH_FOLDERS must name folders of torch, separated as in PATH, got {tmp_path}" in done.stderr


def test_only_headers_and_three_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("torch/include/torch/library.h", "torch/version.py", "torch/lib/libc10.so", "torch/lib/libtorch_cuda.so")

    def download(command: list[str], **_: Any) -> None:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "torch-2.11.0-cp311.whl", "w") as wheel:
            for name in (*names, "torch/nn/__init__.py"):
                wheel.writestr(name, "")

    monkeypatch.setattr(subprocess, "run", download)
    fetch_torch.fetch("2.11.0", tmp_path / "2.11.0")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"2.11.0/include/torch/library.h", "2.11.0/version.py", "2.11.0/lib/libc10.so"}


def test_build_tools_are_pinned_alike() -> None:
    pins = [
        dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / folder / "requirements.txt").read_text(), re.MULTILINE))
        for folder in ("wheels", "tests")
    ]
    assert {"cmake", "ninja", "pybind11", "setuptools", "wheel"} <= pins[0].keys()
    assert {name: version for name, version in pins[0].items() if name in pins[1]}.items() <= pins[1].items()
