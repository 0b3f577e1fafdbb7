"""Finds the frequency table that suits a model and a text, by forward passes alone: ``mrrope calibrate``.

Needs the extra ``eval``; nothing here is imported by ``import mrrope``.
"""
