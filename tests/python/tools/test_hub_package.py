"""The package for the Hub of kernels: its sources are complete, and kernels' own loader takes a built variant."""

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import mrrope

ROOT = Path(__file__).parents[3]
TAG = f"{sys.implementation.cache_tag}-torch{'.'.join(importlib.metadata.version('torch').split('.')[:2])}"
LIBRARY = ROOT / "build" / TAG / "hub" / "_mrrope_rotary_v1.so"
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="the CMake target mrrope_hub is not built")
SEARCHED = ("csrc/include", "csrc", "csrc/cpu", "kernels", "bindings", "bindings/include")


def assemble() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assemble", ROOT / "hub" / "assemble.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command."""
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, ROOT / "hub" / "assemble.py", LIBRARY, folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_the_sources_include_only_each_other() -> None:
    listed = set(assemble().listed_sources()) - {"torch-ext/torch_binding.cpp"}
    for path in listed:
        for name in re.findall(r'#include "([^"]+)"', (ROOT / path).read_text()):
            found = [
                folder / name for folder in (Path(path).parent, *map(Path, SEARCHED)) if (ROOT / folder / name).exists()
            ]
            assert found, f"{path} includes {name}"
            assert str(found[0]) in listed, f"{path} includes {found[0]}, which build.toml does not list"


def test_settings() -> None:
    settings = assemble().build_settings()
    assert settings.keys() == {"general", "torch", "kernel"}
    assert settings["general"].keys() == {"name", "version", "edition", "license", "backends"}
    assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", settings["general"]["name"])
    assert settings["general"]["name"].replace("-", "_") == assemble().NAME


def loaded(package: Path) -> Any:
    return pytest.importorskip("kernels").get_local_kernel(package, backend="cpu")


@needs_library
def test_metadata(package: Path) -> None:
    data = pytest.importorskip("kernels_data")
    (variant,) = (package / "build").iterdir()
    assert variant.name.endswith(f"-cpu-{platform.machine()}-linux")
    metadata = data.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("mrrope-rotary", 1, "Apache-2.0")
    text = json.loads((variant / "metadata.json").read_text())
    without = {path: digest for path, digest in text["digest"]["files"].items() if path != "metadata.json"}
    actual = data.Digest.hash_variant(data.DigestAlgorithm.SHA256, variant).files
    assert {path: digest for path, digest in actual.items() if path != "metadata.json"} == without


@needs_library
def test_the_op_of_the_package(package: Path) -> None:
    kernel = loaded(package)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16, requires_grad=True)
    cos, sin = torch.randn(2, 2, 5, 16)
    want = mrrope.rotary_cos_sin(q, k, cos, sin)
    got = kernel.rotary_cos_sin([q, k], cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    gradients = [torch.autograd.grad(x[1].square().sum(), k)[0] for x in (got, want)]
    assert torch.equal(*gradients)
    assert torch.ops._mrrope_rotary_v1.rotary_cos_sin.default is not torch.ops.mrrope.rotary_cos_sin.default


@needs_library
def test_the_layer_of_the_package(package: Path) -> None:
    """Let kernelize, which checks that layers have no state, put it on a module."""
    kernels = pytest.importorskip("kernels")
    loaded(package)
    (variant,) = (package / "build").iterdir()

    @kernels.use_kernel_forward_from_hub("rotary_pos_emb")
    def apply(q, k, cos, sin, unsqueeze_dim=1):
        first, second = q[..., :4], q[..., 4:]
        turned = torch.cat([-second, first], -1)
        other = torch.cat([-k[..., 4:], k[..., :4]], -1)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turned * sin, k * cos + other * sin

    @kernels.use_kernelized_func(apply)
    class Attention(nn.Module):
        def forward(self, *arguments: torch.Tensor) -> Any:
            return apply(*arguments)

    model = Attention()
    arguments = (*torch.randn(2, 1, 3, 5, 8), *(x.repeat(1, 1, 2) for x in torch.randn(2, 1, 5, 4)))
    want = model(*arguments)
    repository = kernels.LocalLayerRepository(variant, layer_name="RotaryPosEmb")
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE):
        with kernels.use_kernel_mapping({"rotary_pos_emb": {"cpu": repository}}, inherit_mapping=False):
            kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
        assert apply.forward.__func__.__module__.startswith("_mrrope_rotary_v1")
        for got, expected in zip(model(*arguments), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@needs_library
def test_the_library_is_of_any_python() -> None:
    """Use kernel-builder's checker."""
    checker = pytest.importorskip("kernel_abi_check", reason="needs the package kernel-abi-check")
    assert not checker.ObjectFile(str(LIBRARY)).check_python_abi("3.9")
