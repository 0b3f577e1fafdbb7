"""Builds the compiled parts of mrrope by driving CMake, which holds the one list of sources.

The ops are compiled against the torch that will import them. pip builds in an isolated environment, where that torch
cannot be imported; it is found on disk. Where the target environment has no torch yet, the newest is built against, and
the wheel asks for that one. MRROPE_TORCH_FOLDERS names other folders of torch, one for each minor version, separated
as in PATH: `make wheel` builds for all of them.

Environment: CMAKE_ARGS (more arguments for CMake), TORCH_CUDA_ARCH_LIST or CUDAARCHS, CUTLASS_PATH, CUDACXX,
MRROPE_BUILD_FOLDER (the folder of CMake's build folders; default: build).
"""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = (ROOT / "mrrope" / "VERSION").read_text().strip()
OLDEST_TORCH = 2, 11
CUTLASS = (ROOT / "cmake" / "cutlass-requirement.txt").read_text().strip()


@cache
def package_folder(name: str) -> Path | None:
    """The folder of an installed package: importable here, or in the environment that pip builds for."""
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    # pip's isolation is these two variables: without them, Python sees the environment itself.
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    find = f"import importlib.util as u; print(*u.find_spec({name!r}).submodule_search_locations)"
    found = subprocess.run([sys.executable, "-c", find], env=outside, capture_output=True, text=True, check=False)
    return None if found.returncode else Path(found.stdout.strip())


@cache
def torch_folders() -> dict[tuple[int, int], Path]:
    """The folders of torch to compile against, by minor version; none where there is no torch yet."""
    named = os.environ.get("MRROPE_TORCH_FOLDERS")
    installed = package_folder("torch")
    folders = [Path(name).resolve() for name in named.split(os.pathsep)] if named else [installed] if installed else []
    found = {}
    for folder in folders:
        if not (folder / "version.py").exists():
            raise SystemExit(f"MRROPE_TORCH_FOLDERS must name folders of torch, separated as in PATH, got {folder}")
        version = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
        if version is None:
            raise RuntimeError(f"cannot read torch's version in {folder / 'version.py'}")
        minor = int(version[1]), int(version[2])
        if minor < OLDEST_TORCH:
            raise SystemExit(
                "mrrope needs torch {}.{} or newer, found {}.{} in {}".format(*OLDEST_TORCH, *minor, folder)
            )
        found[minor] = folder
    return found


def torch_requirement() -> str:
    """C++ is compatible within a minor version of torch, not across them."""
    minors = sorted(torch_folders())
    if not minors:
        return "torch>={}.{}".format(*OLDEST_TORCH)
    if len(minors) == 1:
        return "torch=={}.{}.*".format(*minors[0])
    oldest, (major, newest) = minors[0], minors[-1]
    return "torch>={}.{},<{}.{}".format(*oldest, major, newest + 1)


def build_requirements() -> list[str]:
    requirements = []
    if not torch_folders():
        requirements.append(torch_requirement())
    names_nvcc = any(variable in os.environ for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"))
    has_nvcc = names_nvcc or shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
    if has_nvcc and "CUTLASS_PATH" not in os.environ and package_folder("cutlass_library") is None:
        requirements.append(CUTLASS)
    return requirements


def program(name: str, folder_attribute: str) -> str:
    """A build tool: the one that came as a Python package, even if its environment is not active, else PATH's."""
    if importlib.util.find_spec(name):
        return str(Path(getattr(importlib.import_module(name), folder_attribute)) / name)
    return name


class CMakeBuild(build_ext):  # type: ignore[misc]
    """Configures and builds the CMake project, and copies its Python targets into the package's folder.

    Every version of Python and torch has a build folder of its own, outputs included: CMake takes a file that is newer
    than its sources for its own. What was compiled stays there, but neither the cache nor what was linked: each build
    starts from the defaults and this call's CMAKE_ARGS. Builds for several versions of torch share one folder, so that
    the kernels are compiled once for all Pythons.
    """

    def run(self) -> None:
        self.builds_in_source = bool(self.inplace or self.editable_mode)
        super().run()

    def copy_extensions_to_source(self) -> None:
        """Nothing to do: build_extension put them there."""

    def build_extension(self, extension: Extension) -> None:
        import pybind11

        folders = torch_folders()
        if not folders:
            raise SystemExit("mrrope is compiled against torch, and none was found: install torch first")
        newest = max(folders)
        one = "{}-torch{}.{}".format(sys.implementation.cache_tag, *newest)
        builds = ROOT / os.environ.get("MRROPE_BUILD_FOLDER", "build")
        build = builds / (one if len(folders) == 1 else "wheel")
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        shutil.rmtree(build / "mrrope", ignore_errors=True)
        arguments = [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja', 'BIN_DIR')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DLibTorch_ROOT={folders[newest]}",
            f"-DMRROPE_TORCH_FOLDERS={';'.join(str(folders[minor]) for minor in sorted(folders))}",
            "-DMRROPE_PYTHON=ON",
        ]
        cutlass = package_folder("cutlass_library")
        if cutlass and "CUTLASS_PATH" not in os.environ:
            arguments.append(f"-DCUTLASS_PATH={cutlass / 'source'}")
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))  # last, so that they win
        cmake = program("cmake", "CMAKE_BIN_DIR")
        for step in (
            [cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *arguments],
            [cmake, "--build", str(build), "--target", "mrrope_package"],
        ):
            if subprocess.run(step, check=False).returncode:
                raise SystemExit("CMake failed, as told above. CMAKE_ARGS=-DMRROPE_CUDA=OFF builds without CUDA.")
        package = ROOT / "mrrope" if self.builds_in_source else Path(self.build_lib) / "mrrope"
        package.mkdir(parents=True, exist_ok=True)
        # Their names have torch's version: those of another build would stay, and be packed. And whoever has one loaded
        # keeps it whole.
        for old in (*package.glob("libmrrope_*.so"), *package.glob(f"_core.{sys.implementation.cache_tag}-*.so")):
            old.unlink()
        for library in (build / "mrrope").glob("*.so"):
            shutil.copy2(library, package)


setup(
    version=VERSION,
    install_requires=[torch_requirement()],
    setup_requires=build_requirements(),
    ext_modules=[Extension("mrrope._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
