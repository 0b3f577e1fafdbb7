"""Models of transformers: ``patch``, the probes behind it, and a model's own RoPE."""
