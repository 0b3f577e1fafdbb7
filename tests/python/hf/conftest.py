"""The model of the tests of scale="auto"."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def model(device: str) -> Iterator[Any]:
    """A stock model of three layers, on every device, which is the default one meanwhile."""
    from auto_scaled_models import tiny_llama  # needs transformers

    torch.set_default_device(device)
    yield tiny_llama()
    torch.set_default_device(None)
