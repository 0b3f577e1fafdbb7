"""Models of several test files, and the state in which tests of ``patch`` find transformers."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mrrope


@pytest.fixture
def model(device: str) -> Iterator[Any]:
    """A stock model of three layers, on every device, which is the default one meanwhile."""
    from auto_scaled_models import tiny_llama  # needs transformers

    torch.set_default_device(device)
    yield tiny_llama()
    torch.set_default_device(None)


def collect_patched_models() -> None:
    """Collect the patched models of other tests, which keep functions wrapped as long as they live.

    What still holds one, as the traceback of a failed test does, would fail every test after it: they are unpatched.
    """
    gc.collect()
    modeling_llama = sys.modules.get("transformers.models.llama.modeling_llama")
    if modeling_llama is None or not hasattr(modeling_llama.apply_rotary_pos_emb, "__wrapped__"):
        return
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    for module in modules:
        if mrrope.is_patched(module):
            mrrope.unpatch(module)


@pytest.fixture
def no_other_patched_models() -> None:
    collect_patched_models()


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Freeze the many objects of transformers, so that collections before every test skip them."""
    collect_patched_models()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def stock(no_other_patched_models: None) -> Any:
    """Llama's own function."""
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    assert not hasattr(modeling_llama.apply_rotary_pos_emb, "__wrapped__")
    return modeling_llama.apply_rotary_pos_emb


@pytest.fixture
def llama() -> Any:
    from tiny_models import tiny_model  # needs transformers

    return tiny_model("llama")


@pytest.fixture
def norm_inputs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs of torch's RMSNorm."""
    found: list[torch.Tensor] = []
    rms_norm = torch.nn.functional.rms_norm

    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(x)
        return rms_norm(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", noted)
    return found
