"""How pictures look: one colour and dash for a method, in all of them, that every eye can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Colours by Okabe and Ito, told apart by colour-blind eyes too; dashes help in print.
STYLES: dict[str, tuple[str, str]] = {
    "rope": ("#000000", ":"),
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
}


def line(method: str) -> dict[str, Any]:
    """What to plot a method with; one without a style of its own gets matplotlib's next colour."""
    if method not in STYLES:
        return {"label": method}
    colour, dashes = STYLES[method]
    return {"label": method, "color": colour, "linestyle": dashes}


def thousands(tokens: int) -> str:
    """131072 as 128K."""
    return f"{tokens / 1024:g}K"


def save(figure: Any, path: Path) -> Path:
    """Writes a picture, small: few colours are in it."""
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    return path
