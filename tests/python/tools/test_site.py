"""The documentation site builds without warnings, and its API pages have every public name."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mrrope

ROOT = Path(__file__).parents[3]
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


def test_every_public_name_is_on_one_api_page() -> None:
    documented = [name for page in API_PAGES for name in re.findall(r"^::: mrrope\.(\w+)$", page.read_text(), re.M)]
    assert sorted(documented) == sorted(mrrope.__all__)


def test_the_overview_lists_every_public_name() -> None:
    rows = re.findall(r"^\| \[.*$", (ROOT / "docs" / "api" / "index.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted({*mrrope.__all__} - {"__version__"})


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="docs/requirements.txt is not installed",
)
def test_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    assert "a longer context than the model was trained on" in (tmp_path / "site" / "index.html").read_text()
    assert "rotary_dim" in (tmp_path / "site" / "api" / "tables" / "index.html").read_text()
    assert (tmp_path / "site" / "benchmarks" / "results" / "rotary_cuda.png").exists()
    pages = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    # Pages render without the network: no script, style or picture from elsewhere, and no diagram that needs one.
    assert re.findall(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="https?://', pages) == []
    assert 'class="mermaid"' not in pages


def test_navigation_has_five_groups() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert len(re.findall(r"^  - ", navigation, re.MULTILINE)) == 5
