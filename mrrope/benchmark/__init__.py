"""``mrrope bench``: time and error of the rotary op beside a copy of the same bytes, transformers and installed peers.

A peer is added in peers.py, a case in workloads.py.
"""
