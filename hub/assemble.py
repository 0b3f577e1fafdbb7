"""Assembles the package for the Hub of kernels: its sources, as kernel-builder takes them, and one build variant.

    python hub/assemble.py build/cpython-311-torch2.11/hub/_mrrope_rotary_v1.so build/hub --backend cu130 --archs 9.0a

Needs torch, for the version in the variant's name. The layer is the one of ``mrrope.register_kernels``, with the
package's own ops in place of mrrope's.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import shutil
import sys
from pathlib import Path

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent
NAME = "mrrope_rotary"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="the CMake target mrrope_hub, built with -DMRROPE_TESTS=ON")
    parser.add_argument("output", type=Path, help="folder of the package")
    parser.add_argument("--backend", default="cpu", help="cpu, or CUDA's version as in cu130 (default: %(default)s)")
    parser.add_argument("--archs", nargs="*", default=[], help="compute capabilities that the library has code for")
    arguments = parser.parse_args()
    write_sources(arguments.output)
    print(write_variant(arguments.output, arguments.library, arguments.backend, arguments.archs))


def build_settings() -> dict[str, dict]:
    """Return build.toml."""
    return tomllib.loads((HERE / "build.toml").read_text())


def listed_sources() -> list[str]:
    """Return the sources that build.toml names, relative to the package."""
    settings = build_settings()
    return [*settings["torch"]["src"], *(path for kernel in settings["kernel"].values() for path in kernel["src"])]


def write_sources(output: Path) -> None:
    """Write what kernel-builder builds all variants of."""
    for path in ["build.toml", "flake.nix", f"torch-ext/{NAME}/__init__.py", *listed_sources()]:
        origin = HERE / path if (HERE / path).exists() else ROOT / path
        target = output / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
    (output / "torch-ext" / NAME / "layers.py").write_text(layers())


def layers() -> str:
    """Return the module of the layer, with the ops of the package."""
    source = (ROOT / "mrrope" / "hf" / "rotary_layer.py").read_text()
    return source.replace("torch.ops.mrrope.", "ops.").replace(
        "from torch import nn\n", "from torch import nn\n\nfrom ._ops import ops\n", 1
    )


def variant_name(backend: str) -> str:
    """Return the name of the build variant for this machine and this torch."""
    major, minor = torch.__version__.split(".")[:2]
    return f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-linux"


def write_variant(output: Path, library: Path, backend: str, archs: list[str]) -> Path:
    """Write one build variant and return its folder."""
    variant = output / "build" / variant_name(backend)
    shutil.rmtree(variant, ignore_errors=True)
    (variant / NAME).mkdir(parents=True)
    shutil.copyfile(HERE / "torch-ext" / NAME / "__init__.py", variant / "__init__.py")
    shutil.copyfile(library, variant / library.name)
    (variant / "layers.py").write_text(layers())
    (variant / "_ops.py").write_text(
        "from pathlib import Path\n\nimport torch\n\n"
        f"torch.ops.load_library(Path(__file__).with_name({library.name!r}))\n"
        f"ops = torch.ops.{library.stem}\n"
    )
    # Versions of kernels before 0.10 import this folder.
    (variant / NAME / "__init__.py").write_text(
        "import importlib.util\nimport sys\nfrom pathlib import Path\n\n"
        f"_spec = importlib.util.spec_from_file_location({library.stem!r}, Path(__file__).parents[1] / '__init__.py')\n"
        "_module = importlib.util.module_from_spec(_spec)\n"
        "sys.modules[_spec.name] = _module\n_spec.loader.exec_module(_module)\n"
        "globals().update({name: getattr(_module, name) for name in _module.__all__})\n"
    )
    general = build_settings()["general"]
    metadata = {
        "id": library.stem,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": archs},
        "digest": {
            "algorithm": "sha256",
            "files": {
                str(path.relative_to(variant)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
                for path in sorted(variant.rglob("*"))
                if path.is_file()
            },
        },
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


if __name__ == "__main__":
    main()
