"""MkDocs hooks: bring pages and pictures from outside docs/ to the site.

README.md is the home page; CONTRIBUTING.md, CHANGELOG.md and examples/README.md are pages, too. Pictures of
benchmarks/results/ keep their path. Links between pages are rewritten; links to other files of the repository lead to
GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""Path in the repository -> path on the site."""
REPOSITORY_PATHS = {site: repository for repository, site in PAGES.items()}
SPHINX_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")
RELATIVE_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add what lies outside docs/."""
    for repository, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / repository).read_text()))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        site = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, site, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files, **_: Any) -> str:
    """Rewrite relative links of the repository to those of the site."""
    site = page.file.src_uri
    repository = REPOSITORY_PATHS.get(site, f"docs/{site}")

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(repository), match[2]))
        on_site = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is None:
            return f"{match[1]}{config.repo_url}/blob/main/{target}"
        return match[1] + posixpath.relpath(on_site, posixpath.dirname(site) or ".")

    return RELATIVE_LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the Sphinx roles of docstrings, which Markdown shows as they are."""
    return SPHINX_ROLE.sub("", html)
