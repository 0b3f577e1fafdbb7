"""What docs/serving.md and its example say: keys, types and requests that mrrope and vLLM take."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markers import needs_cuda
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from mrrope.serving import mark, rope_request, scale_choice

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
README = (ROOT / "README.md").read_text()
OVERRIDES = re.findall(r"--hf-overrides '(.*?)'", PAGE + README)


def test_every_key_is_in_the_table() -> None:
    _, _, table = PAGE.partition("| key of `rope_parameters` |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert keys == {"rope_type", "factor", *mark.OWN_KEYS, *rope_request.OPTIONS}


def test_named_methods_are_known() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `rope_type` |"))
    types = set(re.findall(r"`(\w+)`", row.split("|")[2])) - {"method", "table"}
    assert types <= mark.OWN_TYPES
    assert mark.OWN_TYPES - types == {"rope"}  # which extends nothing


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_overrides_are_valid(overrides: str) -> None:
    parameters = json.loads(overrides)["rope_parameters"]
    assert mark.selects_mrrope(parameters)
    rope_request.RopeRequest.read(parameters)


def test_the_configuration_is_valid() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    config = json.loads(f"{{{block}}}")
    parameters = config["rope_parameters"]
    rope_request.RopeRequest.read(parameters)
    extended = parameters["original_max_position_embeddings"] * parameters["factor"]
    assert config["max_position_embeddings"] == extended


def test_the_python_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [ast.parse(block) for block in blocks]


def test_the_request_reaches_the_sampling_parameters() -> None:
    (body,) = re.findall(r"-d '(.*)'", PAGE)
    params = CompletionRequest(**json.loads(body)).to_sampling_params(256, {})
    assert params.extra_args == {scale_choice.SCALE_KEY: 4}


def test_the_default_reserve_is_stated() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `reserve` | with"))
    assert int(row.split("|")[3]) == rope_request.DEFAULT_RESERVE


@needs_cuda
def test_the_example_runs(tmp_path: Path) -> None:
    environment = os.environ | {"VLLM_PLUGINS": "mrrope"}
    command = [sys.executable, ROOT / "examples" / "serve_with_vllm.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    # 16 + 16 and 64 + 16 tokens at scale 1, 128 + 16 at 2, 384 + 16 at 4, and the one that names 4.
    assert "requests by scale: {'1': 2, '2': 1, '4': 2}" in run.stdout
