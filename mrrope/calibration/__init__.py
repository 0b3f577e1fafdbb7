"""``mrrope calibrate``: search for the frequency tables with the lowest loss of a model on a text.

One table is found by forward passes only; by gradient, also one per layer or key head. Needs the extra ``eval``;
``import mrrope`` imports nothing of this package.
"""
