"""Run every test that needs a GPU, and write the record of it: make gpu-test.

Parts: the C++ tests of CUDA kernels, the Python tests that use a GPU, small C++ tests under compute-sanitizer, and the
fuzzer. The record has the commit and a hash of the sources, so that an old one can be told from one of today's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent / "python" / "support"))
from gpu_record import RECORD, git, sources_hash

# Where commands run: in the checkout's own folder Python would import its sources, which need not be compiled.
TESTS = Path(__file__).resolve().parent

Part = dict[str, Any]
SANITIZERS = "memcheck", "racecheck", "initcheck", "synccheck"
# Every access is checked, which is up to 100 times slower: left out are random cases and gigabytes.
NOT_SANITIZED = "*RandomCases*:*TwoToThe31*:*RandomCallsAndGradients*"
SANITIZER_SECONDS = 600  # of all runs; what is not finished by then is recorded as such
SANITIZER_PROCESSES = 12
FUZZ_SECONDS = 120
CTEST_JOBS = 4  # more contend for GPU memory: several tests take gigabytes


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--build", type=Path, required=True, help="CMake's build folder, with the C++ tests")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    result.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 5), help="pytest's processes")
    result.add_argument("--commit", help="the commit of these sources, where this is no checkout")
    result.add_argument("--output", type=Path, default=RECORD)
    return result


def junit_part(report: Path) -> Part:
    """Count the tests of a JUnit report."""
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failures": ["no report was written"]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if len(cases) == len(skipped):
        return {"passed": 0, "skipped": len(skipped), "failures": ["no test ran"]}
    names = [".".join(filter(None, (case.get("classname"), case.get("name")))) for case in failed]
    return {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failures": names}


def checked(part: Part, status: int) -> Part:
    """Add a failure where the command failed, but none of its tests did."""
    if status != 0 and not part["failures"]:
        part["failures"] = [f"exit status {status}"]
    return part


def cpp_tests(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "ctest.xml"
    command = ["ctest", "--test-dir", str(options.build), "--tests-regex", "_cuda[.]", "--parallel", str(CTEST_JOBS)]
    run = subprocess.run([*command, "--output-on-failure", "--output-junit", str(report)], check=False)
    return checked(junit_part(report), run.returncode)


def python_tests(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "--gpu", "--numprocesses", str(options.workers), "--quiet", "python"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, f"--junitxml={report}"], cwd=TESTS, env=environment, check=False)
    return checked(junit_part(report), run.returncode)


def sanitizer_run(tool: str, test: Path, deadline: float) -> str:
    """Return "passed", "not finished", or the tool's last lines."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(test)]
    try:
        run = subprocess.run(
            [*command, f"--gtest_filter=-{NOT_SANITIZED}"],
            capture_output=True,
            text=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "not finished"
    return "passed" if run.returncode == 0 else "\n".join(run.stdout.splitlines()[-20:])


def sanitizers(options: argparse.Namespace, _folder: Path) -> Part:
    tests = sorted((options.build / "tests" / "cpp").glob("*_cuda_test"))
    if not tests:
        return {"passed": 0, "not_finished": [], "failures": [f"no tests in {options.build}"]}
    deadline = time.monotonic() + SANITIZER_SECONDS
    runs = [(tool, test, deadline) for tool in SANITIZERS for test in tests]
    results = {}
    with ThreadPoolExecutor(SANITIZER_PROCESSES) as pool:
        for (tool, test, _), result in zip(runs, pool.map(sanitizer_run, *zip(*runs, strict=True)), strict=True):
            results[f"{tool} {test.name}"] = result
            print(f"{tool} {test.name}: {result}", flush=True)
    unfinished = [name for name, result in results.items() if result == "not finished"]
    failures = [name for name, result in results.items() if result not in ("passed", "not finished")]
    return {"passed": len(runs) - len(unfinished) - len(failures), "not_finished": unfinished, "failures": failures}


def fuzzer(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "fuzz.json"
    command = [sys.executable, "-m", "fuzz", "--device", "cuda", "--seconds", str(FUZZ_SECONDS), "--processes", "4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), "python/support"])}
    run = subprocess.run([*command, "--output", str(report)], cwd=TESTS, env=environment, check=False)
    if not report.exists():
        return {"failures": [f"exit status {run.returncode}"]}
    found = json.loads(report.read_text())
    kinds = [kind for kind in ("ops", "models") if kind in found]
    failures = [str(find) for kind in kinds for find in found[kind]["finds"]]
    return {"seed": found["seed"], **{kind: found[kind]["cases"] for kind in kinds}, "failures": failures}


PARTS: dict[str, Callable[[argparse.Namespace, Path], Part]] = {
    "cpp": cpp_tests,
    "python": python_tests,
    "sanitizers": sanitizers,
    "fuzz": fuzzer,
}


def machine() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}"


def earlier_parts(output: Path, sources: str) -> dict[str, Part]:
    """Return the parts that an earlier run recorded for the same sources."""
    if not output.exists():
        return {}
    record = json.loads(output.read_text())
    return record["parts"] if record["sources"] == sources else {}


def main() -> int:
    """Run the command line."""
    options = parser().parse_args()
    options.build = options.build.resolve()
    sources = sources_hash()
    parts = earlier_parts(options.output, sources)
    for name in options.parts:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            parts[name] = PARTS[name](options, Path(folder))
        parts[name]["seconds"] = round(time.monotonic() - start)
        record = {
            "commit": options.commit or git("rev-parse", "HEAD") or "unknown",
            "sources": sources,
            "machine": machine(),
            "parts": parts,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    for name in options.parts:
        print(f"{name}: {parts[name]}")
    return 1 if any(parts[name]["failures"] for name in options.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
