"""Plumbing that the commands share: options, output files, progress bars, plots, machine description."""
