"""Who may include whom: csrc knows no torch and no CUDA, kernels no torch, and mrrope needs torch alone."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

TORCH = re.compile(r"^(torch|ATen|c10|pybind11)/|^Python\.h$")
CUDA = re.compile(r"^cu(da|tlass|te|b)\b|^(cuda|cutlass|cute|cub|thrust)[_/.]|^nv")


def includes(layer: str) -> list[tuple[str, str]]:
    """(file, what it includes) for every include line of a layer."""
    files = [path for path in (ROOT / layer).rglob("*") if path.suffix in SOURCES]
    assert files, f"no sources in {layer}"
    return [(path.relative_to(ROOT).as_posix(), name) for path in files for name in INCLUDE.findall(path.read_text())]


def headers_of(layer: str) -> set[str]:
    """The names by which a layer's own headers are included."""
    paths = [path for path in (ROOT / layer).rglob("*") if path.suffix in {".h", ".cuh"}]
    return {path.name if "include" not in path.parts else f"mrrope/{path.name}" for path in paths}


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [("csrc", TORCH), ("csrc", CUDA), ("kernels", TORCH)],
    ids=["csrc-torch", "csrc-cuda", "kernels-torch"],
)
def test_no_foreign_includes(layer, forbidden):
    assert [(file, name) for file, name in includes(layer) if forbidden.search(name)] == []


@pytest.mark.parametrize(("layer", "above"), [("csrc", "kernels"), ("csrc", "bindings"), ("kernels", "bindings")])
def test_no_includes_from_the_layer_above(layer, above):
    foreign = headers_of(above)
    assert foreign
    assert [(file, name) for file, name in includes(layer) if name in foreign or f"{above}/" in name] == []


def test_only_bindings_includes_torch():
    layers = ["csrc", "kernels", "bindings"]
    assert {layer for layer in layers for _, name in includes(layer) if TORCH.search(name)} == {"bindings"}


def test_the_patterns_know_the_usual_headers():
    for name in ("torch/library.h", "ATen/core/Tensor.h", "c10/util/Exception.h", "pybind11/stl.h"):
        assert TORCH.search(name)
    for name in ("cuda_runtime.h", "cuda/std/array", "cuda.h", "cutlass/array.h", "cub/cub.cuh", "nvtx3/nvtx3.hpp"):
        assert CUDA.search(name)
    for name in ("mrrope/rotary.h", "vector", "cstdint", "rotary_plan.h"):
        assert not TORCH.search(name)
        assert not CUDA.search(name)


def imports_at_module_level(path: Path) -> set[str]:
    """The top-level packages that importing the file imports; functions import when they are called."""
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


def test_the_package_imports_torch_and_the_standard_library_only():
    files = list((ROOT / "mrrope").rglob("*.py"))
    assert files
    for path in files:
        foreign = imports_at_module_level(path) - set(sys.stdlib_module_names) - {"torch", "mrrope"}
        assert foreign == set(), path
