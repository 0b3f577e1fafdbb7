"""Mixed-radix rotary position embeddings: exact frequency tables, and fused ops that rotate by them."""

from pathlib import Path

from mrrope.rotation import rotary, rotary_
from mrrope.tables import METHODS, FrequencyTable, frequency_table

__version__ = Path(__file__).with_name("VERSION").read_text().strip()

__all__ = ["METHODS", "FrequencyTable", "__version__", "frequency_table", "rotary", "rotary_"]
