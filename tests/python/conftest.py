"""Fixtures for devices and golden tables, hypothesis profiles, and the selection of ``pytest --quick``."""

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

# Left out of --quick: whole model families, training runs, real models and random runs.
SLOW_FILES = {
    Path(__file__).parent / name
    for name in (
        "hf/test_patch_families.py",
        "hf/test_patch_native.py",
        "hf/test_patch_with_kernels.py",
        "hf/test_real_model.py",
        "hf/test_register_kernels.py",
        "hf/test_tiny_models.py",
        "tools/test_export_families.py",
        "tools/test_fuzz.py",
        "tools/test_model_benchmark.py",
        "tools/test_study.py",
    )
}

# Tests that take more than 4 s of CPU time: compilation, processes of their own, whole runs of a command.
SLOW_TESTS = {
    "test_a_killed_run_goes_on_with_nothing_lost_and_nothing_read_twice",
    "test_a_pickled_model_follows_in_another_process",
    "test_compiled_decoding_is_one_graph_across_steps",
    "test_compiled_decoding_past_a_static_window",
    "test_compiled_decoding_with_a_cache_that_grows",
    "test_compiled_decoding_with_a_static_cache",
    "test_every_family_norms_as_it_did",
    "test_short_documents_will_do_where_they_are_joined",
    "test_tensor_parallel",
    "test_the_command_prints_tables_and_draws",
    "test_unpickled_in_a_fresh_process",
    "test_unpickled_with_attention_in_another_module_than_the_rotary_embedding",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first case of every fast test")
    parser.addoption("--gpu", action="store_true", help="only tests that use a GPU")


def pytest_configure(config: pytest.Config) -> None:
    profile = "quick" if config.getoption("quick") else "ci" if os.environ.get("CI") else "default"
    settings.load_profile(profile)
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("*/test_*.py"))
    missing = [str(path) for path in SLOW_FILES if not path.exists()]
    missing += [name for name in SLOW_TESTS if f"def {name}(" not in source]
    if missing:
        raise pytest.UsageError(f"SLOW_FILES and SLOW_TESTS must exist, got {missing}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("quick") and collection_path in SLOW_FILES else None


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
    kept = {item for item in first.values() if getattr(item, "originalname", item.name) not in SLOW_TESTS}
    keep_only(config, items, kept)


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
