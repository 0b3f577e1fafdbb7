"""What `make demo` and `make test` build in one environment, and what they say, by the commands that make would run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = (
    "CMakeLists.txt",
    "setup.py",
    "pyproject.toml",
    "tests/requirements.txt",
    "tests/demo-requirements.txt",
    "tests/build-requirements.txt",
    "tests/install-system-packages",
    "docs/requirements.txt",
    "cmake/cutlass-requirement.txt",
    "csrc/rotary.cpp",
)
TESTED, WITHOUT_CUDA, ALL_PACKAGES, DEMO_PACKAGES = (
    "-DMRROPE_TESTS=ON", "-DMRROPE_CUDA=OFF", "-r tests/requirements.txt", "-r tests/demo-requirements.txt",
)  # fmt: skip

COMPILED_AHEAD = "--target mrrope_core mrrope_plans"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile among files as old as the hills."""
    for name in FILES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (0, 0))
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv").mkdir()
    nvidia_smi(tmp_path, 1)
    return tmp_path


def nvidia_smi(checkout: Path, status: int) -> None:
    """Put a program first in PATH, so that the result does not depend on this machine's driver."""
    program = checkout / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)


def stamp(checkout: Path, *names: str, seconds: int = 100) -> None:
    """Make stamps, the later ones newer; those of packages come before those of builds."""
    for number, name in enumerate(names):
        (checkout / ".venv" / name).touch()
        os.utime(checkout / ".venv" / name, (seconds + number, seconds + number))


def commands(checkout: Path, target: str) -> str:
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # With make's own variables, as these tests have under `make test`, it would name the folder it enters and leaves.
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH")
    environment = {key: value for key, value in os.environ.items() if key not in of_make}
    made = subprocess.run(
        ["make", "--dry-run", target],
        cwd=checkout,
        env=environment | {"PATH": path, "CMAKE_ARGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout


def test_without_a_driver_the_demo_is_built_without_cuda_and_says_so(checkout: Path) -> None:
    made = commands(checkout, "demo")
    assert "no NVIDIA driver found, so mrrope is built without CUDA kernels; make test builds them" in made
    assert WITHOUT_CUDA in made
    assert DEMO_PACKAGES in made
    assert COMPILED_AHEAD in made
    assert TESTED not in made
    assert ALL_PACKAGES not in made


def test_with_a_driver_the_demo_has_the_kernels(checkout: Path) -> None:
    nvidia_smi(checkout, 0)
    made = commands(checkout, "demo")
    assert TESTED in made
    assert WITHOUT_CUDA not in made


def test_a_second_demo_builds_nothing(checkout: Path) -> None:
    stamp(checkout, ".build-packages", ".compiled-ahead", ".demo-packages", ".model", ".mrrope-without-cuda")
    assert "pip" not in commands(checkout, "demo")


def test_after_a_demo_the_tests_have_their_packages_and_the_kernels(checkout: Path) -> None:
    stamp(checkout, ".build-packages", ".compiled-ahead", ".demo-packages", ".model", ".mrrope-without-cuda")
    made = commands(checkout, "install")
    assert ALL_PACKAGES in made
    assert made.index("rm -f .venv/.mrrope-without-cuda") < made.index(TESTED)
    assert WITHOUT_CUDA not in made


def test_the_tests_say_how_long_they_took(checkout: Path) -> None:
    stamp(checkout, ".packages", ".mrrope")
    last = commands(checkout, "quick").splitlines()[-1]
    said = subprocess.run(["sh", "-c", last], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"make quick took \d+ minutes\n", said)
    recipe = re.search(r"^test: cpp-tests\n((?:\t.*\n)+)", (checkout / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].endswith("\t$(SAY_HOW_LONG)\n")


def test_after_the_tests_the_demo_takes_their_build(checkout: Path) -> None:
    stamp(checkout, ".packages", ".mrrope", ".model")
    assert "pip" not in commands(checkout, "demo")


def test_after_a_change_the_demo_is_built_without_cuda_and_the_tests_with_it(checkout: Path) -> None:
    stamp(checkout, ".packages", ".mrrope", ".model")
    os.utime(checkout / "csrc" / "rotary.cpp", (200, 200))
    made = commands(checkout, "demo")
    assert made.index("rm -f .venv/.mrrope\n") < made.index(WITHOUT_CUDA)
    assert ALL_PACKAGES not in made
    assert DEMO_PACKAGES not in made
    assert COMPILED_AHEAD not in made
