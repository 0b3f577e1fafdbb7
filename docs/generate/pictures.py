"""Pictures that hold a digest of what they show, by which a check finds those that are out of date."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrrope.reporting import plotting


@dataclass(frozen=True)
class Picture:
    """A PNG that is drawn from stored numbers."""

    path: Path
    data: Callable[[], Any]
    """Returns the numbers."""
    figure: Callable[[], Any]
    """Returns the matplotlib figure."""

    def is_current(self, path: Path | None = None) -> bool:
        """Whether a file, by default the picture's own, has today's numbers and words."""
        path = path or self.path
        return path.exists() and self._digest(self.figure()).encode() in path.read_bytes()

    def draw(self, path: Path | None = None) -> None:
        """Write the PNG, by default to the picture's own path."""
        figure = self.figure()
        plotting.save(figure, path or self.path, self._digest(figure))

    def _digest(self, figure: Any) -> str:
        from matplotlib.text import Text

        words = sorted({text.get_text() for text in figure.findobj(Text)})
        return hashlib.sha256(json.dumps([self.data(), words]).encode()).hexdigest()
