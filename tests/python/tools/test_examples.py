"""Every Python example runs and prints what it states; the C++ ones are the ctests consumer.*.

``serve_with_vllm`` runs in tests/vllm/test_serving_page.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mrrope

EXAMPLES = Path(__file__).parents[3] / "examples"
# What the last line of each contains.
EXPECTED = {
    "calibrate_table": "256 tokens read",
    "generate_past_native_length": "short prompt as unpatched: True",
    "paged_decode": "[45, 13] tokens in [3, 1] blocks",
}
NEEDS = {
    "calibrate_table": ("transformers", "matplotlib", "tqdm"),
    "generate_past_native_length": ("transformers",),
}


def test_every_example_is_tested_and_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | {"serve_with_vllm"}
    page = (EXAMPLES / "README.md").read_text()
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("cpp/*.cpp")):
        assert f"`examples/{path.relative_to(EXAMPLES).as_posix()}`" in page


@pytest.mark.parametrize("name", EXPECTED)
def test_example_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    # From another folder: the imported package is the one under test, wherever it is installed.
    paths = [str(Path(mrrope.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert EXPECTED[name] in run.stdout.strip().splitlines()[-1]
