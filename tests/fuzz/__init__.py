"""Random calls of the ops and random runs of tiny models, checked against float64 and against each other."""
