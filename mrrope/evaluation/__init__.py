"""What a model makes of long texts under each frequency table: ``mrrope eval``.

Needs the extra ``eval``; nothing here is imported by ``import mrrope``.
"""
