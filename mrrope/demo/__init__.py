"""``mrrope demo``: a real model reads past its native length with several methods."""
