"""Layers: csrc knows neither torch nor CUDA, kernels no torch; mrrope needs only torch and imports downwards."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import mrrope
from mrrope.hf import rotary_layer

ROOT = Path(__file__).parents[3]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

TORCH = re.compile(r"^(torch|ATen|c10|pybind11)/|^Python\.h$")
CUDA = re.compile(r"^cu(da|tlass|te|b)\b|^(cuda|cutlass|cute|cub|thrust)[_/.]|^nv")

# From the bottom. A module belongs to the entry with its longest prefix; it may import its own layer and those below.
PACKAGE_LAYERS = [
    {
        "mrrope._core",
        "mrrope.tables",
        "mrrope.torch_library",
    },
    {"mrrope.ops"},
    {"mrrope.hf"},
    {"mrrope.hf.patch", "mrrope.hf.registration"},
    {"mrrope.export"},
    {"mrrope"},  # mrrope/__init__.py, the public names
    {"mrrope.serving"},
    {"mrrope.vllm", "mrrope.sglang"},  # engines import them; nothing of the package does
    {"mrrope.reporting"},
    {"mrrope.evaluation", "mrrope.theory", "mrrope.benchmark", "mrrope.environment"},
    {"mrrope.calibration"},
    {"mrrope.demo"},
    {"mrrope.cli", "mrrope.__main__"},
]
MAX_LEVELS = 8
MAX_FLAT_MODULES = 5


# C++


def includes(layer: str) -> list[tuple[str, str]]:
    """Return (file, included name) for every include line of a layer."""
    files = [path for path in (ROOT / layer).rglob("*") if path.suffix in SOURCES]
    assert files, f"no sources in {layer}"
    return [(path.relative_to(ROOT).as_posix(), name) for path in files for name in INCLUDE.findall(path.read_text())]


def headers_of(layer: str) -> set[str]:
    """Return the names by which a layer's own headers are included."""
    paths = [path for path in (ROOT / layer).rglob("*") if path.suffix in {".h", ".cuh"}]
    return {path.name if "include" not in path.parts else f"mrrope/{path.name}" for path in paths}


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [("csrc", TORCH), ("csrc", CUDA), ("kernels", TORCH)],
    ids=["csrc-torch", "csrc-cuda", "kernels-torch"],
)
def test_no_foreign_includes(layer: str, forbidden: re.Pattern[str]) -> None:
    assert [(file, name) for file, name in includes(layer) if forbidden.search(name)] == []


@pytest.mark.parametrize(("layer", "above"), [("csrc", "kernels"), ("csrc", "bindings"), ("kernels", "bindings")])
def test_no_includes_from_the_layer_above(layer: str, above: str) -> None:
    foreign = headers_of(above)
    assert foreign
    assert [(file, name) for file, name in includes(layer) if name in foreign or f"{above}/" in name] == []


def test_only_bindings_includes_torch() -> None:
    layers = ["csrc", "kernels", "bindings"]
    assert {layer for layer in layers for _, name in includes(layer) if TORCH.search(name)} == {"bindings"}


def test_the_patterns_match_the_usual_headers() -> None:
    for name in ("torch/library.h", "ATen/core/Tensor.h", "c10/util/Exception.h", "pybind11/stl.h"):
        assert TORCH.search(name)
    for name in ("cuda_runtime.h", "cuda/std/array", "cuda.h", "cutlass/array.h", "cub/cub.cuh", "nvtx3/nvtx3.hpp"):
        assert CUDA.search(name)
    for name in ("mrrope/rotary.h", "vector", "cstdint", "rotary_plan.h"):
        assert not TORCH.search(name)
        assert not CUDA.search(name)


def unguarded_calls(source: str) -> list[str]:
    """Return the functions for the current device that are called where no DeviceGuard is alive."""
    guards, found = [False], []
    for token in re.findall(r"[{}]|DeviceGuard guard|\b\w+_cuda(?=\()", source):
        if token == "{":
            guards.append(guards[-1])
        elif token == "}":
            guards.pop()
        elif token == "DeviceGuard guard":
            guards[-1] = True
        elif not guards[-1]:
            found.append(token)
    return found


def test_bindings_switch_to_the_device_of_the_tensors() -> None:
    """Plans and sizes of buffers are those of the current device: on unlike GPUs a wrong one is out of bounds."""
    sources = {path.name: path.read_text() for path in (ROOT / "bindings").glob("*") if path.suffix in SOURCES}
    assert "weight_sum_rows_cuda(" in sources["backends.h"]
    assert {name: found for name, source in sources.items() if (found := unguarded_calls(source))} == {}
    assert re.search(r"DeviceGuard guard\(heads.device\(\)\);\s*kernel\(", sources["backends.h"]), "launch()"
    without = sources["backends.h"].replace("DeviceGuard guard", "", 1)
    assert unguarded_calls(without) == ["weight_sum_rows_cuda"]


# The Python package


def imports_at_module_level(path: Path) -> set[str]:
    """Return the top-level packages that importing the file imports; imports inside functions do not count."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("mrrope" if node.level else (node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return found


def test_the_package_imports_torch_and_the_standard_library_only() -> None:
    files = list((ROOT / "mrrope").rglob("*.py"))
    assert files
    for path in files:
        # Engines import their plugins, with numpy and their other packages at hand.
        of_engines = {
            "serving": {"numpy", "prometheus_client"},
            "sglang": {"numpy", "sglang"},
            "vllm": {"numpy", "prometheus_client", "vllm"},
        }.get(path.parent.name, set())
        foreign = imports_at_module_level(path) - set(sys.stdlib_module_names) - {"torch", "mrrope"} - of_engines
        assert foreign == set(), path


IMPORTED = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import mrrope
print(time.process_time() - start)
print(*(name for name in sys.modules if name not in before and not name.startswith("mrrope")))
"""


def test_the_import_is_quick(tmp_path: Path) -> None:
    """Beyond torch, the package imports little: above all not torch._dynamo, which takes more than a second."""
    command = [sys.executable, "-c", IMPORTED]
    seconds, names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split(
        "\n"
    )[:2]  # not in the checkout, whose package may lack the built library
    assert not [name for name in names.split() if name.startswith(("torch._dynamo", "sympy", "transformers"))]
    assert float(seconds) < 0.3


def test_how_torch_marks_a_constant_result() -> None:
    """mrrope.hf.rotary_layer sets the mark itself."""

    def marked() -> None:
        pass

    assert vars(torch.compiler.assume_constant_result(marked)) == {"_dynamo_marked_constant": True}
    assert vars(rotary_layer.column_use_of) == vars(marked)


def module_files() -> dict[str, Path]:
    """Return the package's files by module name; ``_core`` is compiled and has only its stub."""
    paths = [*(ROOT / "mrrope").rglob("*.py"), *(ROOT / "mrrope").rglob("*.pyi")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported_names(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") for every import in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


@cache
def package_imports() -> dict[str, set[str]]:
    """Return, for every module of the package, the modules of the package that it imports."""
    files = module_files()
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        pairs = {(module, f"{module}.{member}") for module, member in imported_names(path, package)}
        found[name] = {member if member in files else module for module, member in pairs} & files.keys() - {name}
    return found


def layer_of(module: str) -> int:
    entries = {prefix: i for i, layer in enumerate(PACKAGE_LAYERS) for prefix in layer if prefix != "mrrope"}
    matching = [prefix for prefix in entries if f"{module}.".startswith(f"{prefix}.")]
    assert matching or module == "mrrope", f"{module} belongs to no layer"
    return entries[max(matching, key=len)] if matching else PACKAGE_LAYERS.index({"mrrope"})


def test_modules_import_downwards() -> None:
    imports = package_imports()
    upward = [(name, other) for name in imports for other in imports[name] if layer_of(other) > layer_of(name)]
    assert sorted(upward) == []


def test_modules_below_the_public_names_do_not_import_them() -> None:
    """``from mrrope import _core`` names mrrope/__init__.py, although it gets a module beside it."""
    files = module_files()
    below = [name for name in files if layer_of(name) < PACKAGE_LAYERS.index({"mrrope"})]
    assert "mrrope.hf.patch" in below
    assert [name for name in below if any(module == "mrrope" for module, _ in imported_names(files[name], name))] == []


@pytest.mark.parametrize("plugin", ["mrrope.vllm", "mrrope.sglang"])
def test_no_module_imports_a_plugin(plugin: str) -> None:
    outside = {name: others for name, others in package_imports().items() if not name.startswith(plugin)}
    assert [name for name, others in outside.items() if any(other.startswith(plugin) for other in others)] == []


def levels(package: str) -> dict[str, int]:
    """Return the level of each module and folder directly in a package: one above the highest that it imports.

    Raises:
        graphlib.CycleError: They import each other in a circle.
    """

    def child(module: str) -> str | None:
        if module == package:
            return "__init__"
        return module[len(package) + 1 :].split(".")[0] if module.startswith(f"{package}.") else None

    graph: dict[str, set[str]] = defaultdict(set)
    for name, others in package_imports().items():
        if (importer := child(name)) is not None:
            graph[importer] |= {below for other in others if (below := child(other)) not in (None, importer)}
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[below] for below in graph[name]), default=0)
    return found


@pytest.mark.parametrize("package", sorted(name for name, path in module_files().items() if path.name == "__init__.py"))
def test_a_package_has_no_import_cycle_and_few_levels(package: str) -> None:
    found = levels(package)
    assert max(found.values()) <= MAX_LEVELS, f"levels: {sorted(found.items(), key=lambda item: item[1])}"


def test_few_modules_lie_flat() -> None:
    """Directly in the package lie its entry points; what belongs to a concept lies in that concept's folder."""
    flat = sorted(name for name, path in module_files().items() if path.parent == ROOT / "mrrope")
    assert len([name for name in flat if not name.endswith("._core")]) <= MAX_FLAT_MODULES, flat


def test_the_top_level_has_what_users_call() -> None:
    """Helpers of one op, and lists of names, are imported from the modules that they belong to."""
    helpers = {"METHODS", "pack_qkv", "unpack_qkv", "interleave_heads", "deinterleave_heads"}
    assert helpers.isdisjoint(mrrope.__all__)
    assert not [name for name in helpers if hasattr(mrrope, name)]


def test_imports_are_read_from_every_form(tmp_path: Path) -> None:
    source = "import a.b\nfrom . import c\nfrom .. import d\nfrom ..e import f\ndef g():\n    from h import i\n"
    (tmp_path / "x.py").write_text(source)
    found = set(imported_names(tmp_path / "x.py", "p.q"))
    assert found == {("a.b", ""), ("p.q", "c"), ("p", "d"), ("p.e", "f"), ("h", "i")}


# Tests


def test_tests_share_code_through_support_only() -> None:
    """No test file imports another test file or conftest.py, nor a private name of a module in tests."""
    files = [path for folder in ("python", "fuzz", "serving") for path in (ROOT / "tests" / folder).rglob("*.py")]
    own = {path.stem for path in files}
    wrong = []
    for path in files:
        for module, name in imported_names(path, "fuzz"):
            last = module.rpartition(".")[2]
            is_private = name.startswith("_") and last in own and not module.startswith("mrrope")
            if last.startswith("test_") or last == "conftest" or is_private:
                wrong.append(f"{path.relative_to(ROOT)}: {module} {name}")
    assert sorted(wrong) == []
