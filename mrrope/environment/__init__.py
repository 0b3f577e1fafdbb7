"""``mrrope env``: versions, build, kernels and GPU, with what to fix; the text of a bug report.

Nothing outside this package is imported at module level but the standard library, so that the report is there where
torch, the compiled parts or an optional package are missing or broken.
"""
