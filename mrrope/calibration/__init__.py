"""``mrrope calibrate``: search for the frequency table with the lowest loss of a model on a text.

The search needs forward passes only. Needs the extra ``eval``; ``import mrrope`` imports nothing of this package.
"""
