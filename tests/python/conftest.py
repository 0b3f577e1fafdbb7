"""Fixtures for devices and golden tables, and the number of examples that hypothesis draws."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from markers import needs_cuda

# transformers reads this on import. test_patch_with_kernels.py turns the hub kernels on in a process of its own.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

settings.register_profile("default", deadline=None, max_examples=150)
settings.register_profile("ci", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


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


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Reset TorchDynamo before and after the test."""
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
