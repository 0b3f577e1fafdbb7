"""Run every test that needs a GPU, and write the record of it: make gpu-test.

Parts: the C++ tests of CUDA kernels, the Python tests that use a GPU, the fuzzer, and small C++ tests under
compute-sanitizer, which come last and get the time that is left. What would make a part fail as a whole, such as a
package that does not load, is found before the first starts. The record has the commit and a hash of the sources, so
that an old one can be told from one of today's kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent / "python" / "support"))
from gpu_record import RECORD, git, sources_hash

# Where commands run: in the checkout's own folder Python would import its sources, which need not be compiled.
TESTS = Path(__file__).resolve().parent

Part = dict[str, Any]
# In this order: out-of-bounds accesses and races of every test come before what is rarer.
SANITIZERS = "memcheck", "racecheck", "synccheck", "initcheck"
# Every access is checked, which is up to 100 times slower: left out are random cases and gigabytes.
NOT_SANITIZED = "*RandomCases*:*TwoToThe31*:*RandomCallsAndGradients*"
# Each test is a process, so that a slow one costs no other its result.
SANITIZED_TEST_SECONDS = 120
SANITIZER_SECONDS = 600  # of all runs; what is not finished by then is recorded as such
SANITIZER_PROCESSES = 12
FUZZ_SECONDS = 120
CTEST_JOBS = 4  # more contend for GPU memory: several tests take gigabytes
# On an H200 with 16 cores the C++ tests take 93 to 165 s, and the Python tests of the ops alone 109 to 227 s.
CPP_SECONDS, PYTHON_SECONDS, FUZZER_SECONDS = 240, 660, FUZZ_SECONDS + 60
STOP_SECONDS = 30  # for pytest to write its report of what has run
LIMIT_SECONDS = 20 * 60  # of all parts

# Without these, tests fail or are skipped. transformers imports its modules when they are used, so that a package
# without which it is of no use shows in modeling code only.
NEEDED = (
    *("mrrope", "pytest", "xdist", "hypothesis", "numpy", "transformers", "transformers.modeling_utils"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
)
# Tests that need one of these are skipped without it. An incomplete one may keep transformers from loading.
USED = "accelerate", "gguf", "kernels", "liger_kernel.transformers", "matplotlib", "mpmath", "optimum.quanto", "peft"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--build", type=Path, required=True, help="CMake's build folder, with the C++ tests")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    result.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 5), help="pytest's processes")
    result.add_argument("--commit", help="the commit of these sources, where this is no checkout")
    result.add_argument("--output", type=Path, default=RECORD)
    return result


def import_problem(module: str) -> str | None:
    """Return why a module cannot be imported, by the first cause, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # incomplete packages raise what they like
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        missing = [cause.name for cause in causes if isinstance(cause, ModuleNotFoundError) and cause.name]
        why = f"the package {missing[-1]} is missing" if missing else f"{type(causes[-1]).__name__}: {causes[-1]}"
        return f"{module} cannot be imported: {why}"
    return None


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def problems(options: argparse.Namespace) -> list[str]:
    """Return what would make parts fail as a whole."""
    found = []
    tools = {"cpp": "ctest", "sanitizers": "compute-sanitizer"}
    for part, tool in tools.items():
        if part not in options.parts:
            continue
        if shutil.which(tool) is None:
            found.append(f"{tool} must be on the path")
        if not cuda_tests(options):
            found.append(f"there are no tests in {options.build}")
    if not {"python", "fuzz"}.isdisjoint(options.parts):
        os.environ.setdefault("USE_HUB_KERNELS", "NO")  # as the tests do, before transformers is imported
        modules = [*NEEDED, *filter(is_installed, USED)]
        found += [problem for module in modules if (problem := import_problem(module)) is not None]
        absent = [module for module in USED if not is_installed(module)]
        if absent:
            print(f"not installed, so that tests are skipped: {', '.join(absent)}", flush=True)
    if import_problem("mrrope") is None:
        from markers import NO_CUDA

        if NO_CUDA is not None:
            found.append(NO_CUDA)
    return list(dict.fromkeys(found))


def run_for(
    seconds: float, command: Sequence[str | Path], *, stop_seconds: float = 0.0, **options: Any
) -> tuple[int | None, str]:
    """Run a command. Return its exit status and what it wrote; None where it took longer.

    It is killed then, and with it what it has started: compute-sanitizer's test, pytest's workers. Before that it has
    ``stop_seconds`` to end by itself.
    """
    start = {"stderr": subprocess.STDOUT, "text": True, "start_new_session": True} | options
    with subprocess.Popen(command, **start) as process:
        try:
            output, _ = process.communicate(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            if stop_seconds > 0:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(stop_seconds)
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output or ""
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output or ""


def junit_part(report: Path) -> Part:
    """Count the tests of a JUnit report."""
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failures": ["no report was written"]}
    # Tests that an interrupt ended have no name.
    cases = [case for case in ElementTree.parse(report).getroot().iter("testcase") if case.get("name")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if len(cases) == len(skipped):
        return {"passed": 0, "skipped": len(skipped), "failures": ["no test ran"]}
    names = [".".join(filter(None, (case.get("classname"), case.get("name")))) for case in failed]
    return {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failures": names}


def checked(part: Part, status: int | None) -> Part:
    """Add a failure where the command failed, but none of its tests did, or did not finish."""
    if status is None:
        part["failures"].append("not finished in time")
    elif status != 0 and not part["failures"]:
        part["failures"] = [f"exit status {status}"]
    return part


def cpp_tests(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "ctest.xml"
    command = ["ctest", "--test-dir", str(options.build), "--tests-regex", "_cuda[.]", "--parallel", str(CTEST_JOBS)]
    status, _ = run_for(CPP_SECONDS, [*command, "--output-on-failure", "--output-junit", str(report)])
    return checked(junit_part(report), status)


def python_tests(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "--gpu", "--numprocesses", str(options.workers), "--quiet", "python"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command.append(f"--junitxml={report}")
    status, _ = run_for(PYTHON_SECONDS, command, stop_seconds=STOP_SECONDS, cwd=TESTS, env=environment)
    return checked(junit_part(report), status)


def cuda_tests(options: argparse.Namespace) -> list[Path]:
    return sorted((options.build / "tests" / "cpp").glob("*_cuda_test"))


def cases_of(test: Path) -> list[str]:
    """Return the names of a test's cases that are sanitized."""
    _, output = run_for(60, [test, "--gtest_list_tests", f"--gtest_filter=-{NOT_SANITIZED}"], stdout=subprocess.PIPE)
    cases, suite = [], ""
    for line in output.splitlines():
        name = line.partition("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  "):
            cases.append(suite + name.strip())
    return cases


def sanitizer_run(tool: str, test: Path, case: str, deadline: float) -> tuple[str, float]:
    """Return "passed", "not finished" or the tool's last lines, and the seconds of the run."""
    start = time.monotonic()
    if start >= deadline:
        return "not finished", 0.0
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", test, f"--gtest_filter={case}"]
    seconds = min(SANITIZED_TEST_SECONDS, deadline - start)
    status, output = run_for(seconds, command, stdout=subprocess.PIPE)
    if status == 0 and "Running 1 test " in output:
        result = "passed"
    elif status is None and not has_error(output):
        result = "not finished"
    else:
        result = "\n".join(output.splitlines()[-20:]) or f"exit status {status}"
    return result, time.monotonic() - start


def has_error(output: str) -> bool:
    """Return whether compute-sanitizer has found something, or the test has failed."""
    reports = (line for line in output.splitlines() if line.startswith("========= "))
    return "[  FAILED  ]" in output or any("COMPUTE-SANITIZER" not in x and "Warning" not in x for x in reports)


def sanitizers(options: argparse.Namespace, _folder: Path) -> Part:
    deadline = min(time.monotonic() + SANITIZER_SECONDS, options.deadline)
    cases = [(test, case) for test in cuda_tests(options) for case in cases_of(test)]
    runs = [(tool, test, case, deadline) for tool in SANITIZERS for test, case in cases]
    part: Part = {"passed": 0, "tools": {tool: {"passed": 0, "of": len(cases)} for tool in SANITIZERS}}
    unfinished, failures, times = [], [], {}
    with ThreadPoolExecutor(SANITIZER_PROCESSES) as pool:
        results = pool.map(sanitizer_run, *zip(*runs, strict=True)) if runs else []
        for (tool, test, case, _), (result, seconds) in zip(runs, results, strict=True):
            name = f"{tool} {test.name} {case}"
            times[name] = round(seconds, 1)
            if result == "passed":
                part["passed"] += 1
                part["tools"][tool]["passed"] += 1
            elif result == "not finished":
                unfinished.append(name)
            else:
                failures.append(name)
            if result != "not finished" or seconds > 0:
                print(f"{name}: {result}, {seconds:.1f} s", flush=True)
    if not cases:
        failures.append(f"no tests in {options.build}")
    part["slowest"] = dict(sorted(times.items(), key=lambda item: -item[1])[:10])
    return part | {"not_finished": unfinished, "failures": failures}


def fuzzer(options: argparse.Namespace, folder: Path) -> Part:
    report = folder / "fuzz.json"
    command = [sys.executable, "-m", "fuzz", "--device", "cuda", "--seconds", str(FUZZ_SECONDS), "--processes", "4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), "python/support"])}
    status, _ = run_for(FUZZER_SECONDS, [*command, "--output", str(report)], cwd=TESTS, env=environment)
    if not report.exists():
        return checked({"failures": []}, status)
    found = json.loads(report.read_text())
    kinds = [kind for kind in ("ops", "models") if kind in found]
    failures = [str(find) for kind in kinds for find in found[kind]["finds"]]
    return {"seed": found["seed"], **{kind: found[kind]["cases"] for kind in kinds}, "failures": failures}


PARTS: dict[str, Callable[[argparse.Namespace, Path], Part]] = {
    "cpp": cpp_tests,
    "python": python_tests,
    "fuzz": fuzzer,
    "sanitizers": sanitizers,
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
    # A job in the background may start with interrupts ignored, and pytest, which is to end by one, with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parser().parse_args()
    options.build = options.build.resolve()
    options.deadline = time.monotonic() + LIMIT_SECONDS
    found = problems(options)
    if found:
        print("gpu_tests.py cannot run:", *found, sep="\n  ", file=sys.stderr)
        return 1
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
