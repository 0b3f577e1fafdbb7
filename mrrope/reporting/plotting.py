"""Plot style: every method has one colour and dash pattern in all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrrope.reporting.optional_packages import needs

# Okabe-Ito colours, which are safe for colour-blind readers; dashes distinguish lines in black-and-white print.
STYLES: dict[str, tuple[str, str]] = {
    "rope": ("#000000", ":"),
    "truncated": ("#CC3311", "-."),
    "pi": ("#999999", "-."),
    "ntk": ("#56B4E9", "-."),
    "yarn": ("#E69F00", "--"),
    "yarn_ratio": ("#D55E00", (0, (6, 1.5, 1, 1.5, 1, 1.5))),  # type: ignore[dict-item]
    "mrrope_uni": ("#009E73", "-"),
    "mrrope_pro": ("#0072B2", "-"),
    "mrrope_pow 0.5": ("#009E73", "--"),
    "mrrope_pow 2": ("#0072B2", "--"),
    "su": ("#882255", "-."),
    "calibrated": ("#CC79A7", "-"),
    "evolved": ("#CC79A7", "--"),
    # Rows of the study of table sets; `shipped` is the calibrated table of its scale.
    "shipped": ("#CC79A7", "-"),
    "layer_search": ("#999933", "-."),
    "model": ("#56B4E9", "-"),
    "layer": ("#332288", "-"),
    "head": ("#AA4499", "-"),
    "head, all pairs": ("#AA4499", "--"),
    "ladder": ("#000000", "-"),
}


def line(method: str) -> dict[str, Any]:
    """Keyword arguments for ``axes.plot``; a method without a style gets matplotlib's next colour."""
    if method not in STYLES:
        return {"label": method}
    colour, dashes = STYLES[method]
    return {"label": method, "color": colour, "linestyle": dashes}


def thousands(tokens: int) -> str:
    """Format a token count in units of 1024: 131072 is 128K."""
    return f"{tokens / 1024:g}K"


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure."""
    with needs("matplotlib"):
        from matplotlib.figure import Figure
    return Figure(layout="constrained", **options)


def save(figure: Any, path: Path, description: str | None = None) -> Path:
    """Write a PNG, optimized for size; its metadata hold the description."""
    figure.savefig(path, dpi=110, metadata={"Description": description}, pil_kwargs={"optimize": True})
    return path
