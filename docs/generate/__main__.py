"""Write the tables and the pictures of README.md and docs/ from benchmarks/results/ and docs/figures/.

    python docs/generate [--check] [--pictures]

A table stands between <!-- table NAME --> and <!-- end -->; everything between the two markers is replaced. README's
picture and the demo's are drawn where their numbers or words changed; --pictures draws every picture again whose
numbers are stored: these two, those of docs/theory.md, and that of `mrrope bench`. With --check nothing is written, and
the exit status is 1 where a page or one of the two pictures is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys

import context_figure
import evaluation_tables
import speed_tables
import study_tables
import theory_tables
from measurements import FIGURES, RESULTS, ROOT, figure_data, result

from mrrope.benchmark import report
from mrrope.theory import drawing

TABLES = {
    **context_figure.TABLES,
    **speed_tables.TABLES,
    **study_tables.TABLES,
    **evaluation_tables.TABLES,
    **theory_tables.TABLES,
}
PICTURES = (context_figure.PICTURE, evaluation_tables.DEMO)
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if "<!-- table " in page.read_text()]


def with_current_tables(text: str) -> str:
    """Return a page with its tables rewritten from the results."""

    def write(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *TABLES[match[2]](), "", match[3]])

    text, written = re.subn(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", write, text, flags=re.DOTALL)
    if not text.count("<!-- table ") == text.count("<!-- end -->") == written:
        raise ValueError("every <!-- table NAME --> must have its <!-- end -->")
    return text


def draw_pictures() -> None:
    """Draw every picture whose numbers are stored."""
    for picture in PICTURES:
        picture.draw()
    drawing.draw(figure_data("theory.json"), FIGURES / "theory")
    bench = result("rotary_cuda.json")
    report.plot(bench["rows"], bench["machine"], RESULTS / "rotary_cuda.png")


def main() -> int:
    """Write the pages and the pictures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="report pages that are out of date and write nothing")
    parser.add_argument("--pictures", action="store_true", help="draw all pictures again whose numbers are stored")
    options = parser.parse_args()
    stale = [page for page in PAGES if with_current_tables(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'is out of date' if options.check else 'is rewritten'}")
        if not options.check:
            page.write_text(with_current_tables(page.read_text()))
    stale_pictures = [picture for picture in PICTURES if not picture.is_current()]
    for picture in stale_pictures:
        print(f"{picture.path.relative_to(ROOT)} {'is out of date' if options.check else 'is drawn again'}")
        if not options.check:
            picture.draw()
    if options.pictures and not options.check:
        draw_pictures()
    return 1 if options.check and (stale or stale_pictures) else 0


if __name__ == "__main__":
    sys.exit(main())
