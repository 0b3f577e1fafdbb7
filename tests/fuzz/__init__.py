"""Fuzzer: random op calls against a float64 reference, and random runs of patched tiny models against stock ones."""
