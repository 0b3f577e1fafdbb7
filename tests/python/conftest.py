"""Fixtures for devices and golden tables, hypothesis profiles, and the selection of ``pytest --quick``."""

import gc
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from markers import needs_cuda

# transformers reads this on import. test_patch_with_kernels.py and test_register_kernels.py turn the hub kernels on in
# processes of their own.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

settings.register_profile("default", deadline=None, max_examples=150)
settings.register_profile("ci", deadline=None, max_examples=150, derandomize=True)
settings.register_profile("quick", deadline=None, max_examples=15, derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first case of every fast test")
    parser.addoption("--gpu", action="store_true", help="only tests that use a GPU")


def pytest_configure(config: pytest.Config) -> None:
    profile = "quick" if config.getoption("quick") else "ci" if os.environ.get("CI") else "default"
    settings.load_profile(profile)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --gpu, keep the tests that use a GPU; with --quick, the first case of every fast test on every device."""
    if config.getoption("gpu"):
        keep_only(config, items, {item for item in items if needs_cuda.mark in item.iter_markers("skipif")})
    if not config.getoption("quick"):
        return
    first: dict[tuple[Any, ...], pytest.Item] = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        first.setdefault((item.nodeid.split("[")[0], parameters.get("device"), parameters.get("cuda")), item)
    keep_only(config, items, {item for item in first.values() if item.get_closest_marker("slow") is None})


def keep_only(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


# Session scope: hypothesis rejects function-scoped fixtures.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=needs_cuda)])
def cuda(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings about tiny models."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(scope="session")
def rope_types() -> None:
    """Register mrrope's rope types with transformers, for tests that load or build configurations with them."""
    import mrrope

    mrrope.register_rope_types()


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Reset TorchDynamo before and after the test.

    Patched models of other tests are collected first: during compilation, their functions would change under it.
    """
    gc.collect()
    importlib.import_module("torch._dynamo.testing")  # which torch._dynamo does not import
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.fixture
def process_group() -> Iterator[None]:
    """Initialize a process group of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    path = Path(__file__).parents[1] / "golden" / "frequency_tables.json"
    return json.loads(path.read_text())
