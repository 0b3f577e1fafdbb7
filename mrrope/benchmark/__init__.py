"""How fast the rotation is here: beside a copy of the same bytes, transformers, and every peer that is installed."""
