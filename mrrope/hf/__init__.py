"""Models of transformers: ``patch``, and how a model's own RoPE is read."""
