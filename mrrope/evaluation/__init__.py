"""``mrrope eval``: perplexity by context length and retrieval tasks of a model under several frequency tables.

Needs the extra ``eval``; ``import mrrope`` imports nothing of this package.
"""
