"""What the theory says of a frequency table, computed and drawn: ``mrrope plot``."""
