"""Writes the tables in README.md and docs/ that come from benchmarks/results/ and docs/figures/.

    python docs/generate [--check]

A table stands between <!-- table NAME --> and <!-- end -->, a figure in a sentence between <!-- figure NAME --> and
<!-- -->; what is between is replaced, by what docs/generate/ makes of the results. With --check nothing is
written, and the exit status tells whether anything would have been.
"""

from __future__ import annotations

import argparse
import re
import sys

import evaluation_tables
import speed_tables
import study_tables
from measurements import ROOT

GUIDES = ("speed", "auto-scale", "qkv-rotary", "evaluation", "theory", "study", "calibration")
PAGES = ("README.md", *(f"docs/{guide}.md" for guide in GUIDES))
TABLES = {**speed_tables.TABLES, **study_tables.TABLES, **evaluation_tables.TABLES}
QUOTED = {**speed_tables.QUOTED, **study_tables.QUOTED, **evaluation_tables.QUOTED}


def filled(text: str) -> str:
    """A page with its tables and figures as the results are now."""

    def write(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *TABLES[match[2]](), "", match[3]])

    def quote(match: re.Match[str]) -> str:
        return f"{match[1]}{QUOTED[match[2]]()}{match[3]}"

    text, quoted = re.subn(r"(<!-- figure (\w+) -->)[^<]*(<!-- -->)", quote, text)
    if not text.count("<!-- figure ") == text.count("<!-- -->") == quoted:
        raise ValueError("every figure must have its end")

    text, written = re.subn(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", write, text, flags=re.DOTALL)
    if not written + quoted or not text.count("<!-- table ") == text.count("<!-- end -->") == written:
        raise ValueError("every page must have tables or figures, and every table its end")
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
