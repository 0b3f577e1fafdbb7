"""Patched models where transformers uses the package kernels, which makes modules of the functions that apply RoPE.

Whether it does is decided when transformers is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from tiny_models import tiny_model, tokens
from transformers.integrations.hub_kernels import kernelize
from transformers.models.llama import modeling_llama
from transformers.utils import is_kernels_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_kernels_available(), reason="transformers finds no package kernels that it takes"),
]
IN_USE = os.environ["USE_HUB_KERNELS"] == "YES"
needs_kernels = pytest.mark.skipif(not IN_USE, reason="runs in the process that test_with_kernels_in_use starts")


@pytest.mark.skipif(IN_USE, reason="is the process that this test starts")
def test_with_kernels_in_use() -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", here, here.with_name("test_patch_families.py")]
    environment = os.environ | {"USE_HUB_KERNELS": "YES", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=here.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "families are fused" in run.stdout


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(tokens(2, 24)).logits


@needs_kernels
@pytest.mark.parametrize("first", ["kernelize", "patch"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kernelized_models(family: str, first: str, recwarn: pytest.WarningsRecorder) -> None:
    model, plain = tiny_model(family), logits(tiny_model(family))
    reference = mrrope.patch(tiny_model(family), "mrrope_pro", scale=4.0)
    steps: dict[str, Any] = {"kernelize": kernelize, "patch": lambda m: mrrope.patch(m, "mrrope_pro", scale=4.0)}
    for step in sorted(steps, reverse=first == "patch"):
        steps[step](model)
    assert not [warning for warning in recwarn if "not the fused op" in str(warning.message)]
    assert relative(logits(model), logits(reference)) < tolerance(reference, logits)
    mrrope.unpatch(reference)  # the family's function stays wrapped until the last patched model is collected
    assert torch.equal(logits(mrrope.unpatch(model)), plain)


@needs_kernels
def test_a_kernel_for_another_device_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set another forward on the instance, as kernelize does with a kernel from the Hub."""

    def forward(self: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        raise AssertionError("takes tensors of a GPU")

    function = modeling_llama.apply_rotary_pos_emb
    assert isinstance(function, nn.Module)
    model = tiny_model("llama")
    want = logits(mrrope.patch(model, "mrrope_pro", scale=4.0))
    mrrope.unpatch(model)
    monkeypatch.setattr(function, "forward", MethodType(forward, function))
    assert torch.equal(logits(mrrope.patch(model, "mrrope_pro", scale=4.0)), want)
    mrrope.unpatch(model)
    assert modeling_llama.apply_rotary_pos_emb is function


@needs_kernels
def test_auto() -> None:
    model = mrrope.patch(tiny_model("llama"), "mrrope_pro", scale="auto")
    plain = tiny_model("llama")
    assert relative(logits(model), logits(plain)) < tolerance(plain, logits)
