"""The build: CUDA kernels where nvcc is, libraries that load anywhere, torch's own OpenMP, setup.py's CMake options."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from mrrope import _core
from mrrope.torch_library import PACKAGE, library_for, minor_of

LIBRARY = library_for(torch.__version__)
KERNELS = PACKAGE / "libmrrope_kernels.so"
ROOT = Path(__file__).parents[3]
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
# torch's CUDA builds come with triton, which brings one.
TRITON_PROGRAMS = Path(sysconfig.get_path("purelib")) / "triton" / "backends" / "nvidia" / "bin"
CUOBJDUMP = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], str(TRITON_PROGRAMS)]))
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf")
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="there is no cmake")


# Builds without kernels register the CUDA ops, too; those raise an error.
@pytest.mark.skipif(
    "MRROPE_CUDA=OFF" in os.environ.get("CMAKE_ARGS", ""), reason="CMAKE_ARGS asks for a build without CUDA"
)
@pytest.mark.skipif(
    CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists(),
    reason="torch was built without CUDA, or there is no nvcc",
)
def test_cuda_kernels_are_compiled_where_nvcc_is() -> None:
    assert b".nv_fatbin" in KERNELS.read_bytes(), f"{KERNELS} has no CUDA code, though {CUDA_HOME} has nvcc"


def test_the_build_has_the_running_torch() -> None:
    build = _core.build_info()
    assert minor_of(torch.__version__) in build["torch"]
    assert {path.name for path in PACKAGE.glob("libmrrope_torch*")} == {library_for(m).name for m in build["torch"]}
    assert _core.cpu_instruction_set() in build["instruction_sets"]
    has_kernels = b".nv_fatbin" in KERNELS.read_bytes()
    assert has_kernels == (build["without_cuda"] is None) == (build["nvcc"] is not None)
    assert bool(build["machine_code"] or build["ptx"]) == has_kernels
    assert build["wgmma"] == ("90a" in build["machine_code"])
    assert not any(b".nv_fatbin" in library_for(minor).read_bytes() for minor in build["torch"])


@pytest.mark.skipif(CUOBJDUMP is None, reason="there is no cuobjdump")
@pytest.mark.skipif(_core.build_info()["without_cuda"] is not None, reason="the build has no CUDA kernels")
def test_the_architectures_are_those_in_the_library() -> None:
    build = _core.build_info()
    for option, pattern, listed in (
        ("-lelf", r"\.sm_(\d+)\w?\.cubin", build["machine_code"]),
        ("-lptx", r"\.sm_(\d+)\w?\.ptx", build["ptx"]),
    ):
        output = subprocess.run([CUOBJDUMP, option, KERNELS], capture_output=True, text=True, check=False).stdout
        # A cuobjdump older than nvcc prints sm_90 for sm_90a.
        assert set(re.findall(pattern, output)) == {name.rstrip("af") for name in listed}


def dynamic_section(library: Path, tag: str) -> list[str]:
    listed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", listed)


@needs_readelf
def test_libraries_look_for_others_beside_the_package_only() -> None:
    assert dynamic_section(KERNELS, "RUNPATH") == dynamic_section(KERNELS, "RPATH") == []
    for minor in _core.build_info()["torch"]:
        assert dynamic_section(library_for(minor), "RUNPATH") == ["$ORIGIN:$ORIGIN/../torch/lib"]
        assert dynamic_section(library_for(minor), "RPATH") == []
    for module in PACKAGE.glob("_core*.so"):
        assert dynamic_section(module, "RUNPATH") == dynamic_section(module, "RPATH") == []


def test_libraries_have_no_path_of_the_machine_that_built_them() -> None:
    """Of a package that was built in this checkout."""
    named = [path.name for path in PACKAGE.glob("*.so") if os.fsencode(ROOT) in path.read_bytes()]
    assert named == []


@needs_readelf
def test_libraries_load_without_cuda() -> None:
    """Neither CPU builds of torch nor machines without a driver have CUDA's libraries."""
    assert dynamic_section(KERNELS, "NEEDED")
    for library in (KERNELS, *(library_for(minor) for minor in _core.build_info()["torch"])):
        assert [name for name in dynamic_section(library, "NEEDED") if "cuda" in name] == []


@needs_readelf
def test_the_kernels_do_not_know_torch() -> None:
    foreign = re.compile(r"lib(torch|c10|python|gomp|omp)")
    assert [name for name in dynamic_section(KERNELS, "NEEDED") if foreign.match(name)] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_only_names_of_mrrope_are_exported() -> None:
    """The CUDA runtime inside would stand in for torch's, and torch's templates for those of other extensions."""
    for library in (KERNELS, LIBRARY):
        command = ["nm", "--dynamic", "--defined-only", "--demangle", "--format=just-symbols", library]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert any(name.startswith("mrrope::rotary") for name in names)
        assert [name for name in names if not name.startswith("mrrope::")] == []


@needs_readelf
def test_no_openmp_runtime_is_linked() -> None:
    """libtorch_cpu brings its own; the name of that one may change with a patch version of torch."""

    def runtimes(library: Path) -> list[str]:
        return [name for name in dynamic_section(library, "NEEDED") if re.match(r"lib(gomp|iomp|omp)\b", name)]

    assert runtimes(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    assert runtimes(LIBRARY) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc")
def test_no_second_openmp_runtime_is_loaded(tmp_path: Path) -> None:
    script = """
import re
def loaded():
    return set(re.findall(r"/.*/lib[gi]?omp.*", open("/proc/self/maps").read()))
import torch
before = loaded()
import mrrope
print(sorted(loaded() - before))
"""
    # Outside the checkout, whose package has no library.
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.strip() == "[]"


@needs_cmake
def test_a_build_starts_from_the_defaults(tmp_path: Path) -> None:
    """Run setup.py on a project that only writes its configuration to a file."""
    for name in ("setup.py", "mrrope/VERSION", "cmake/cutlass-requirement.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(told LANGUAGES NONE)\n"
        'option(MRROPE_CUDA "" ON)\n'
        'file(WRITE ${CMAKE_SOURCE_DIR}/told "${MRROPE_CUDA} ${SOMETHING} ${CUTLASS_PATH}")\n'
        "file(WRITE ${CMAKE_BINARY_DIR}/mrrope/libmrrope_torch2.99.so new)\n"
        "add_custom_target(mrrope_package)\n"
    )
    left_over = tmp_path / "mrrope" / "libmrrope_torch2.98.so"
    left_over.write_text("of an earlier build")
    told = []
    for arguments in ("-DCUTLASS_PATH=1", "-DMRROPE_CUDA=OFF -DSOMETHING=1 -DCUTLASS_PATH=2", "-DCUTLASS_PATH=3"):
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        environment = os.environ | {"CMAKE_ARGS": arguments}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        told.append((tmp_path / "told").read_text())
    assert told == ["ON  1", "OFF 1 2", "ON  3"]
    assert [path.name for path in (tmp_path / "mrrope").glob("*.so")] == ["libmrrope_torch2.99.so"]


DEFAULT_ARCHITECTURES = "80-real;86-real;89-real;90a-real;100-real;103-real;120-real;90-virtual"
ARCHITECTURES = {
    "": DEFAULT_ARCHITECTURES,
    "8.0": "80-real",
    "8.0;9.0a+PTX": "80-real;90a-real;90a-virtual",
    "Hopper": "90-real;90-virtual",
    "Ampere Hopper": "80-real;86-real;86-virtual;90-real;90-virtual",
    "Ampere+Tegra;9.0": "87-real;90-real",
    "Blackwell": "100-real;103-real;120-real;121-real;121-virtual",
    "native": "native",
}


def architectures(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.cmake"
    module = ROOT / "cmake" / "CudaArchitectures.cmake"
    script.write_text(f'include({module})\nmessage("${{CMAKE_CUDA_ARCHITECTURES}}")\n')
    command = [str(CMAKE), "-P", str(script)]
    outside = {"TORCH_CUDA_ARCH_LIST": "", "CUDAARCHS": ""}
    return subprocess.run(command, env=os.environ | outside | environment, capture_output=True, text=True, check=False)


@needs_cmake
@pytest.mark.parametrize("listed", ARCHITECTURES)
def test_architectures_as_torch_names_them(tmp_path: Path, listed: str) -> None:
    assert architectures(tmp_path, TORCH_CUDA_ARCH_LIST=listed).stderr.strip() == ARCHITECTURES[listed]


@needs_cmake
def test_architectures_of_cmakes_own_variable(tmp_path: Path) -> None:
    assert architectures(tmp_path, CUDAARCHS="75;90a").stderr.strip() == "75;90a"


@needs_cmake
@pytest.mark.parametrize("listed", ["All", "Hopper;9", "sm_90"])
def test_unknown_architectures_are_refused(tmp_path: Path, listed: str) -> None:
    result = architectures(tmp_path, TORCH_CUDA_ARCH_LIST=listed)
    assert result.returncode
    assert "TORCH_CUDA_ARCH_LIST must list architectures" in result.stderr
