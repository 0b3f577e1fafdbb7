"""tests/gpu_tests.py without a GPU: what it refuses to start with, and how it runs commands and sanitizers."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_tests
import pytest
from gpu_record import PARTS

SCRIPT = Path(gpu_tests.__file__)


def test_the_parts_are_those_that_a_record_is_checked_for():
    assert tuple(gpu_tests.PARTS) == PARTS


@pytest.mark.slow
def test_an_incomplete_package_is_named_before_the_first_part(tmp_path):
    """kernels without kernels-data keeps transformers from loading models, though not from being imported."""
    pytest.importorskip("transformers")
    pytest.importorskip("kernels_data")
    (tmp_path / "kernels_data.py").write_text("raise ModuleNotFoundError('no', name='kernels_data')\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    record = tmp_path / "record.json"
    command = [sys.executable, str(SCRIPT), "--build", str(tmp_path), "--parts", "python", "--output", str(record)]
    run = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    for module in ("transformers.modeling_utils", "transformers.models.llama.modeling_llama", "kernels"):
        assert f"{module} cannot be imported: the package kernels_data is missing" in run.stderr
    assert "== python" not in run.stdout
    assert not record.exists()


def test_what_is_missing_for_the_parts_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    options = argparse.Namespace(build=tmp_path, parts=["cpp", "sanitizers"])
    found = gpu_tests.problems(options)
    assert "ctest must be on the path" in found
    assert "compute-sanitizer must be on the path" in found
    assert found.count(f"there are no tests in {tmp_path}") == 1


def test_what_a_command_starts_ends_with_it():
    """The pipe is open until both are gone."""
    start = time.monotonic()
    status, output = gpu_tests.run_for(1, ["sh", "-c", "echo begun; sleep 100 & wait"], stdout=subprocess.PIPE)
    assert (status, output) == (None, "begun\n")
    assert time.monotonic() - start < 50


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As main does: tests in the background may have interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_command_may_end_by_itself():
    """As pytest does, which writes its report when it is interrupted."""
    wait = "trap 'echo report; exit 2' INT; echo begun; while :; do sleep 0.1; done"
    status, output = gpu_tests.run_for(1, ["sh", "-c", wait], stop_seconds=60, stdout=subprocess.PIPE)
    assert (status, output) == (None, "begun\nreport\n")


def test_an_interrupted_test_did_not_pass(tmp_path):
    """pytest lists it without a name."""
    report = tmp_path / "pytest.xml"
    case = '<testcase classname="test_x" name="test_a[0]" time="0.102" />'
    report.write_text(f'<testsuites><testsuite name="pytest">{case}<testcase time="0.000" /></testsuite></testsuites>')
    part = gpu_tests.checked(gpu_tests.junit_part(report), None)
    assert part == {"passed": 1, "skipped": 0, "failures": ["not finished in time"]}


def write_script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


# Lists its cases as GoogleTest does, and runs one.
TEST = """case "$*" in
*--gtest_list_tests*) printf 'Rotary.\\n  Passes\\n  Fails/0  # GetParam() = 4\\n  IsSlow\\n  IsSlowAndWrong\\n';;
*Passes) echo '[==========] Running 1 test from 1 test suite.';;
*Fails/0) echo '[  FAILED  ] Rotary.Fails/0'; exit 1;;
*IsSlow) sleep 100;;
*IsSlowAndWrong) echo '========= Invalid __global__ read of size 4 bytes'; sleep 100;;
esac
"""
# Writes down what it is asked for, and runs the test.
SANITIZER = """echo '========= COMPUTE-SANITIZER'
echo "$2 ${6#*=}" >> "$(dirname "$0")/log"
exec "$5" "$6"
"""


def test_every_case_has_a_sanitizer_run_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "tests" / "cpp").mkdir(parents=True)
    write_script(tmp_path / "tests" / "cpp" / "rotary_cuda_test", TEST)
    write_script(tmp_path / "compute-sanitizer", SANITIZER)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_tests, "SANITIZED_TEST_SECONDS", 2)
    monkeypatch.setattr(gpu_tests, "SANITIZERS", ("memcheck", "racecheck"))
    options = argparse.Namespace(build=tmp_path, deadline=time.monotonic() + 600)
    part = gpu_tests.sanitizers(options, tmp_path)
    runs = {name: [f"{tool} rotary_cuda_test Rotary.{name}" for tool in gpu_tests.SANITIZERS]
            for name in ("Fails/0", "IsSlow", "IsSlowAndWrong")}  # fmt: skip
    assert part["passed"] == 2
    assert part["tools"] == {"memcheck": {"passed": 1, "of": 4}, "racecheck": {"passed": 1, "of": 4}}
    assert part["not_finished"] == runs["IsSlow"]
    assert sorted(part["failures"]) == sorted(runs["Fails/0"] + runs["IsSlowAndWrong"])
    assert set(part["slowest"]) >= {*runs["IsSlow"], *runs["IsSlowAndWrong"]}


def test_sanitizers_end_with_the_time_of_all_parts(tmp_path, monkeypatch):
    """Both processes have a slow case of the first tool then; no other run is started."""
    (tmp_path / "tests" / "cpp").mkdir(parents=True)
    write_script(tmp_path / "tests" / "cpp" / "rotary_cuda_test", TEST)
    write_script(tmp_path / "compute-sanitizer", SANITIZER)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_tests, "SANITIZERS", ("memcheck", "racecheck"))
    monkeypatch.setattr(gpu_tests, "SANITIZER_PROCESSES", 2)
    start = time.monotonic()
    part = gpu_tests.sanitizers(argparse.Namespace(build=tmp_path, deadline=start + 5), tmp_path)
    assert time.monotonic() - start < 50
    cases = ("Passes", "Fails/0", "IsSlow", "IsSlowAndWrong")
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(f"memcheck Rotary.{name}" for name in cases)
    unfinished = [f"racecheck rotary_cuda_test Rotary.{name}" for name in cases]
    assert part["not_finished"] == ["memcheck rotary_cuda_test Rotary.IsSlow", *unfinished]
