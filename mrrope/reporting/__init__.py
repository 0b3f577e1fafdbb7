"""What every command shares: plots, output files, optional packages."""
