"""Linters have one version: that of tests/requirements.txt."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINTERS = ("clang-format", "mypy", "ruff")
PIN = re.compile(rf"\b({'|'.join(LINTERS)})==([\d.]+)")


def pins_in(file: str) -> dict[str, set[str]]:
    pins: dict[str, set[str]] = {}
    for name, version in PIN.findall((ROOT / file).read_text()):
        pins.setdefault(name, set()).add(version)
    return pins


@pytest.mark.parametrize(
    ("file", "linters"),
    [("pyproject.toml", LINTERS), (".pre-commit-config.yaml", ("clang-format", "ruff"))],
)
def test_linters_are_pinned_alike(file: str, linters: tuple[str, ...]) -> None:
    expected = pins_in("tests/requirements.txt")
    assert expected.keys() == set(LINTERS)
    assert pins_in(file) == {name: expected[name] for name in linters}
