"""Optional packages and peers: their versions, what they are for, and how to install them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import Any, NamedTuple


class OptionalPackage(NamedTuple):
    """One row of ``OPTIONAL_PACKAGES``."""

    name: str
    """The distribution, as pip knows it."""
    module: str
    purpose: str
    extra: str | None = None
    """The extra of mrrope that brings it; peers have none."""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'mrrope[{self.extra}]'" if self.extra else f"pip install {self.name}"


OPTIONAL_PACKAGES = (
    OptionalPackage("transformers", "transformers", "patch; the commands eval, calibrate, demo", "eval"),
    OptionalPackage("accelerate", "accelerate", "models on several devices", "eval"),
    OptionalPackage("gguf", "gguf", "export to llama.cpp, models in GGUF files", "gguf"),
    OptionalPackage("matplotlib", "matplotlib", "figures", "eval"),
    OptionalPackage("tqdm", "tqdm", "progress bars", "eval"),
    OptionalPackage("lm_eval", "lm_eval", "tasks of lm-evaluation-harness", "harness"),
    OptionalPackage("vllm", "vllm", "the plugin of vLLM", "vllm"),
    OptionalPackage("sglang", "sglang", "the plugin of SGLang", "sglang"),
    OptionalPackage("kernels", "kernels", "use_kernels=True of transformers"),
    OptionalPackage("liger-kernel", "liger_kernel", "peer in mrrope bench"),
    OptionalPackage("flash-attn", "flash_attn", "peer in mrrope bench"),
    OptionalPackage("flashinfer-python", "flashinfer", "peer in mrrope bench"),
    OptionalPackage("transformer-engine", "transformer_engine", "peer in mrrope bench"),
)


def installed_version(name: str) -> str | None:
    """The version in a distribution's metadata; None where there is no metadata or it cannot be read."""
    try:
        return importlib.metadata.version(name) or None
    except Exception:  # a METADATA file that is missing, empty or not UTF-8 raises several types
        return None


def has_module(name: str) -> bool:
    """Whether a top-level module is found, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    # A folder without __init__.py is a namespace package, such as kernels/ in a checkout.
    return spec is not None and spec.origin is not None


def required_versions() -> dict[str, str]:
    """Version ranges by distribution, from the extras in mrrope's own metadata."""
    try:
        requirements = importlib.metadata.requires("mrrope") or []
    except Exception:  # as in installed_version
        return {}
    found = {}
    for requirement in requirements:
        parts = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*;.*\bextra\b", requirement)
        if parts:
            found[parts[1]] = parts[2].strip("() ")
    return found


def is_in_range(version: str, versions: str) -> bool | None:
    """Whether a version is in a range such as ``<6,>=5.17``; None where that cannot be decided."""
    try:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(versions).contains(version, prereleases=True)
    except Exception:  # packaging is missing, or the version is not one of PEP 440
        return None


def optional_packages() -> list[dict[str, Any]]:
    """One entry per row of ``OPTIONAL_PACKAGES``; nothing is imported."""
    required = required_versions()
    found = []
    for package in OPTIONAL_PACKAGES:
        version, requires = installed_version(package.name), required.get(package.name)
        found.append(
            {
                "name": package.name,
                "version": version,
                "installed": has_module(package.module),
                "for": package.purpose,
                "requires": requires,
                "in_range": is_in_range(version, requires) if version and requires else None,
                "install": package.install,
            }
        )
    return found


def vllm_plugin() -> dict[str, Any]:
    """Whether the plugin's entry point is registered and loads, and whether the plugin knows the installed vLLM."""
    report: dict[str, Any] = {"registered": False, "error": None, "known": None, "knows_installed": None}
    try:
        for entry_point in importlib.metadata.entry_points(group="vllm.general_plugins", name="mrrope"):
            report["registered"] = True
            entry_point.load()  # imports mrrope.vllm.plugin, which imports vllm only when it is called
            plugin, version = sys.modules[entry_point.module], installed_version("vllm")
            report["known"] = plugin.KNOWN
            report["knows_installed"] = plugin.is_known(version) if version else None
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    allowed = os.environ.get("VLLM_PLUGINS")
    report["allowed"] = allowed is None or "mrrope" in allowed.split(",")
    return report
