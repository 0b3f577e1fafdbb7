"""The output files of a calibration."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from mrrope.reporting.output import with_ending
from mrrope.table_lookup import ModelTables


@dataclass(frozen=True)
class Files:
    """The output files of a calibration."""

    stem: Path

    def named(self, ending: str) -> Path:
        """``NAME.ending``."""
        return with_ending(self.stem, ending)

    @property
    def table(self) -> Path:
        return self.named("table.json")

    def written(self) -> list[Path]:
        """All existing output files."""
        return sorted(self.stem.parent.glob(f"{glob.escape(self.stem.name)}.*"))

    def save_table(self, table: ModelTables) -> None:
        """Write the table atomically: a kill leaves either the old or the new one."""
        new = self.named("table.json.new")
        table.save(new)
        new.replace(self.table)
