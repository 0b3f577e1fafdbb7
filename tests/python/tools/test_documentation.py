"""The Python in README.md and docs/ runs as it stands there, and README's equivalent is one."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope
from mrrope.hf.patch import is_patched

pytest.importorskip("transformers")

from tiny_models import tiny_model, tokens

ROOT = Path(__file__).parents[3]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    document for document in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if PYTHON.search(document.read_text())
]

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def after_running(document: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The names that a document's code leaves, run from top to bottom with those that it takes for granted."""
    text = document.read_text()
    for block in PYTHON.finditer(text):
        # So that a traceback names the document's own lines.
        lines_above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_above + block[1], str(document), "exec"), names)
    return names


@pytest.fixture
def taken_for_granted(tmp_path: Path) -> dict[str, Any]:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    return {
        "torch": torch,
        "path": tmp_path,
        "model": model,
        "inputs": {"input_ids": tokens(1, 12)},
        "document": tokens(1, 2048)[0].tolist(),
        "q": torch.randn(2, 4, 12, 128),
        "k": torch.randn(2, 2, 12, 128),
        "q_weight": torch.randn(128),
        "k_weight": torch.randn(128),
        "positions": 8192 + torch.arange(12),
        "table": mrrope.frequency_table("rope", rotary_dim=128, base=1e4, original_max_position=2048),
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_the_code_runs(document: Path, taken_for_granted: dict[str, Any]) -> None:
    after_running(document, taken_for_granted)


def test_readme_does_what_it_says(taken_for_granted: dict[str, Any]) -> None:
    q, k, positions = (taken_for_granted[name] for name in ("q", "k", "positions"))
    names = after_running(ROOT / "README.md", taken_for_granted)
    assert is_patched(names["model"])
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    for found, want in zip((names["q"], names["k"]), names["rotary"](q, k, positions, names["table"]), strict=True):
        error = (found.double() - want.double()).norm() / want.double().norm()
        # Each is rounded once; the equivalent's angles, in float64, are off by far less.
        assert error < torch.finfo(torch.float32).eps


def test_the_guide_to_caches_does_what_it_says() -> None:
    example, equivalent, _ = (
        block[1] for block in PYTHON.finditer((ROOT / "docs" / "rotary-and-cache.md").read_text())
    )
    preparation, call = example.rsplit("mrrope.rotary_and_cache_", 1)
    results = []
    for code in (
        f"mrrope.rotary_and_cache_{call}",
        equivalent + "rotary_and_cache_" + call.replace(', layout="thd"', ""),
    ):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(preparation + code, names)
        results.append([names[name] for name in ("qkv", "key_cache", "value_cache")])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(x.abs().sum() > 0 for x in results[0])


def test_tables_are_those_of_the_results():
    """Mend with: python docs/generate"""
    check = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr
