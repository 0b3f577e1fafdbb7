"""The output files of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrrope.evaluation.evaluate import PERPLEXITY
from mrrope.reporting.output import with_ending
from mrrope.tables import json as table_json
from mrrope.tables.lookup import ModelTables


@dataclass(frozen=True)
class Files:
    """The output files of a calibration."""

    stem: Path
    searched_on: Mapping[str, Any] = field(default_factory=dict)
    """The model and the texts of the search, which the file of the tables names."""

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
        new.write_text(table_json.text_of({**table.to_dict(), table_json.SEARCHED_ON: self.searched_on}))
        new.replace(self.table)
