"""Fused kernels for modules other than the rotation."""
