"""Writes the tables in README.md and docs/ that come from benchmarks/results/.

    python benchmarks/tables.py [--check]

A table stands between <!-- table NAME --> and <!-- end -->; what is between is replaced. With --check nothing is
written, and the exit status tells whether anything would have been.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/speed.md", "docs/following.md")

Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def microseconds(seconds: float) -> str:
    """Three digits, and no more of large numbers."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def with_error(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return ""
    return f"{microseconds(row['seconds'][name])} · {row['errors'][name]:.1e}".replace("e-0", "e-")


def as_ratio(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return "fails" if name in row.get("failures", {}) else ""
    return f"{row['seconds'][name] / row['seconds']['copy']:.2f}"


def rotary() -> list[str]:
    """The rows that people ask for first."""
    others = {"Liger": "liger_kernel", "FlashInfer": "flashinfer", "transformers, compiled": "transformers compiled"}
    others["transformers"] = "transformers eager"
    wanted = [f"{tokens} x 32/8" for tokens in (1, 64, 256, 1024, 8192, 131072)]
    measured = {row["name"]: row for row in rows_of("rotary_cuda.json")}
    rows = [measured[name] for name in (*wanted, "131072 x 4/1", "8192 x 32/8, float32")]
    return table(
        ["tokens x q/k heads", "copy of the bytes", "**mrrope**", *others],
        [
            [row["name"], microseconds(row["seconds"]["copy"]), f"**{with_error(row, 'mrrope')}**"]
            + [with_error(row, name) for name in others.values()]
            for row in rows
        ],
    )


def rotary_ratios() -> list[str]:
    """All rows, as so many copies."""
    rows = rows_of("rotary_cuda.json")
    names = [name for name in dict.fromkeys(name for row in rows for name in row["seconds"]) if name != "copy"]
    return table(
        ["tokens x q/k heads", "copy, us", *names],
        [[row["name"], microseconds(row["seconds"]["copy"]), *(as_ratio(row, name) for name in names)] for row in rows],
    )


def host() -> list[str]:
    """What a call costs in Python and C++."""
    seconds = json.loads((RESULTS / "rotary_cuda.json").read_text())["host_seconds"]
    return table(list(seconds), [[microseconds(value) for value in seconds.values()]])


def cache() -> list[str]:
    """Rotary and the cache's write in one launch."""
    names = ("rotary_and_cache_", "rotary_, compiled scatter", "rotary_, scatter")
    return table(
        ["tokens, cache", "copy", *(f"`{names[0]}`", *names[1:])],
        [
            [
                row["name"].replace("1 tokens", "1 token"),
                *(microseconds(row["seconds"][name]) for name in ("copy", *names)),
            ]
            for row in rows_of("cache_cuda.json")
        ],
    )


def norm() -> list[str]:
    """Norms and rotary in one launch."""
    names = ("copy", "mrrope", "mrrope in place", "apart", "transformers")
    return table(
        ["tokens x q/k heads, norm over", *names],
        [
            [row["name"].replace("_", " ").replace(" bfloat16", "")]
            + [microseconds(row["seconds"][name]) if name in row["seconds"] else "" for name in names]
            for row in rows_of("qk_norm_cuda.json")
        ],
    )


def model() -> list[str]:
    """A patched model beside the stock one."""
    return table(
        ["", "stock, ms", "patched, ms", "patched / stock"],
        [
            [
                row["name"],
                *(f"{row['seconds'][kind] * 1e3:.2f}" for kind in ("stock", "patched")),
                f"{row['ratio']:.3f}",
            ]
            for row in rows_of("model_cuda.json")
        ],
    )


def rescale() -> list[str]:
    """A cache turned."""
    return table(
        ["cached tokens", "copy of its keys", "turning them", "asking, with nothing to turn"],
        [
            [str(row["tokens"])]
            + [f"{microseconds(row['seconds'][what])} us" for what in ("copy", "turn", "nothing to turn")]
            for row in rows_of("rescale_cuda.json")
        ],
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (rotary, rotary_ratios, host, cache, norm, model, rescale)
}


def filled(text: str) -> str:
    """A page with its tables as the results are now."""

    def write(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *TABLES[match[2]](), "", match[3]])

    text, written = re.subn(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", write, text, flags=re.DOTALL)
    if not written or not text.count("<!-- table ") == text.count("<!-- end -->") == written:
        raise ValueError("every page must have tables, and every table its end")
    return text


def main() -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell whether a page is out of date")
    options = parser.parse_args()
    stale = [page for page in PAGES if filled((ROOT / page).read_text()) != (ROOT / page).read_text()]
    for page in stale:
        print(f"{page} {'is out of date' if options.check else 'is written anew'}")
        if not options.check:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
