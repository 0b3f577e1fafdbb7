"""The output files of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mrrope.evaluation.evaluate import PERPLEXITY
from mrrope.reporting.output import with_ending
from mrrope.tables.lookup import ModelTables


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

    def written(self, *, by_gradient: bool, with_sweep: bool) -> list[Path]:
        """The output files of a finished run."""
        endings = ["table.json", "json", f"{PERPLEXITY}.png", "journal"]
        endings += ["state.pt"] if by_gradient else []
        endings += ["sweep.png"] if with_sweep else []
        return [self.named(ending) for ending in endings]

    def save_table(self, table: ModelTables) -> None:
        """Write the table atomically: a kill leaves either the old or the new one."""
        new = self.named("table.json.new")
        table.save(new)
        new.replace(self.table)
