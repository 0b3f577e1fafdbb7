"""Models of transformers: what ``patch`` does to them, and how their own RoPE is read."""
