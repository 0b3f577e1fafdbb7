"""``mrrope plot``: the theory of a frequency table, computed and drawn."""
