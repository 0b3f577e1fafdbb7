"""Devices to test on, the golden tables, the mark of slow tests, and how many examples hypothesis tries."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import mrrope

# Read when transformers is imported: whether it uses the package kernels, as test_patch_with_kernels.py does.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

settings.register_profile("default", deadline=None, max_examples=150)
settings.register_profile("ci", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def reason_for_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    table = mrrope.frequency_table("rope", rotary_dim=2, base=1e4, original_max_position=8)
    try:
        mrrope.rotary(torch.ones(1, 1, 2, device="cuda"), None, torch.ones(1, device="cuda").long(), table, "thd")
    except RuntimeError as error:
        if "no CUDA kernels" in str(error):
            return "this build of mrrope has no CUDA kernels"
        raise
    return None


NO_CUDA = reason_for_no_cuda()
needs_cuda = pytest.mark.skipif(NO_CUDA is not None, reason=NO_CUDA or "")
slow = pytest.mark.skipif("MRROPE_SLOW_TESTS" not in os.environ, reason="takes minutes: MRROPE_SLOW_TESTS=1 runs it")


# For the whole session, so that hypothesis may reuse it from example to example.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=needs_cuda)])
def cuda(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Without the remarks that transformers has on tiny models."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """With nothing compiled before, and nothing left."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    path = Path(__file__).parents[1] / "golden" / "frequency_tables.json"
    return json.loads(path.read_text())
