"""Installs a wheel, unchanged, beside each version of torch in a fresh environment, and runs tests there.

    python wheels/test_wheel.py dist/mrrope-0.1.0-cp311-cp311-manylinux_2_35_aarch64.whl 2.11.0 2.13.0 2.15.0 -- --quick

What follows -- is for pytest. An environment takes up to 6 GB and is deleted after its tests.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/python/ops",  # tables too
    "tests/python/hf",
    "tests/python/tools/test_build.py",
    "tests/python/tools/test_environment.py",
)


def run(*command: object, **variables: str) -> float:
    """Run a command in the checkout; return the seconds that it took."""
    start = time.perf_counter()
    subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ | variables, check=True)
    return time.perf_counter() - start


def test(wheel: Path, version: str, pytest_options: list[str]) -> str:
    """Test the wheel with a version of torch; return a line for the summary."""
    environment = ROOT / f".venv-wheel-torch{version}"
    run(sys.executable, "-m", "venv", "--clear", environment)
    programs = environment / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    try:
        torch_seconds = run(*pip, f"torch=={version}")
        wheel_seconds = run(*pip, wheel)  # with its dependencies: pip would replace a torch that does not fit
        run(*pip, "-r", "tests/requirements.txt")
        run(programs / "mrrope", "env")
        # One thread per process, as in the Makefile.
        distribute = ("--numprocesses", "2", "--dist", "loadfile")
        run(programs / "pytest", *distribute, *TESTS, *pytest_options, OMP_NUM_THREADS="1")
    finally:
        shutil.rmtree(environment)
    return f"torch {version}: passed; installed in {wheel_seconds:.1f} s, torch in {torch_seconds:.0f} s"


def main() -> None:
    """Test with one version of torch after the other, and print a summary."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("torch", nargs="+")
    options = parser.parse_args(arguments[:split])
    wheel = options.wheel.resolve(strict=True)
    lines = [test(wheel, version, arguments[split + 1 :]) for version in options.torch]
    print(f"{wheel.name}, Python {sys.version.split()[0]}", *lines, sep="\n")


if __name__ == "__main__":
    main()
